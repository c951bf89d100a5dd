"""Keys and values that metadata or codes cannot hold well: finite everywhere, and within the error a code can have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.attention import Step, attend_token
from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import QUICK, append_jit, assert_equals_oracle, fill_oracle, open_layer

CONFIG = CacheConfig.kitty(sink=0, page=16, window=0)
T, K, D = 32, 1, 16
NORMAL = np.random.default_rng(31).normal(size=(2, T, K, D))


def _with(value, *, tokens=slice(None), channels=slice(None)):
    x = NORMAL.copy()
    x[:, tokens, :, channels] = value
    return x


CASES = {
    "ordinary": NORMAL,
    "all zero": _with(0),
    "some zero tokens": _with(0, tokens=slice(3, 20, 2)),
    "constant channels": _with(0.7, channels=slice(0, 9)),
    "constant everything": _with(-3.3),
    "one channel of 1,000": NORMAL * np.where(np.arange(D) == 5, 1000, 1),
    "one channel around 1,000": NORMAL + np.where(np.arange(D) == 5, 1000, 0),
    "at float16's end": NORMAL * 3e4,
    "beyond float16": NORMAL * 1e5,
    "one number beyond float16": _with(1e5, tokens=7, channels=2),
    "far beyond float16": NORMAL * 1e30,
    "one number of 1e30": _with(1e30, tokens=7, channels=2),
    "tiny": NORMAL * 1e-6,
    "tinier": NORMAL * 1e-30,
    "negative": -np.abs(NORMAL) * 40,
}


@functools.partial(jax.jit, compiler_options=QUICK)
def _attend(state, q):
    zeros = jnp.zeros((q.shape[0], 1, K, D), jnp.bfloat16)
    step = Step(state.lengths, jnp.ones_like(state.lengths), state.page_table, "xla")
    return attend_token(step, state.layers[0], q, zeros, zeros)[0]


@functools.cache
def _filled():
    """All cases as the sequences of one batch, in bfloat16, with every token in a page."""
    data = jnp.asarray(np.stack(list(CASES.values()), axis=1), jnp.bfloat16)  # [2, B, T, K, D]
    empty = init_state(CONFIG, KVShape(1, K, D, jnp.bfloat16), batch=len(CASES), capacity=T)
    return data, append_jit(empty, *data, jnp.full(len(CASES), T))


def _bound(x, levels, limit_log2, axis):
    """Half a step of each group; for the metadata's rounding to float16, what it can move the ends of the range by."""
    top = np.abs(x).max()
    spread = x.max(axis, keepdims=True) - x.min(axis, keepdims=True)
    lowest = np.abs(x).max(axis, keepdims=True)
    # Relative 2**-11 of minimum and scale; float16's smallest step is 2**-24 of the page's power of two.
    tiny = 2.0**-24 * max(1.0, 2.0 ** np.ceil(np.log2(max(top, 1e-38)) - limit_log2 + 1))
    return spread / levels / 2 * 1.01 + (lowest + spread) * 2.0**-10 + (levels + 1) * tiny


@pytest.mark.parametrize("case", CASES)
def test_within_the_error_of_a_code_and_equal_to_the_oracle(case):
    data, state = _filled()
    b = list(CASES).index(case)
    opened = open_layer(state)
    keys, values = opened.read(b)
    for got, x, limit, axis in ((keys, data[0, b], 13, 1), (values, data[1, b], 5, 3)):
        x = np.asarray(x, np.float64).reshape(2, 16, K, D)  # page, token
        got = got.astype(np.float64).reshape(x.shape)
        assert np.isfinite(got).all()
        bound = _bound(x, 3, limit, axis)
        assert (np.abs(got - x) <= bound).all()
    if case != "tinier":  # subnormal float32 products may be flushed to zero by the backend
        assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, K, D), data[0, b], data[1, b], T))


def test_boosted_channels_have_a_fifth_of_the_error():
    data, state = _filled()
    opened = open_layer(state)
    b = list(CASES).index("one channel of 1,000")
    assert 5 in opened.key_parts["channels"][int(state.page_table[b, 0]), 0]
    x = np.asarray(data[0, b, :16, 0, 5], np.float64)
    error = np.abs(opened.read(b)[0][:16, 0, 5] - x)
    assert error.max() <= (x.max() - x.min()) / 15 / 2 * 1.05


def test_attention_is_finite():
    data, state = _filled()
    q = jnp.asarray(np.random.default_rng(32).normal(size=(len(CASES), 1, 2, D)), jnp.bfloat16)
    out = np.asarray(_attend(state, q), np.float32)
    assert np.isfinite(out).all()
    largest = np.abs(np.asarray(data[1], np.float32)).max(axis=(1, 2, 3))
    assert (np.abs(out).max(axis=(1, 2, 3)) <= 1.5 * largest + 1e-6).all()  # a mean of values
