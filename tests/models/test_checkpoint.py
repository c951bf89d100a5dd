"""Loading Hugging Face directories: values, dtypes, shards, meshes, progress, and everything that can be wrong."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.params import hf_tensors, params_of
from kitty_jax.models.safetensors_dir import SafetensorsDirectory
from kitty_jax.models.sharding import param_sharding
from tests.models.checkpoint_files import (
    GOLDEN,
    copy_golden,
    edit_config,
    golden_tensors,
    write_gguf,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def rewrite(directory, change):
    """Apply change(tensors) to the weights of a directory."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def shard(directory, count=3):
    """Split the weights of a directory over `count` files with an index; returns the file names."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


@pytest.mark.parametrize("name, sharded", [("llama", False), ("llama3", True), ("qwen2", True), ("qwen3", False)])
def test_parameters_are_the_stored_tensors(tmp_path, name, sharded):
    copy_golden(name, tmp_path)
    if sharded:
        shard(tmp_path)
    got, stored = hf_tensors(load_model(tmp_path)), golden_tensors(name)
    for tensor, value in got.items():
        np.testing.assert_array_equal(value, stored[tensor], err_msg=tensor)
    assert set(stored) - set(got) <= {"lm_head.weight"}


def test_stored_bfloat16_stays_and_config_json_does_not_overrule_it(tmp_path):
    copy_golden("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({k: v.astype(jnp.bfloat16) for k, v in tensors.items()}))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    model, stored = load_model(tmp_path), load_file(tmp_path / WEIGHTS)
    assert model.config.dtype == jnp.bfloat16
    for tensor, value in hf_tensors(model).items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(value), stored[tensor])


def test_mixed_dtypes_load_as_the_one_of_most_bytes(tmp_path):
    copy_golden("qwen3", tmp_path)
    rewrite(tmp_path, lambda t: t.update({k: v.astype(jnp.bfloat16) for k, v in t.items() if v.ndim == 2}))
    assert {value.dtype for value in hf_tensors(load_model(tmp_path)).values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16])
def test_dtype_casts_every_parameter(dtype):
    model, stored = load_model(GOLDEN / "qwen3", dtype=dtype), golden_tensors("qwen3")
    assert model.config.dtype == jnp.dtype(dtype)
    for tensor, value in hf_tensors(model).items():
        np.testing.assert_array_equal(np.asarray(value), stored[tensor].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["int8", "float64", "float99"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(CheckpointError, match=f"{dtype}.*give one of dtype=bfloat16, float16, float32"):
        load_model(GOLDEN / "qwen3", dtype=dtype)


def test_values_outside_float16_are_an_error_not_infinity(tmp_path):
    copy_golden("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["model.norm.weight"].__setitem__(3, 1e6))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has values outside float16"):
        load_model(tmp_path, dtype="float16")
    load_model(tmp_path, dtype="bfloat16")


def test_progress_counts_every_byte_and_names_every_tensor():
    calls = []
    model = load_model(GOLDEN / "llama", progress=lambda *call: calls.append(call))
    names = [name for _, _, name in calls]
    sizes = [value.nbytes for value in hf_tensors(model).values()]
    assert sorted(names) == sorted(hf_tensors(model))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (sum(sizes), sum(sizes))


# Meshes


def mesh(data, model):
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_every_parameter_goes_to_its_sharding(tmp_path, kind):
    path = GOLDEN / "qwen3"
    if kind == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(path, "qwen3")
    grid = mesh(2, 2)
    split, whole = load_model(path, mesh=grid), load_model(path)
    for (place, value), plain in zip(params_of(split).items(), params_of(whole).values(), strict=True):
        assert value.sharding == param_sharding(grid, place, value.shape), place
        np.testing.assert_array_equal(np.asarray(value), np.asarray(plain))
    halves = params_of(split)[("embed", "weight")].addressable_shards
    assert {shard.data.shape for shard in halves} == {(48, 32)}


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(SafetensorsDirectory, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(ValueError, match="num_kv_heads"):
        load_model(GOLDEN / "qwen3", mesh=mesh(1, 4))


# Tied heads


def test_an_equal_head_of_a_tied_model_is_left_out(tmp_path):
    copy_golden("qwen3", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    model = load_model(tmp_path)
    assert model.config.tied_head
    assert "lm_head.weight" not in hf_tensors(model)


def test_another_head_of_a_tied_model_is_refused(tmp_path):
    copy_golden("qwen3", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is in the file and differs.*tie_word_embeddings to false"
    ):
        load_model(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert "lm_head.weight" in hf_tensors(load_model(tmp_path))


# Refusals


def test_a_path_that_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file or directory.*never downloaded"):
        load_model(tmp_path / "Qwen" / "Qwen3-8B")
    with pytest.raises(CheckpointError, match=r"no config\.json in this directory \(it is empty\)"):
        load_model(tmp_path)
    shutil.copyfile(GOLDEN / "qwen3" / WEIGHTS, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"no config\.json in this directory \(it has model\.safetensors\)"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        load_model(tmp_path / WEIGHTS)


def without_weights(directory):
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def without_shards(directory):
    files = shard(directory)
    (directory / files[0]).unlink()
    (directory / files[2]).unlink()


def shard_without_a_tensor(directory):
    path = directory / shard(directory)[1]
    tensors = load_file(path)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, path)


def index(weight_map):
    def damage(directory):
        (directory / WEIGHTS).unlink()
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return damage


def config_bytes(text):
    return lambda directory: (directory / "config.json").write_bytes(text)


def config(**changes):
    return lambda directory: edit_config(directory, **changes)


def cut(size):
    return lambda directory: (directory / WEIGHTS).write_bytes((GOLDEN / "qwen3" / WEIGHTS).read_bytes()[:size])


def tensors(**changes):
    """Tensors by name with underscores for dots: replaced, or left out (None)."""

    def change(tensors):
        for name, value in changes.items():
            tensors[name.replace("__", ".")] = value
        for name in [name for name, value in tensors.items() if value is None]:
            del tensors[name]

    return lambda directory: rewrite(directory, change)


TRUNCATED = r"model\.safetensors: \d+ bytes that are not a complete safetensors file"


@pytest.mark.parametrize(
    "damage, message",
    [
        (without_weights, r"neither model\.safetensors nor .*pytorch_model\.bin.*not read"),
        (without_shards, r"2 of 3 shards named by .* are missing: model-00001-of-00003.safetensors, model-00003-"),
        (shard_without_a_tensor, r"its tensors are not those.*In the index only: .'model.*in the file only: .."),
        (index(["a"]), "'weight_map' must map"),
        (index({"a": 3}), "'weight_map' must map"),
        (index({"a": "../other.safetensors"}), "must lie beside the index"),
        (cut(0), TRUNCATED),
        (cut(4), TRUNCATED),
        (cut(500), TRUNCATED),
        (cut(-100), TRUNCATED),
        (config_bytes(b'{"model_type": "qwen3",'), r"config\.json: not valid JSON: .* at line 1, column \d+"),
        (config_bytes(b"\xff\xfe{}"), r"config\.json: not UTF-8"),
        (config_bytes(b"[1]"), r"config\.json: must hold a JSON object, holds a list"),
        (config(model_type="gemma3", architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM.*supported; supported:"),
        (config(rope_parameters={"rope_type": "longrope"}), "'longrope' is not supported; supported types:"),
        (config(tie_word_embeddings="false"), r"tie_word_embeddings.* expected bool, got str \(value: 'false'\)"),
        (config(num_hidden_layers=1 << 40), "1099511627776 layers, but 24 tensors in all"),
        (tensors(model__norm__weight=np.zeros(32, np.int8)), r"unsupported dtypes: \{'model\.norm\.weight': 'I8'\}"),
        (
            tensors(
                model__norm__weight=None,
                model__layers__1__mlp__up_proj__weight=None,
                model__vision__weight=np.zeros(3, np.float32),
                model__layers__0__input_layernorm__weight=np.zeros(7, np.float32),
            ),
            r"missing \(2\): model.layers.1.mlp.up_proj.weight, model.norm.weight; surplus \(1\): model.vision.weight; "
            r"wrong shape \(1\): model.layers.0.input_layernorm.weight is \[7\], the config wants \[32\]",
        ),
    ],
)
def test_a_damaged_directory_is_refused_by_name_in_one_line(tmp_path, damage, message):
    damage(copy_golden("qwen3", tmp_path))
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*{message}") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)
