"""Named configurations, parameters and placement: shapes alone for large models, random weights for small ones."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kitty_jax.models import registry
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.params import (
    abstract_params,
    hf_targets,
    hf_tensors,
    may_ignore,
    model_from_params,
    param_count,
    params_of,
)
from kitty_jax.models.registry import CONFIG_NAMES, config_from_name, random_model
from kitty_jax.models.sharding import check_mesh, make_mesh, param_sharding, param_shardings, partition_spec

# The totals that the published checkpoints state.
PARAMS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
}


def tiny(name, **changes):
    sizes = {"vocab_size": 64, "embed_dim": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return dataclasses.replace(config_from_name(name), **{**sizes, "head_dim": 16, **changes})


def abstract_mesh(data, model, names=("data", "model"), kind=AxisType.Auto):
    return AbstractMesh((data, model), names, axis_types=(kind, kind))


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_checkpoints_fill_and_meshes_split_every_parameter(name):
    config = config_from_name(name)
    targets, params = hf_targets(config), abstract_params(config)
    assert param_count(config) == PARAMS[name]
    filled = collections.Counter()
    for path, _, shape in targets.values():
        filled[path] += math.prod(shape)
    assert filled == {path: leaf.size for path, leaf in params.items()}
    per_layer = 9 + 2 * config.qk_norm + 3 * config.qkv_bias
    assert len(targets) == config.num_layers * per_layer + 2 + (not config.tied_head)
    assert f"model.layers.{config.num_layers - 1}.mlp.down_proj.weight" in targets
    mesh = abstract_mesh(1, math.gcd(config.num_kv_heads, config.vocab_size))  # 1 for SmolLM2, which has 3 KV heads
    for path, sharding in param_shardings(mesh, config).items():
        norm = params[path].ndim == 1 and path[-1] == "weight"
        assert sharding.spec.count("model") == (0 if norm else 1)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2.5-7b"])
def test_the_heads_stand_where_their_kv_head_is(name):
    config = tiny(name, num_heads=6, dtype="float32")
    model = random_model(config)
    params, tensors = params_of(model), hf_tensors(model)
    assert {name: x.shape for name, x in tensors.items()} == {n: t.shape for n, t in hf_targets(config).items()}
    for leaf in ("weight", "bias") if config.qkv_bias else ("weight",):
        qkv = params["layers", 1, "attn", "qkv", leaf]
        assert qkv.shape[:3] == (2, 5, 16)  # three query heads, the key and the value of each KV head
        for kind, heads in (("q", range(6)), ("k", range(2)), ("v", range(2))):
            for head in heads:
                kv_head, place = {"q": (head // 3, head % 3), "k": (head, 3), "v": (head, 4)}[kind]
                rows = tensors[f"model.layers.1.self_attn.{kind}_proj.{leaf}"][head * 16 : (head + 1) * 16]
                np.testing.assert_array_equal(qkv[kv_head, place], rows)
    for i, kind in enumerate(("gate", "up")):
        wanted = tensors[f"model.layers.1.mlp.{kind}_proj.weight"]
        np.testing.assert_array_equal(params["layers", 1, "mlp", "gate_up", "weight"][i], wanted)


def test_harmless_surplus_tensors():
    tied, untied = config_from_name("qwen3-0.6b"), config_from_name("qwen3-8b")
    assert may_ignore(tied, "lm_head.weight")
    assert not may_ignore(untied, "lm_head.weight")
    assert may_ignore(untied, "model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not may_ignore(untied, "model.layers.3.self_attn.q_proj.bias")


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'qwen4'; known names: qwen3-0\.6b"):
        config_from_name("qwen4")


def test_model_from_params_keeps_the_arrays_and_names_every_misfit():
    config = tiny("qwen2.5-0.5b")
    params = params_of(random_model(config))
    assert all(array is params[path] for path, array in params_of(model_from_params(config, params)).items())
    params["extra",] = params.pop(("norm", "weight"))
    params["embed", "weight"] = params["embed", "weight"].astype(jnp.float32)
    with pytest.raises(ValueError) as error:
        model_from_params(config, params)
    for part in ("missing norm/weight", "surplus extra", "embed/weight is float32(64, 24), wanted bfloat16(64, 24)"):
        assert part in str(error.value)


def test_random_model_is_reproducible_and_exercises_every_parameter():
    config = tiny("qwen2.5-0.5b", dtype="float32")
    one, same, other = (params_of(random_model(config, seed)) for seed in (3, 3, 4))
    for path, value in one.items():
        np.testing.assert_array_equal(value, same[path])
        assert np.abs(value - other[path]).max() > 0
        assert np.ptp(value) > 0
    np.testing.assert_allclose(np.std(one["layers", 0, "mlp", "down", "weight"]), 32**-0.5, rtol=0.1)
    assert np.abs(one["layers", 0, "attn", "o", "weight"] - one["layers", 1, "attn", "o", "weight"]).max() > 0


@pytest.mark.parametrize("meshed", [False, True])
def test_large_leaves_are_made_in_blocks_of_bounded_size(meshed, monkeypatch):
    if jax.device_count() < 2:
        pytest.skip(f"needs 2 devices, has {jax.device_count()}")
    monkeypatch.setattr(registry, "BLOCK_ELEMENTS", 2**12)
    mesh = make_mesh(1, 2, jax.devices()[:2]) if meshed else None
    for path, shape in ((("embed", "weight"), (512, 384)), (("layers", 0, "mlp", "down", "weight"), (384, 512))):
        axis = 1 if path == ("embed", "weight") else 0
        sharding = mesh and param_sharding(mesh, path, shape)
        registry._initializer.cache_clear()  # the block size is not among its arguments
        make = registry._initializer("matrix", shape, jnp.dtype("bfloat16"), sharding, axis)
        compiled = make.lower(jax.random.key(0)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * 512 * 384  # half a float32 copy
        assert not re.search(r"all-(gather|reduce|to-all)|collective-permute", compiled.as_text())
        values = np.asarray(make(jax.random.key(0)), np.float32)
        alone = registry._initializer("matrix", shape, jnp.dtype("bfloat16"), None, axis)(jax.random.key(0))
        np.testing.assert_array_equal(values, np.asarray(alone, np.float32))
        np.testing.assert_allclose(values.std(), shape[-1] ** -0.5, rtol=0.02)
        assert len(np.unique(values[::128, ::128])) > 10  # blocks are not copies of each other
        slices = np.split(values, 16, axis=axis)
        assert all(np.abs(slices[0] - other).max() > 0 for other in slices[1:])
    registry._initializer.cache_clear()


def test_partitions():
    assert partition_spec(("layers", 11, "attn", "qkv", "bias")) == PartitionSpec("model", None, None)
    assert partition_spec(("layers", 11, "attn", "o", "weight")) == PartitionSpec(None, "model")
    assert partition_spec(("norm", "weight")) == PartitionSpec()
    with pytest.raises(KeyError, match="layers/0/mlp/router/weight"):
        partition_spec(("layers", 0, "mlp", "router", "weight"))


def test_mesh_errors():
    config = config_from_name("qwen3-8b")
    with pytest.raises(ValueError, match=r"'model' axis of 16 does not divide \{'num_kv_heads': 8\}; .* divides 8"):
        check_mesh(abstract_mesh(1, 16), config)
    with pytest.raises(ValueError, match="axes 'data' and 'model'"):
        check_mesh(abstract_mesh(2, 2, ("x", "y")), config)
    with pytest.raises(ValueError, match=r"needs a mesh of Auto axes, got .*Explicit.*make_mesh"):
        check_mesh(abstract_mesh(1, 2, kind=AxisType.Explicit), config)
    with pytest.raises(ValueError, match=r"embed/weight of shape \(10, 4\) cannot be split 4 ways"):
        param_sharding(abstract_mesh(1, 4), ("embed", "weight"), (10, 4))


def test_random_model_on_a_mesh():
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, has {jax.device_count()}")
    mesh = make_mesh(2, 2, jax.devices()[:4])
    config = tiny("qwen2.5-0.5b", dtype="float32")
    alone, spread = random_model(config), random_model(config, mesh=mesh)
    whole = params_of(alone)
    for path, value in params_of(spread).items():
        assert value.sharding.spec == partition_spec(path)
        np.testing.assert_array_equal(value, whole[path])

    @jax.jit
    def logits(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(8), tokens.shape)
        return model.logits(model(tokens, positions, (None, None), causal_attend)[0])

    tokens = jnp.arange(16).reshape(2, 8) % config.vocab_size
    np.testing.assert_allclose(logits(alone, tokens), logits(spread, tokens), atol=1e-4)
    # Slices of the products stay on their device: the only exchanges are sums, and gathers of the embedding and logits.
    assert not re.search(r"all-to-all|collective-permute", logits.lower(spread, tokens).compile().as_text())


@pytest.mark.parametrize("data, model", [(3, 7), (0, 1)])
def test_a_mesh_needs_its_devices(data, model):
    with pytest.raises(ValueError, match=f"data={data} x model={model} needs {data * model} devices, there are"):
        make_mesh(data, model)
