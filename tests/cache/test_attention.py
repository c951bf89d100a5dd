"""The packed cache against the oracle: what it holds, exactly, and what attention over it gives, up to float sums."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.attention import Step, attend_chunk, attend_fresh, attend_token
from kitty_jax.cache.config import CACHE_NAMES, CacheConfig, cache_from_name
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

S, G, R = 32, 128, 128
LENGTHS = (0, 1, S - 1, S, S + 1, S + G - 1, S + G, S + G + 1, S + R + G)
LENGTHS += tuple(S + 3 * G + d for d in (-1, 0, 1)) + tuple(S + R + 3 * G + d for d in (-1, 0, 1))
N, K = 4, 2


@functools.partial(jax.jit, compiler_options=QUICK)
def _append_and_attend(state, keys, values, num_new, q, k, v):
    """A history [B, T, K, D] and one token more, [B, N, D] and [B, K, D]: (state of the history, output [B, N, D])."""
    state = append(state, keys, values, num_new)
    step = Step(state.lengths, jnp.ones_like(state.lengths), state.page_table, "xla")
    out, _ = attend_token(step, state.layers[0], q[:, None], k[:, None], v[:, None])
    return state, out[:, 0]


@functools.cache
def _case(name: str, head_dim: int):
    """A history for each length, the oracle that holds it, and the output of a decode step on it."""
    config = cache_from_spec(name)
    keys, values = random_kv(head_dim, len(LENGTHS), max(LENGTHS) + 1, K, head_dim)
    q = random_q(1, len(LENGTHS), N, head_dim)
    oracles, outs = [], []
    for b, length in enumerate(LENGTHS):
        host = np.asarray(keys[b]), np.asarray(values[b])
        oracles.append(fill_oracle(Oracle(config, K, head_dim), *host, length))
        outs.append(copy.deepcopy(oracles[b]).step(np.asarray(q[b]), host[0][length], host[1][length]))
    return config, keys, values, q, oracles, np.stack(outs)


def _new(x, lengths):
    return jnp.take_along_axis(x, lengths[:, None, None, None], axis=1)[:, 0]


# Every cache at 128; at 64 the two that have boosted channels and 4-bit values, the others in `make test-all`.
BOUNDARY_CASES = [
    pytest.param(d, name, marks=() if d == 128 or name in ("kitty_pro", "k2v4") else pytest.mark.slow)
    for name in CACHE_NAMES
    if not cache_from_name(name).weighs_queries
    for d in (64, 128)
]


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["batch", "alone"])
@pytest.mark.parametrize("head_dim, name", BOUNDARY_CASES)
def test_every_boundary_equals_the_oracle(name, head_dim, together):
    config, keys, values, q, oracles, outs = _case(name, head_dim)
    lengths = jnp.array(LENGTHS, jnp.int32)
    rows = [np.arange(len(LENGTHS))] if together else [np.array([b]) for b in range(len(LENGTHS))]
    shape = KVShape(1, K, head_dim, jnp.float32)
    empty = init_state(config, shape, batch=len(rows[0]), capacity=max(LENGTHS) + 1)
    for row in rows:
        args = (keys[row], values[row], lengths[row], q[row], _new(keys, lengths)[row], _new(values, lengths)[row])
        state, out = _append_and_attend(empty, *args)
        np.testing.assert_allclose(out, outs[row], rtol=0, atol=TOLERANCE["float32"])
        opened = open_layer(state)
        for i, b in enumerate(row):
            assert_equals_oracle(opened, i, oracles[b])


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
    for turn in range(2 if dtype == "float32" else 1):
        num_new = np.array([1 + (b + turn) % CHUNK for b in range(batch)])
        rows = np.minimum(np.asarray(state.lengths)[:, None] + np.arange(CHUNK), 71)
        k, v = (np.take_along_axis(np.asarray(x), rows[:, :, None, None], axis=1) for x in (keys, values))
        out, state = _chunk_jit(state, q[:, turn * CHUNK :][:, :CHUNK], k, v, jnp.array(num_new), attend_chunk)
        assert out.dtype == keys.dtype
        assert np.isfinite(np.asarray(out, np.float32)).all()
        for layer in range(2):
            opened = open_layer(state, layer)
            for b, oracles in enumerate(lists):
                t = num_new[b]
                args = (np.asarray(x[b, :t], np.float32) for x in (q[:, turn * CHUNK :], k, v))
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
