"""The fused layout: the same numbers and outputs, one product each, in place, on a mesh, and from a checkpoint."""

import dataclasses
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.fused import Group, fuse, group_of, unfuse
from kitty_jax.models.names import hf_name_of, hf_names
from kitty_jax.models.registry import (
    abstract_params,
    config_from_name,
    param_count,
    params_of,
    random_model,
)
from kitty_jax.models.sharding import make_mesh, param_sharding, partition_spec
from tests.models import checkpoint_files as files

NAMES = ("qwen3-8b", "qwen2.5-7b", "llama3.1-8b")
TOKENS = jnp.arange(24).reshape(2, 12) * 5 % 64
POSITIONS = jnp.broadcast_to(jnp.arange(12), (2, 12))


def tiny(name, **changes):
    sizes = {"vocab_size": 64, "embed_dim": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2}
    return dataclasses.replace(config_from_name(name), **{**sizes, "head_dim": 16, "dtype": "float32", **changes})


@jax.jit
def logits(model):
    caches = (None,) * model.config.num_layers
    return model.logits(model(TOKENS, POSITIONS, caches, jax.tree_util.Partial(causal_attend))[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_unfused_model(name, dtype):
    config = tiny(name, dtype=dtype)
    want, got = logits(random_model(config)), logits(fuse(random_model(config)))
    # Equal bit for bit where a product's order of summation does not depend on its width, as on a CPU.
    scale = float(jnp.abs(want).max())
    relative = 0 if jax.default_backend() == "cpu" else {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=relative * scale)


@pytest.mark.parametrize("name", NAMES)
def test_the_heads_stand_where_their_kv_head_is(name):
    config = tiny(name)
    before, after = params_of(random_model(config)), params_of(fuse(random_model(config)))
    for leaf in ("weight", "bias") if config.qkv_bias else ("weight",):
        qkv = after["layers", 1, "attn", "qkv", leaf]
        assert qkv.shape[:3] == (2, 5, 16)  # three query heads, the key and the value of each KV head
        for kind, heads in (("q", range(6)), ("k", range(2)), ("v", range(2))):
            part = before["layers", 1, "attn", kind, leaf]
            for head in heads:
                kv_head, place = {"q": (head // 3, head % 3), "k": (head, 3), "v": (head, 4)}[kind]
                np.testing.assert_array_equal(qkv[kv_head, place], part[head * 16 : (head + 1) * 16])
    gate_up = after["layers", 1, "mlp", "gate_up", "weight"]
    for i, kind in enumerate(("gate", "up")):
        np.testing.assert_array_equal(gate_up[i], before["layers", 1, "mlp", kind, "weight"])


@pytest.mark.parametrize("name", NAMES)
def test_unfuse_is_the_inverse(name):
    config = tiny(name)
    before, model = params_of(random_model(config)), unfuse(fuse(random_model(config)))
    assert model.config == config
    after = params_of(model)
    assert set(after) == set(before)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_parameters_and_the_shapes_of_the_configuration(name):
    config = config_from_name(name)
    fused = dataclasses.replace(config, fused=True)
    assert param_count(fused) == param_count(config)
    small = tiny(name, fused=True)
    got = params_of(fuse(random_model(tiny(name))))
    assert {path: x.shape for path, x in got.items()} == {path: x.shape for path, x in abstract_params(small).items()}
    assert {path: x.shape for path, x in params_of(random_model(small)).items()} == {p: x.shape for p, x in got.items()}


def test_one_product_each():
    """Four products a layer and the head: q, k, v in one, gate and up in one, both output projections, the logits."""

    def products(model):
        plain = jax.make_jaxpr(lambda m: m.logits(m(TOKENS, POSITIONS, (None,) * 2, lambda c, q, k, v: (q, c))[0]))
        return str(plain(model)).count("dot_general")

    model = random_model(tiny("qwen3-8b"))
    assert products(model) == 2 * 7 + 1
    assert products(fuse(model)) == 2 * 4 + 1


def test_the_old_arrays_are_dropped_and_the_rest_is_not_copied():
    model = random_model(tiny("qwen3-8b"))
    params = params_of(model)
    old = [weakref.ref(params["layers", i, "mlp", "up", "weight"]) for i in range(2)]
    kept = {path: x.unsafe_buffer_pointer() for path, x in params.items() if group_of(path) is None}
    del params
    fused = fuse(model)
    gc.collect()
    assert fused is model
    assert [ref() for ref in old] == [None, None]
    now = params_of(model)
    assert {path: now[path].unsafe_buffer_pointer() for path in kept} == kept
    assert fuse(model) is model
    assert model.config.fused


def test_groups():
    parts = tuple(("layers", 3, "attn", part, "bias") for part in "qkv")
    assert all(group_of(path) == Group(("layers", 3, "attn", "qkv", "bias"), parts) for path in parts)
    assert group_of(("layers", 3, "mlp", "up", "weight")).path == ("layers", 3, "mlp", "gate_up", "weight")
    for path in (("embed", "weight"), ("layers", 3, "attn", "o", "weight"), ("layers", 3, "mlp", "down", "weight")):
        assert group_of(path) is None


def test_checkpoints_have_no_fused_names():
    config = tiny("qwen3-8b", fused=True)
    with pytest.raises(ValueError, match=r"unfuse the model .* or give its config with fused=False"):
        hf_names(config)
    with pytest.raises(KeyError):
        hf_name_of(("layers", 0, "attn", "qkv", "weight"))


@pytest.mark.parametrize("name", files.NAMES)
def test_loading_fused(name, tmp_path):
    directory = files.copy_golden(name, tmp_path / name)
    want, got = params_of(fuse(load_model(directory))), params_of(load_model(directory, fused=True))
    assert set(got) == set(want)
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value)


def test_every_fused_matrix_is_split():
    mesh = AbstractMesh((1, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for path, leaf in abstract_params(dataclasses.replace(config_from_name("qwen3-8b"), fused=True)).items():
        spec = param_sharding(mesh, path, leaf.shape).spec
        assert spec.count("model") == (leaf.ndim > 1)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_mesh(name):
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, has {jax.device_count()}")
    mesh = make_mesh(2, 2, jax.devices()[:4])
    config = tiny(name)
    want, whole = logits(random_model(config)), params_of(fuse(random_model(config)))
    model = fuse(random_model(config, mesh=mesh))
    for path, value in params_of(model).items():
        assert value.sharding.spec == partition_spec(path)
        np.testing.assert_array_equal(value, whole[path])
    np.testing.assert_allclose(logits(model), want, atol=1e-4)
    text = logits.lower(model).compile().as_text()
    # Slices of the products stay on their device: the only exchanges are sums, and gathers of the embedding and logits.
    assert not re.search(r"all-to-all|collective-permute", text)
    for path, value in params_of(unfuse(model)).items():
        assert value.sharding.spec == partition_spec(path)
