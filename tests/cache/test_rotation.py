"""The Hadamard rotation of values."""

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.attention import Step, attend_fresh, attend_token
from kitty_jax.cache.chunk_attention import is_long
from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.cache.rotation import hadamard, rotate
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.research.fake_quantize import fake_quantize_values


@pytest.mark.parametrize("size", [16, 48, 64, 80, 128])
def test_the_matrix_is_its_own_inverse(size):
    matrix = hadamard(size).astype(np.float64)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    block = size & -size
    np.testing.assert_allclose(np.abs(matrix[:block, :block]), block**-0.5, rtol=1e-6)  # spreads evenly over a block


def test_twice_gives_the_values_back_in_their_dtype():
    x = jnp.array(np.random.default_rng(0).normal(size=(3, 5, 64)), jnp.float32)
    assert rotate(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_allclose(rotate(rotate(x)), x, atol=1e-5)


def test_prompts_and_tokens_cache_rotated_values():
    config = CacheConfig.kitty_plus(sink=4, page=16, window=16)
    state = init_state(config, KVShape(1, 2, 16, jnp.float32), batch=1, capacity=64)
    layer, rng = state.layers[0], np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    step = Step(state.lengths, jnp.array([8], jnp.int32), state.page_table)
    _, layer = attend_fresh(step, layer, *(x[:, :8] for x in (q, k, v)))
    step = Step(jnp.array([8], jnp.int32), jnp.array([1], jnp.int32), state.page_table)
    _, layer = attend_token(step, layer, *(x[:, 8:] for x in (q, k, v)))
    want = jnp.swapaxes(rotate(v), 1, 2)
    np.testing.assert_allclose(layer.kv.sink_values[:, :, :4], want[:, :, :4], atol=1e-6)
    np.testing.assert_allclose(layer.kv.ring_values[:, :, :5], want[:, :, 4:], atol=1e-6)


@pytest.mark.parametrize("tokens", [8, 70])
def test_what_is_attended_comes_back_unrotated(tokens):
    """Short and long chunks, which two functions attend."""
    config = CacheConfig.kitty_plus(sink=4, page=16, window=16)
    state = init_state(config, KVShape(1, 2, 16, jnp.float32), batch=1, capacity=80)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, tokens, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    step = Step(state.lengths, jnp.array([tokens], jnp.int32), state.page_table)
    assert is_long(q, k) == (tokens > 64)
    np.testing.assert_allclose(state.layers[0].attend(step, q, k, v), causal_attention(q, k, v), atol=1e-5)


def test_a_channel_that_stands_out_costs_less():
    x = np.random.default_rng(1).normal(size=(1, 32, 1, 64))
    x[..., 7] *= 10
    x = jnp.array(x, jnp.float32)

    def error(**changes) -> float:
        config = CacheConfig.kivi2(page=16, window=0, **changes)
        return float(jnp.mean(jnp.square(fake_quantize_values(x, config) - x)))

    assert error(rotate_values=True) < 0.5 * error()
