"""The decoder by itself: dtypes, the attend contract, head mapping, positions, and errors of its configuration."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kitty_jax.models.decoder import DecoderConfig, RMSNorm, causal_attend
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.rope import RopeConfig

TINY = DecoderConfig(
    family="qwen3",
    vocab_size=64,
    embed_dim=24,
    mlp_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rope=RopeConfig(),
    rms_eps=1e-6,
    qk_norm=True,
    qkv_bias=False,
    tied_head=True,
    dtype=jnp.float32,
)
TOKENS = jnp.arange(12).reshape(2, 6) * 5 % 64
POSITIONS = jnp.broadcast_to(jnp.arange(6), (2, 6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_follow_the_config_and_logits_are_float32(dtype):
    model = random_model(dataclasses.replace(TINY, dtype=dtype))
    seen = []

    def attend(cache, q, k, v):
        seen.append({x.dtype.name for x in (q, k, v)})
        return causal_attend(cache, q, k, v)

    with jax.numpy_dtype_promotion("strict"):
        hidden, _ = model(TOKENS, POSITIONS, (None, None), attend)
        logits = model.logits(hidden)
    assert seen == [{dtype}] * 2
    assert (hidden.dtype.name, hidden.shape) == (dtype, (2, 6, 24))
    assert (logits.dtype, logits.shape) == (jnp.float32, (2, 6, 64))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {dtype}


def test_caches_pass_through_attend_in_layer_order():
    def attend(cache, q, k, v):
        return causal_attend(cache + 1, q, k, v)

    _, caches = random_model(TINY)(TOKENS, POSITIONS, (10, 20), attend)
    assert caches == (11, 21)


def test_wrong_number_of_caches_is_refused():
    with pytest.raises(ValueError, match="2 layers and needs as many caches: 3"):
        random_model(TINY)(TOKENS, POSITIONS, (None,) * 3, causal_attend)


def test_causal_attend_against_a_loop():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, 6, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 5, 2, 8)).astype(np.float32)
    got, cache = causal_attend("kept", jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    want = np.zeros(q.shape, np.float64)
    for b, t, n in np.ndindex(2, 5, 6):
        kv = n // 3  # six query heads share two KV heads in order
        scores = k[b, : t + 1, kv].astype(np.float64) @ q[b, t, n] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        want[b, t, n] = weights / weights.sum() @ v[b, : t + 1, kv]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert cache == "kept"


def test_only_relative_positions_matter_up_to_rounding():
    model = random_model(TINY)
    near, _ = model(TOKENS, POSITIONS, (None, None), causal_attend)
    far, _ = model(TOKENS, POSITIONS + 50, (None, None), causal_attend)
    spread, _ = model(TOKENS, POSITIONS * 3, (None, None), causal_attend)
    np.testing.assert_allclose(near, far, atol=1e-4)
    assert np.abs(near - spread).max() > 1e-2


def test_norm_rounds_before_the_weight_multiplies():
    """As in Hugging Face: float32 inside, cast to bfloat16, then a bfloat16 product."""
    norm = RMSNorm(64, 1e-6, jnp.bfloat16)
    weight, x = (jax.random.normal(jax.random.key(i), (64,)).astype(jnp.bfloat16) for i in range(2))
    norm.weight[...] = weight
    wide = np.asarray(x, np.float64)
    rounded = jnp.asarray(wide / np.sqrt((wide**2).mean() + 1e-6)).astype(jnp.bfloat16)
    want = (np.asarray(rounded, np.float32) * np.asarray(weight, np.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(norm(x), np.float32), want.astype(np.float32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        ({"num_layers": 0}, "at least 1, got {'num_layers': 0}"),
        ({"dtype": "float64"}, "one of bfloat16, float16, float32, got float64"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_configurations_hash_and_compare_by_value():
    assert dataclasses.replace(TINY, dtype="float32") == dataclasses.replace(TINY, dtype=jnp.float32)
    assert hash(config_from_name("qwen3-8b")) == hash(config_from_name("qwen3-8b"))


def _kept(step, cache, q, k, v):
    """An attend whose array, `step`, is an argument; it keeps the keys."""
    out, _ = causal_attend(None, q, k, v)
    return out + step, k


def _forward(make, layers=3, caches=None, **changes):
    config = dataclasses.replace(TINY, num_layers=layers, **changes)
    model = random_model(config)
    caches = (jnp.zeros(2),) * layers if caches is None else caches

    def forward(model, step, caches):
        hidden, caches = model(TOKENS, POSITIONS, caches, make(_kept, step))
        return model.logits(hidden), caches

    return jax.jit(forward), (model, jnp.float32(0.25), caches)


def test_a_partial_gives_what_a_closure_gives():
    """Bit for bit in float32. In 16 bits XLA may leave out other roundings in the two programs."""
    outputs = []
    for make in (functools.partial, jax.tree_util.Partial):
        forward, args = _forward(make)
        outputs.append(forward(*args))
    assert jax.tree.structure(outputs[0]) == jax.tree.structure(outputs[1])
    for want, got in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_array_equal(got, want)


def test_equal_blocks_are_traced_and_lowered_once():
    def count(make, **kwargs):
        forward, args = _forward(make, layers=6, **kwargs)
        text = forward.lower(*args).as_text()
        return text.count("dot_general"), text.count("call @_run_block")

    products = 6  # qkv, two of the attention, o, gate_up and down
    assert count(functools.partial) == (6 * products + 1, 0)
    assert count(jax.tree_util.Partial) == (products + 1, 6)
    # Caches of two shapes make two kinds of block.
    assert count(jax.tree_util.Partial, caches=(jnp.zeros(2), jnp.zeros(3)) * 3) == (2 * products + 1, 6)


def test_shared_blocks_are_inlined_and_update_donated_caches_in_place():
    def store(step, cache, q, k, v):
        out, _ = causal_attend(None, q, k, v)
        return out, cache.at[step].set(k[0, 0, 0])

    model = random_model(dataclasses.replace(TINY, num_layers=3))

    def forward(model, step, caches):
        return model(TOKENS, POSITIONS, caches, jax.tree_util.Partial(store, step))

    caches = tuple(jnp.zeros((61, 16)) for _ in range(3))
    compiled = jax.jit(forward, donate_argnums=2).lower(model, jnp.int32(3), caches).compile()
    text = compiled.as_text()
    assert "f32[61,16]" in text
    assert not re.search(r"f32\[61,16\]\S* copy\(", text)
    assert not re.search(r" call\(.*_run_block", text)
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in caches)
