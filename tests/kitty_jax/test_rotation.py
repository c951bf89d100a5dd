"""The Hadamard rotation of values."""

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.config import CacheConfig
from kitty_jax.fake_quantize import fake_quantize_values
from kitty_jax.rotation import hadamard, rotate


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


def test_a_channel_that_stands_out_costs_less():
    x = np.random.default_rng(1).normal(size=(1, 32, 1, 64))
    x[..., 7] *= 10
    x = jnp.array(x, jnp.float32)

    def error(**changes) -> float:
        config = CacheConfig.kivi2(page=16, window=0, **changes)
        return float(jnp.mean(jnp.square(fake_quantize_values(x, config) - x)))

    assert error(rotate_values=True) < 0.5 * error()
