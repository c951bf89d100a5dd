"""GGUF files: names, q and k rows, configs, quantization types, damaged and unsupported files."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kitty_jax.models import gguf_format
from kitty_jax.models.checkpoint import load_model, plan_checkpoint
from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.gguf_file import GgufCheckpoint, interleaved_to_halves
from kitty_jax.models.gguf_format import GgufContainer, GgufError, readable_kinds
from kitty_jax.models.gguf_rope import llama3_factors
from kitty_jax.models.params import hf_tensors
from kitty_jax.models.registry import config_from_hf
from kitty_jax.models.rope import RopeConfig, inverse_frequencies
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids
from tests.models.checkpoint_files import (
    GOLDEN,
    byte_level_tokenizer,
    gguf_name,
    golden_config,
    golden_tensors,
    interleave,
    logits_of,
    write_gguf,
)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_yarn"])
def test_logits_of_a_gguf_file_are_those_of_hugging_face(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", name)
    model = load_model(tmp_path / "m.gguf")
    golden = np.load(GOLDEN / name / "golden.npz")
    np.testing.assert_allclose(logits_of(model, golden["tokens"]), golden["logits"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_yarn"])
def test_the_config_of_a_gguf_file_is_that_of_the_directory(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", name)
    assert plan_checkpoint(tmp_path / "m.gguf").config == config_from_hf(golden_config(name), dtype="float32")


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_parameters_equal_what_dequantizing_gives(tmp_path, name, kind):
    held = write_gguf(tmp_path / "m.gguf", name, kind)
    got = hf_tensors(load_model(tmp_path / "m.gguf"))
    assert set(got) == set(held)
    for tensor, values in held.items():
        assert got[tensor].dtype == np.float32
        np.testing.assert_array_equal(got[tensor], values, err_msg=tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_rounds_the_dequantized_values_once(tmp_path, dtype):
    held = write_gguf(tmp_path / "m.gguf", "qwen3", Kind.Q8_0)
    model = load_model(tmp_path / "m.gguf", dtype=dtype)
    assert model.config.dtype == jnp.dtype(dtype)
    for tensor, values in hf_tensors(model).items():
        np.testing.assert_array_equal(values, held[tensor].astype(jnp.dtype(dtype)), err_msg=tensor)


def test_only_llama_files_have_their_q_and_k_rows_restored(tmp_path):
    for name, restored in (("llama3", True), ("qwen2", False), ("qwen3", False)):
        write_gguf(tmp_path / f"{name}.gguf", name)
        container, source = GgufContainer(tmp_path / f"{name}.gguf"), GgufCheckpoint(tmp_path / f"{name}.gguf")
        for part, short in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
            stored = container.read(f"blk.0.{short}.weight")
            read = source.read(f"model.layers.0.self_attn.{part}.weight")
            assert np.array_equal(stored, read) is not restored, (name, part)


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_restoring_rows_inverts_interleaving_for_matrices_and_biases(shape):
    values = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(interleaved_to_halves(interleave(values, 3), 3), values)


@pytest.mark.parametrize("kind", [Kind[name] for name in readable_kinds()], ids=lambda kind: kind.name)
def test_every_readable_type_is_read_in_blocks_of_rows(tmp_path, monkeypatch, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 5, max(2 * block, 8)
    raw = np.random.default_rng(0).integers(
        0, 60, (rows, columns // block * block_bytes), dtype=np.uint8
    )  # finite scales
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_format, "_BLOCK_VALUES", 2 * columns)  # two rows at a time, so the last block is short
    got = GgufContainer(tmp_path / "t.gguf").read("t")
    assert got.shape == (rows, columns)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, kind))


def test_metadata_and_shapes_are_those_written_as_python_values(tmp_path):
    extra = {"a.list": [1, 2, 3], "a.names": ["x", "ü", ""], "a.flag": True, "a.float": 0.5}
    write_gguf(tmp_path / "m.gguf", "qwen3", Kind.Q8_0, metadata=extra)
    container = GgufContainer(tmp_path / "m.gguf")
    assert {key: container.metadata[key] for key in extra} == extra
    assert container.metadata["a.flag"] is True
    assert not any(key.startswith("GGUF.") for key in container.metadata)
    tensors = golden_tensors("qwen3")
    assert container.shapes == {gguf_name(name): values.shape for name, values in tensors.items()}
    # Q8_0 stores 32 values in 34 bytes; vectors stay float32.
    sizes = {gguf_name(n): v.size // 32 * 34 if v.ndim == 2 else 4 * v.size for n, v in tensors.items()}
    assert container.nbytes == sizes


def test_a_file_is_parsed_once_for_model_tokenizer_and_stop_tokens(tmp_path, monkeypatch):
    parsed = []
    reader = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed.append(path) or reader(path))
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen3", metadata=byte_level_tokenizer())
    load_model(path)
    load_tokenizer(path)
    assert stop_token_ids(path) == (byte_level_tokenizer()["tokenizer.ggml.eos_token_id"],)
    assert parsed == [path]
    write_gguf(path, "qwen3", metadata={**byte_level_tokenizer(), "tokenizer.ggml.eos_token_id": 5})
    assert stop_token_ids(path) == (5,)  # another file under the same name is read again
    assert parsed == [path, path]


def test_the_head_is_tied_exactly_where_the_file_has_no_output_tensor(tmp_path):
    write_gguf(tmp_path / "untied.gguf", "llama3", extra=llama3_divisors())
    write_gguf(tmp_path / "tied.gguf", "llama3", drop=("output.weight",))
    assert not plan_checkpoint(tmp_path / "untied.gguf").config.tied_head
    assert plan_checkpoint(tmp_path / "tied.gguf").config.tied_head


# Rotary scaling


def llama3_divisors(**changes):
    config = golden_config("llama3")
    factors = llama3_factors({**LLAMA3, **changes}, config["head_dim"], config["rope_parameters"]["rope_theta"])
    return {"rope_freqs.weight": factors.astype(np.float32)}


def test_llama3_frequency_divisors_become_the_parameters_that_give_them(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama3", extra=llama3_divisors())
    rope = plan_checkpoint(tmp_path / "m.gguf").config.rope
    assert (rope.type, rope.factor, rope.original_max_position) == ("llama3", 8.0, 8192)
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), 16)
    np.testing.assert_allclose(inverse_frequencies(rope, 16), plain / llama3_divisors()["rope_freqs.weight"], rtol=1e-6)


def test_divisors_of_one_mean_plain_rotary_embedding(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama3", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert plan_checkpoint(tmp_path / "m.gguf").config.rope == RopeConfig(theta=10000.0)


def test_other_divisors_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama3", extra=llama3_divisors(original_max_position_embeddings=32))
    with pytest.raises(GgufError, match=r"rope_freqs\.weight does not follow LLaMA 3's rule"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "keys, wanted",
    [
        ({"type": "linear", "factor": 4.0}, RopeConfig(theta=10000.0, type="linear", factor=4.0)),
        ({"type": "none"}, RopeConfig(theta=10000.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "attn_factor": 0.5},
            RopeConfig(
                theta=10000.0,
                type="yarn",
                factor=4.0,
                original_max_position=64,
                attention_factor=0.5 * (0.1 * np.log(4.0) + 1.0),
            ),
        ),
    ],
)
def test_rotary_scaling_keys(tmp_path, keys, wanted):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={f"qwen3.rope.scaling.{key}": v for key, v in keys.items()})
    assert plan_checkpoint(tmp_path / "m.gguf").config.rope == wanted


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"type": "longrope", "factor": 4.0}, "'longrope' is not supported; supported: none, linear, yarn"),
        ({"type": "yarn", "factor": 4.0}, "original_context_length"),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_log_multiplier": 0.1},
            "yarn_log_multiplier",
        ),
    ],
)
def test_unsupported_rotary_scaling_is_refused(tmp_path, keys, message):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={f"qwen3.rope.scaling.{key}": v for key, v in keys.items()})
    with pytest.raises(GgufError, match=message):
        load_model(tmp_path / "m.gguf")


# Refusals


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ({"qwen3.block_count": None}, r"metadata key 'qwen3\.block_count' is missing"),
        ({"qwen3.expert_count": 8}, r"qwen3\.expert_count = 8 is not supported"),
        ({"qwen3.attention.value_length": 32}, "value_length = 32 but the head size is 16"),
        ({"qwen3.rope.dimension_count": 8}, "dimension_count = 8 but the head size is 16"),
        ({"qwen3.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"split.count": 3}, "split over 3 files; merge"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata=metadata)
    with pytest.raises(GgufError, match=message):
        load_model(tmp_path / "m.gguf")


def test_missing_surplus_and_misshapen_tensors_are_named_at_once(tmp_path):
    write_gguf(
        tmp_path / "m.gguf",
        "qwen3",
        metadata={"qwen3.feed_forward_length": 128},
        drop=("blk.0.attn_norm.weight", "output_norm.weight"),
        extra={"blk.0.ssm_conv1d.weight": np.zeros((4, 4), np.float32)},
    )
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path / "m.gguf")
    text = str(error.value)
    assert "missing (2): model.layers.0.input_layernorm.weight, model.norm.weight" in text
    assert "surplus (1): blk.0.ssm_conv1d.weight" in text
    assert "wrong shape (6)" in text
    assert "model.layers.1.mlp.down_proj.weight is [32, 64], the config wants [32, 128]" in text


def test_a_file_cut_at_any_place_is_truncated(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    data = (tmp_path / "m.gguf").read_bytes()
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    start, end = tensors[0].data_offset, tensors[-1].data_offset + tensors[-1].n_bytes
    cut = tmp_path / "cut.gguf"
    for size in (0, 10, 23, 24, 30, 200, *range(start - 90, start - 32, 7)):  # in the header
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=f"cut\\.gguf: {size} bytes .*(too few|truncated)|cut.gguf: truncated"):
            load_model(cut)
    for size in (start, start + 10, len(data) // 2, end - 1):  # in the tensors
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=f"cut.gguf: truncated: .* need {end} bytes, the file has {size}"):
            load_model(cut)
    cut.write_bytes(data[:end])
    load_model(cut)


def test_where_no_large_file_can_be_made_the_error_lacks_the_expected_size_only(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    data = (tmp_path / "m.gguf").read_bytes()[:-200]
    (tmp_path / "m.gguf").write_bytes(data)
    monkeypatch.setattr(gguf_format.tempfile, "NamedTemporaryFile", lambda: open(tmp_path / "no" / "folder", "wb"))
    with pytest.raises(GgufError, match=f"m.gguf: {len(data)} bytes that the gguf package cannot read.*truncated"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "offset, replacement, message",
    [
        (0, b"GGML", "not a GGUF file: it starts with b'GGML'"),
        (4, b"\x01\0\0\0", "GGUF version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, b"\xff" * 8, "truncated"),
        (24, b"\xff" * 7, "cannot read .*truncated, damaged"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, offset, replacement, message):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[offset : offset + len(replacement)] = replacement
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(GgufError, match=message):
        load_model(tmp_path / "m.gguf")


def test_a_type_that_the_gguf_package_does_not_know_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    data = (tmp_path / "m.gguf").read_bytes()
    name = b"output_norm.weight"
    place = data.index(name) + len(name) + 4 + 8  # after one dimension comes the type
    assert data[place : place + 4] == bytes([Kind.F32, 0, 0, 0])
    (tmp_path / "m.gguf").write_bytes(data[:place] + bytes([99]) + data[place + 1 :])
    with pytest.raises(GgufError, match=r"\b99\)? is not a valid GGMLQuantizationType.*newer gguf package"):
        load_model(tmp_path / "m.gguf")


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 32), np.int8), raw_dtype=Kind.I8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match=r"'t' is stored as I8.*readable types: F32, F16, Q4_0"):
        GgufContainer(tmp_path / "t.gguf").read("t")
