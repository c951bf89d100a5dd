"""The packed cache against the oracle: what it holds, exactly, and what attention over it gives, up to float sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.attention import Step, attend_chunk, attend_fresh, attend_token
from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import causal_attention, masked_attention
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import (
    QUICK,
    TOLERANCE,
    append,
    append_jit,
    assert_equals_oracle,
    fill_oracle,
    open_layer,
    random_kv,
    random_q,
)

N, K = 4, 2


def _boundaries(config: CacheConfig) -> np.ndarray:
    s, g, r = config.sink, config.page, config.window
    around = [s + 3 * g + d for d in (-1, 0, 1)]
    lengths = {0, 1, s - 1, s, s + 1, s + g - 1, s + g, s + g + 1, s + r + g, *around, *(r + x for x in around)}
    return np.array(sorted(x for x in lengths if x >= 0))


@functools.partial(jax.jit, compiler_options=QUICK)
def _append_and_attend(state, keys, values, num_new, q, k, v):
    """A history [B, T, K, D] and one token more, [B, N, D] and [B, K, D]: (state of the history, output [B, N, D])."""
    state = append(state, keys, values, num_new)
    step = Step(state.lengths, jnp.ones_like(state.lengths), state.page_table, "xla")
    out, _ = attend_token(step, state.layers[0], q[:, None], k[:, None], v[:, None])
    return state, out[:, 0]


BOUNDARY_CASES = [("kitty-pro", 128), ("kitty-pro:sink=4,page=16,window=16", 64)]
BOUNDARY_CASES += [(f"{name}:page=16,window=16", 32) for name in ("kivi2", "kivi4")]
# In a ring of 40 slots a page that waits for its values' quantization goes over the end.
BOUNDARY_CASES += [("k2v4:sink=4,page=16,window=16", 32), ("k4v2:sink=4,page=16,window=24", 32)]


@pytest.mark.parametrize("spec, head_dim", BOUNDARY_CASES)
def test_every_boundary_equals_the_oracle(spec, head_dim):
    """What a history of each length holds, and a decode step on it."""
    config = cache_from_spec(spec)
    lengths = _boundaries(config)
    batch, longest = len(lengths), max(lengths) + 1
    keys, values = random_kv(head_dim, batch, longest, K, head_dim)
    q = random_q(1, batch, N, head_dim)
    new = [jnp.take_along_axis(x, lengths[:, None, None, None], axis=1)[:, 0] for x in (keys, values)]
    empty = init_state(config, KVShape(1, K, head_dim, jnp.float32), batch=batch, capacity=longest)
    state, out = _append_and_attend(empty, keys, values, jnp.array(lengths), q, *new)
    opened = open_layer(state)
    for b, length in enumerate(lengths):
        oracle = fill_oracle(Oracle(config, K, head_dim), np.asarray(keys[b]), np.asarray(values[b]), length)
        assert_equals_oracle(opened, b, oracle)
        wanted = oracle.step(*(np.asarray(x[b]) for x in (q, *new)))
        np.testing.assert_allclose(out[b], wanted, rtol=0, atol=TOLERANCE["float32"])


# Small pages for everything else: S = 4, G = 16, R = 16, D = 16, two layers, one of them in full precision.
SMALL = CacheConfig.kitty(sink=4, page=16, window=16)
HISTORY = (0, 1, 3, 4, 5, 13, 18, 19, 20, 21, 29, 34, 35, 36, 50, 51, 52, 53)  # around 4, 20, 36 and 52
CHUNK = 8


def _chunk(state, q, k, v, num_new, attend):
    before = state.lengths
    state, num_new = reserve(state, num_new)
    step = Step(before, num_new, state.page_table, "xla")
    outs, layers = zip(*(attend(step, x, q, k, v) for x in state.layers), strict=True)
    return jnp.stack(outs), dataclasses.replace(state, layers=layers, lengths=before + num_new)


_chunk_jit = jax.jit(_chunk, static_argnames="attend", compiler_options=QUICK)


def _small_state(batch, dtype=jnp.float32):
    return init_state([SMALL, CacheConfig.full()], KVShape(2, K, 16, dtype), batch=batch, capacity=72)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_continues_its_history(dtype):
    """1 to 8 tokens onto histories around every boundary, twice, against the oracle going on."""
    batch = len(HISTORY)
    keys, values = random_kv(5, batch, 72, K, 16, dtype=jnp.dtype(dtype))
    q = random_q(6, batch, 2 * CHUNK, N, 16, dtype=jnp.dtype(dtype))
    state = append_jit(_small_state(batch, keys.dtype), keys, values, jnp.array(HISTORY))
    lists = [(Oracle(SMALL, K, 16), Oracle(CacheConfig.full(), K, 16, layer=1)) for _ in HISTORY]
    for b, oracles in enumerate(lists):
        for oracle in oracles:
            fill_oracle(oracle, keys[b], values[b], HISTORY[b])
    for half in range(2 if dtype == "float32" else 1):
        num_new = np.array([1 + (b + half) % CHUNK for b in range(batch)])
        rows = np.minimum(np.asarray(state.lengths)[:, None] + np.arange(CHUNK), 71)
        k, v = (np.take_along_axis(np.asarray(x), rows[:, :, None, None], axis=1) for x in (keys, values))
        out, state = _chunk_jit(state, q[:, half * CHUNK :][:, :CHUNK], k, v, jnp.array(num_new), attend_chunk)
        assert out.dtype == keys.dtype
        assert np.isfinite(np.asarray(out, np.float32)).all()
        for layer in range(2):
            opened = open_layer(state, layer)
            for b, oracles in enumerate(lists):
                t = num_new[b]
                args = (np.asarray(x[b, :t], np.float32) for x in (q[:, half * CHUNK :], k, v))
                wanted = oracles[layer].prefill(*args)
                got = np.asarray(out[layer, b, :t], np.float32)
                np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype])
                assert_equals_oracle(opened, b, oracles[layer])


def test_a_fresh_prompt_is_attended_in_full_precision():
    lengths = (0, 1, 4, 19, 20, 21, 36, 53)
    keys, values = random_kv(7, len(lengths), 53, K, 16)
    q = random_q(8, len(lengths), 53, N, 16)
    out, state = _chunk_jit(_small_state(len(lengths)), q, keys, values, jnp.array(lengths), attend_fresh)
    for layer, config in enumerate((SMALL, CacheConfig.full())):
        opened = open_layer(state, layer)
        for b, length in enumerate(lengths):
            oracle = Oracle(config, K, 16, layer)
            wanted = oracle.prefill(*(np.asarray(x[b, :length]) for x in (q, keys, values)))
            np.testing.assert_allclose(out[layer, b, :length], wanted, rtol=0, atol=TOLERANCE["float32"])
            assert_equals_oracle(opened, b, oracle)


def test_blocks_of_queries_change_nothing():
    """More queries than a block, and a number that is no multiple of it."""
    keys, values = random_kv(9, 2, 300, 1, 16)
    q = random_q(10, 2, 300, 2, 16)
    out = causal_attention(q, keys, values)
    oracle = Oracle(CacheConfig.full(), 1, 16)
    wanted = oracle.prefill(*(np.asarray(x[1]) for x in (q, keys, values)))
    np.testing.assert_allclose(out[1], wanted, rtol=0, atol=TOLERANCE["float32"])
    first = jnp.array([3, 0], jnp.int32)
    shifted = masked_attention(q[:, :260], keys, values, first)
    np.testing.assert_allclose(shifted[1], out[1, :260], rtol=0, atol=TOLERANCE["float32"])
    one = masked_attention(q[:, 100:101], keys, values, first + 100)
    np.testing.assert_allclose(shifted[:1, 100:101], one[:1], rtol=0, atol=TOLERANCE["float32"])


def test_shapes_that_disagree_are_named():
    state = _small_state(2)
    step = Step(state.lengths, jnp.ones_like(state.lengths), state.page_table, "xla")
    q, k = jnp.zeros((2, 1, 3, 16)), jnp.zeros((2, 1, K, 16))
    with pytest.raises(ValueError, match="query heads must be a multiple of the cache's 2 KV heads, got 3"):
        attend_token(step, state.layers[0], q, k, k)
    with pytest.raises(ValueError, match=r"new_keys: wanted \(2, 1, 2, 16\), got \(2, 1, 1, 16\)"):
        attend_token(step, state.layers[0], q[:, :, :2], k[:, :, :1], k)
