"""GGUF files: names, q and k rows, configs, quantization types, damaged and unsupported files."""

import random
import time
import tracemalloc

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kitty_jax.models import gguf_format
from kitty_jax.models.checkpoint import load_model, plan_checkpoint
from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.gguf_checkpoint import GgufCheckpoint, interleaved_to_halves, llama3_divisors
from kitty_jax.models.gguf_format import GgufContainer, GgufError
from kitty_jax.models.hf_config import config_from_hf
from kitty_jax.models.params import hf_tensors
from kitty_jax.models.rope import RopeConfig
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

LLAMA3 = RopeConfig(10_000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def write_tensor(path, raw, kind):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_yarn"])
def test_config_and_logits_are_those_of_the_hugging_face_model(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", name)
    model = load_model(tmp_path / "m.gguf")
    assert model.config == config_from_hf(golden_config(name), dtype="float32")
    golden = np.load(GOLDEN / name / "golden.npz")
    np.testing.assert_allclose(logits_of(model, golden["tokens"]), golden["logits"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, kind", [("llama3", Kind.F16), ("qwen2", Kind.Q8_0), ("qwen3", Kind.Q4_0)])
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


def test_every_type_that_gguf_reads_is_read_in_blocks_of_rows(tmp_path, monkeypatch):
    read = []
    for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        rows, columns = 5, max(2 * block, 8)
        shape = (rows, columns // block * block_bytes)
        raw = np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)  # finite scales
        try:
            want = gguf.quants.dequantize(raw, kind)
        except NotImplementedError:
            continue
        write_tensor(tmp_path / "t.gguf", raw, kind)
        monkeypatch.setattr(gguf_format, "_BLOCK_VALUES", 2 * columns)  # two rows at a time, so the last block is short
        got = GgufContainer(tmp_path / "t.gguf").read("t")
        assert got.shape == (rows, columns)
        np.testing.assert_array_equal(got, want)
        read.append(kind)
    assert len(read) > 20


def test_metadata_and_shapes_are_those_written_as_python_values(tmp_path):
    extra = {"a.list": [1, 2, 3], "a.names": ["x", "ü", ""], "a.flag": True, "a.float": 0.5}
    write_gguf(tmp_path / "m.gguf", "qwen3", Kind.Q8_0, metadata=extra)
    container = GgufContainer(tmp_path / "m.gguf")
    assert {key: container.metadata[key] for key in extra} == extra
    assert container.metadata["a.flag"] is True
    tensors = golden_tensors("qwen3")
    assert container.shapes == {gguf_name(name): values.shape for name, values in tensors.items()}
    # Q8_0 stores 32 values in 34 bytes; vectors stay float32.
    sizes = {gguf_name(n): v.size // 32 * 34 if v.ndim == 2 else 4 * v.size for n, v in tensors.items()}
    assert container.nbytes == sizes


def test_another_alignment(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("s", np.arange(3, dtype=np.float32))
    writer.add_tensor("t", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(GgufContainer(tmp_path / "t.gguf").read("t"), np.arange(5))


def test_the_head_is_tied_exactly_where_the_file_has_no_output_tensor(tmp_path):
    write_gguf(tmp_path / "untied.gguf", "llama3", extra=divisors(LLAMA3))
    write_gguf(tmp_path / "tied.gguf", "llama3", drop=("output.weight",))
    assert not plan_checkpoint(tmp_path / "untied.gguf").config.tied_head
    assert plan_checkpoint(tmp_path / "tied.gguf").config.tied_head


# Rotary scaling


def divisors(rope):
    return {"rope_freqs.weight": llama3_divisors(rope, 16).astype(np.float32)}


def test_llama3_frequency_divisors_become_the_parameters_that_give_them(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama3", extra=divisors(LLAMA3))
    assert plan_checkpoint(tmp_path / "m.gguf").config.rope == LLAMA3
    write_gguf(tmp_path / "m.gguf", "llama3", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert plan_checkpoint(tmp_path / "m.gguf").config.rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    "stored, message",
    [
        (divisors(RopeConfig(1e4, "llama3", 8.0, 32, 1.0, 4.0))["rope_freqs.weight"], "does not follow LLaMA 3's rule"),
        (np.full(8, -1, np.float32), r"factor = -1.0 \(wanted a finite number above 0\)"),
        (np.ones(5, np.float32), "has 5 values; head size 16 needs 8"),
    ],
)
def test_other_divisors_are_refused(tmp_path, stored, message):
    write_gguf(tmp_path / "m.gguf", "llama3", extra={"rope_freqs.weight": stored})
    with pytest.raises(GgufError, match=rf"rope_freqs\.weight.*{message}"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "keys, wanted",
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, RopeConfig(theta=1e4, type="linear", factor=4.0)),
        ({"scale_linear": 4.0}, RopeConfig(theta=1e4, type="linear", factor=4.0)),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, RopeConfig(theta=1e4)),
        ({"scaling.type": "none"}, RopeConfig(theta=1e4)),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 64,
                "scaling.attn_factor": 0.5,
            },
            RopeConfig(1e4, "yarn", 4.0, 64, attention_factor=0.5 * (0.1 * np.log(4.0) + 1.0)),
        ),
    ],
)
def test_rotary_scaling_keys(tmp_path, keys, wanted):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={f"qwen3.rope.{key}": value for key, value in keys.items()})
    assert plan_checkpoint(tmp_path / "m.gguf").config.rope == wanted


# Refusals


YARN = {f"qwen3.rope.scaling.{k}": v for k, v in (("type", "yarn"), ("factor", 4.0), ("original_context_length", 64))}


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: qwen3, qwen2, llama"),
        ({"qwen3.block_count": None}, r"metadata key 'qwen3\.block_count' is missing"),
        ({"qwen3.block_count": "two"}, r"qwen3\.block_count = 'two' is no int that makes sense there"),
        ({"qwen3.block_count": 1 << 31}, "2147483648 layers, but 24 tensors in all"),
        ({"qwen3.attention.head_count": 0}, r"head_count = 0 is no int that makes sense there"),
        ({"qwen3.expert_count": 8}, r"qwen3\.expert_count = 8 is not supported"),
        ({"qwen3.attention.value_length": 32}, "value_length = 32 but the head size is 16"),
        ({"qwen3.rope.dimension_count": 8}, "dimension_count = 8 but the head size is 16"),
        ({"qwen3.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"split.count": 3}, "split over 3 files; merge"),
        (YARN | {"qwen3.rope.scaling.type": "longrope"}, "'longrope' is not supported; supported: none, linear, yarn"),
        (YARN | {"qwen3.rope.scaling.original_context_length": None}, "original_context_length"),
        (YARN | {"qwen3.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1.* is not supported"),
        (YARN | {"qwen3.rope.scaling.yarn_ext_factor": 0.5}, "an extrapolation factor other than 1"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


def test_files_that_contradict_themselves_or_hold_no_model(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3", drop=("token_embd.weight",))
    with pytest.raises(GgufError, match=r"'token_embd\.weight' is missing"):
        load_model(tmp_path / "m.gguf")
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    write_gguf(tmp_path / "m.gguf", "llama3", metadata=metadata, extra=divisors(LLAMA3))
    with pytest.raises(GgufError, match=r"both rope_freqs\.weight and rotary scaling of type 'linear'"):
        load_model(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={"general.alignment": 0})
    with pytest.raises(GgufError, match=r"general\.alignment = 0"):
        load_model(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.attention.head_count_kv": [2, 2]})
    assert plan_checkpoint(tmp_path / "m.gguf").config.num_kv_heads == 2


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
    for size in (0, 7, 8, 23, 24, 30, 200, *range(start - 90, start - 32, 7)):  # in the header
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf: truncated.* Fetch it again"):
            load_model(cut)
    for size in (start, start + 10, len(data) // 2, end - 1):  # in the tensors
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=rf"cut\.gguf: truncated: .* need {end} bytes, the file has {size}"):
            load_model(cut)
    cut.write_bytes(data[:end])
    load_model(cut)


KIND_OF_NORM = b"output_norm.weight" + b"\1\0\0\0" + b"\x20" + b"\0" * 7  # one dimension of 32; its type follows


@pytest.mark.parametrize(
    "place, replacement, message",
    [
        (0, b"GGML", "not a GGUF file: it starts with b'GGML'"),
        (4, b"\x01\0\0\0", "GGUF version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, b"\xff" * 8, "truncated or damaged"),  # the number of tensors
        (16, b"\xff" * 8, "truncated or damaged"),  # and of metadata
        (24, b"\xff" * 7, "truncated or damaged: its header wants .* bytes from byte 32"),
        (b"qwen3.block_count", b"qwen3.block_co\xff", r"damaged: the text .* is not UTF-8"),
        (b"qwen3.block_count", b"qwen3.context_len", "twice|missing"),
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", "'blk.1.ffn_up.weight' stands twice"),
        (b"qwen3.block_count", b"qwen3.block_count\x63", "metadata type 99 before byte .* is not known"),
        # An array of one byte each: 2^40 of them are more than the file has.
        (b"qwen3.block_count", b"qwen3.block_count\x09\0\0\0\0\0\0\0" + b"\0" * 5 + b"\1", "wants 1099511627776 bytes"),
        (b"output_norm.weight", b"output_norm.weight\x05", "a tensor of 5 dimensions"),
        (b"output_norm.weight", KIND_OF_NORM[:22] + b"\0", r"a tensor of shape \(0,\)"),
        (b"output_norm.weight", KIND_OF_NORM + bytes([99]), r"99\)? is not a valid GGMLQuant.*newer gguf package"),
        (b"output_norm.weight", KIND_OF_NORM + bytes([Kind.Q4_K]), r"shape \(32,\) in Q4_K blocks of 256"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, place, replacement, message):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    place = place if isinstance(place, int) else data.index(place)
    data[place : place + len(replacement)] = replacement
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(GgufError, match=message) as error:
        load_model(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_damage_anywhere_in_the_header_costs_neither_time_nor_memory(tmp_path):
    """Whatever the bytes, a file loads or is refused by an error of this package."""
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata=byte_level_tokenizer())
    data = (tmp_path / "m.gguf").read_bytes()
    header = gguf.GGUFReader(tmp_path / "m.gguf").tensors[0].data_offset
    plan_checkpoint(tmp_path / "m.gguf")  # imports and caches are not counted
    load_tokenizer(tmp_path / "m.gguf")
    rng = random.Random(0)
    refused, slowest = [], 0.0
    tracemalloc.start()
    for _ in range(100):
        count = rng.choice((1, 4, 8))
        place = rng.randrange(header - count)
        wrong = rng.choice((rng.randbytes(count), b"\xff" * count, b"\0" * count))
        (tmp_path / "m.gguf").write_bytes(data[:place] + wrong + data[place + count :])
        start = time.perf_counter()
        for read in (plan_checkpoint, load_tokenizer, stop_token_ids):
            try:
                read(tmp_path / "m.gguf")
            except CheckpointError as error:
                refused.append(str(error))
        slowest = max(slowest, time.perf_counter() - start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(refused) > 50
    assert not any("\n" in text for text in refused)
    assert peak < 64e6
    assert slowest < 5  # a second would do, but for a busy machine


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    write_tensor(tmp_path / "t.gguf", np.zeros((2, 32), np.int8), Kind.I8)
    with pytest.raises(GgufError, match=r"'t' is stored as I8, which the gguf package cannot turn into floats"):
        GgufContainer(tmp_path / "t.gguf").read("t")
