"""scripts/convert.py: what it writes loads again, here and in transformers, and it destroys nothing unasked."""

import json
import os
import subprocess
import sys
import sysconfig
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.export import TOKENIZER_FILES, convert_checkpoint, shard_names
from kitty_jax.models.hf_config import config_from_hf
from kitty_jax.models.params import hf_targets, params_of
from kitty_jax.models.safetensors_dir import write_safetensors
from kitty_jax.models.tokenizer import import_transformers, load_tokenizer, stop_token_ids
from scripts import convert
from tests.models.checkpoint_files import (
    GOLDEN,
    byte_level_tokenizer,
    copy_golden,
    edit_config,
    golden_config,
    write_gguf,
)


def same_parameters(a, b):
    left, right = params_of(a), params_of(b)
    assert set(left) == set(right)
    return all(np.array_equal(np.asarray(left[path]), np.asarray(right[path])) for path in left)


def tiny_gguf(path, golden="qwen3", kind=Kind.Q8_0):
    write_gguf(path, golden, kind, metadata=byte_level_tokenizer())
    return path


@pytest.mark.parametrize("golden", ["llama", "qwen2", "qwen3_yarn"])
def test_a_converted_gguf_file_is_the_same_model_and_transformers_reads_it(tmp_path, golden, capsys):
    source, out = tiny_gguf(tmp_path / "m.gguf", golden, Kind.F16), tmp_path / "out"
    assert convert.main([str(source), str(out)]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    ours, again = load_model(source), load_model(out)
    assert again.config == ours.config
    assert same_parameters(ours, again)
    tokenizer, other = load_tokenizer(source), load_tokenizer(out)
    assert other.encode("the cat <|eos|>") == tokenizer.encode("the cat <|eos|>")
    assert other.chat_template == tokenizer.chat_template
    assert stop_token_ids(out) == stop_token_ids(source)
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(out, local_files_only=True)
    wanted = golden_config(golden)
    for key in ("architectures", "hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, key) == wanted[key], key
    assert config.rope_parameters["rope_theta"] == wanted["rope_parameters"]["rope_theta"]
    assert str(config.dtype) in ("float32", "torch.float32")
    theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert theirs.encode("the cat 12") == tokenizer.encode("the cat 12")
    generation = transformers.GenerationConfig.from_pretrained(out, local_files_only=True)
    assert generation.eos_token_id == byte_level_tokenizer()["tokenizer.ggml.eos_token_id"]


def test_a_directory_keeps_its_config_and_files(tmp_path):
    source = copy_golden("qwen2", tmp_path / "in")
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5], "top_k": 20}')
    edit_config(source, torch_dtype="float32")
    convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("in", "out"))
    assert after.pop("dtype") == "bfloat16"
    assert after == {key: value for key, value in before.items() if key not in ("dtype", "torch_dtype")}
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tensors_written_are_the_rounded_ones(tmp_path, dtype):
    convert_checkpoint(GOLDEN / "qwen3", tmp_path / "out", dtype=dtype)
    written, stored = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(GOLDEN / "qwen3" / "model.safetensors"),
    )
    assert len(written) > 10
    for name, value in written.items():
        assert value.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(value, stored[name].astype(jnp.dtype(dtype)))


def test_weights_above_the_limit_are_split(tmp_path):
    assert convert.main([str(GOLDEN / "qwen3"), str(tmp_path / "out"), "--max-shard-gb", "2e-5"]) == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(v.nbytes for path in shards for v in load_file(path).values())
    assert all(sum(v.nbytes for v in load_file(path).values()) <= 20_000 for path in shards)
    assert same_parameters(load_model(tmp_path / "out"), load_model(GOLDEN / "qwen3"))


def test_shard_names():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1}
    assert shard_names(sizes, 100) == {"model.safetensors": ["a", "b", "c", "d"]}
    assert list(shard_names(sizes, 8).values()) == [["a", "b"], ["c"], ["d"]]
    assert list(shard_names(sizes, 8)) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_memory_is_bounded_by_a_shard_and_a_tensor(tmp_path):
    """Arrays of numpy alone are counted: 64 MB in float32, matrices of at most 2 MB, written in shards of 8 MB."""
    source = copy_golden("qwen3", tmp_path / "in")
    edit_config(source, hidden_size=512, head_dim=128, intermediate_size=512, num_hidden_layers=16, layer_types=None)
    targets = hf_targets(config_from_hf(json.loads((source / "config.json").read_text())))
    save_file(
        {name: np.ones(target.shape, np.float32) for name, target in targets.items()}, source / "model.safetensors"
    )
    sizes = [4 * int(np.prod(target.shape)) for target in targets.values()]
    convert_checkpoint(GOLDEN / "qwen3", tmp_path / "warm")  # so that caches and imports are not counted
    tracemalloc.start()
    convert_checkpoint(source, tmp_path / "out", dtype="bfloat16", max_shard_bytes=8_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert sum(sizes) / 2 > 3 * 8e6  # what a conversion that holds everything would need
    assert peak < 8e6 + max(sizes) + 1e6


def test_arrays_are_written_by_value_whatever_their_strides(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(tmp_path / "x.safetensors", {"a": values.T, "b": values[:, ::2].astype(jnp.bfloat16)})
    written = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(written["a"], values.T)
    np.testing.assert_array_equal(written["b"], values[:, ::2].astype(jnp.bfloat16))
    assert written["b"].dtype == jnp.bfloat16
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be written: "):
        write_safetensors(tmp_path / "no" / "x.safetensors", {"a": np.zeros(3, np.float32)})


def test_the_script_runs_from_a_checkout_that_is_not_installed(tmp_path):
    # -S leaves out what an editable installation adds to the path; dependencies come through PYTHONPATH.
    command = [sys.executable, "-S", convert.__file__, str(GOLDEN / "qwen3"), "out", "--no-tokenizer"]
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "config.json").is_file()


# Refusals


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert convert.main([str(GOLDEN / "qwen3"), str(out)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_source_and_destination_must_differ(tmp_path):
    source = copy_golden("qwen3", tmp_path / "in")
    before = (source / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="same directory"):
        convert_checkpoint(source, tmp_path / "in" / ".." / "in", force=True)
    assert (source / "model.safetensors").read_bytes() == before


def test_a_tokenizer_that_cannot_be_rebuilt_stops_before_writing(tmp_path, capsys):
    metadata = {**byte_level_tokenizer(), "tokenizer.ggml.pre": "tekken"}
    write_gguf(tmp_path / "m.gguf", "qwen3", metadata=metadata)
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert "'tekken' is not supported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "out"), "--no-tokenizer"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_an_interrupted_conversion_is_not_a_checkpoint(tmp_path):
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(GOLDEN / "qwen3", tmp_path / "out", progress=stop)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path / "out")


def test_force_replaces_an_earlier_checkpoint_and_nothing_else(tmp_path):
    out, source = tmp_path / "out", copy_golden("qwen3", tmp_path / "in")
    edit_config(source, bos_token_id=None, eos_token_id=None)
    convert_checkpoint(GOLDEN / "qwen3_yarn", out, max_shard_bytes=20_000)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        (out / name).write_text('{"eos_token_id": 7}')
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):  # before the source is opened
        convert_checkpoint(tmp_path / "absent", out)
    assert convert.main([str(source), str(out), "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert same_parameters(load_model(out), load_model(GOLDEN / "qwen3"))


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_weights_have_the_permissions_of_other_files(tmp_path):
    before = os.umask(0o027)
    try:
        convert_checkpoint(GOLDEN / "qwen3", tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors"), 0o640
    )


@pytest.mark.parametrize("value", ["inf", "nan", "0", "1e-10", "1e305", "two"])
def test_a_shard_size_that_is_no_size_is_named_with_its_flag(tmp_path, capsys, value):
    assert convert.main([str(GOLDEN / "qwen3"), str(tmp_path / "out"), "--max-shard-gb", value]) == 2
    message = capsys.readouterr().err
    assert "argument --max-shard-gb: wanted a finite number of 10^9 bytes, at least 1e-9, got " in message
    assert not (tmp_path / "out").exists()
