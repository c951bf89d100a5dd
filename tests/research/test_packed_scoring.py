"""A page of tokens at a time through the packed cache sees what single decode steps see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.models.llama3 import smollm2_135m
from kitty_jax.models.registry import random_model
from kitty_jax.research.packed_scoring import packed_hidden
from kitty_jax.research.simulation import simulated_attention, simulated_caches


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(
        smollm2_135m(), vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        dtype=jnp.float32,
    )  # fmt: skip
    return random_model(config, seed=3)


@pytest.mark.parametrize("name", [pytest.param("kitty", marks=pytest.mark.slow), "kitty_plus"])
def test_pages_tokens_and_the_simulation_agree(model, name):
    config = getattr(CacheConfig, name)(sink=5, page=16, window=16)
    tokens = jax.random.randint(jax.random.key(1), (2, 75), 0, 64, jnp.int32)
    by_page = packed_hidden(model, tokens, config)
    simulate = jax.jit(simulated_attention)

    def recording(cache, q, k, v):
        return simulate(cache, q, k, v)[0], (q, k, v)

    positions = jnp.broadcast_to(jnp.arange(75, dtype=jnp.int32), tokens.shape)
    simulated, inputs = model(tokens, positions, simulated_caches(config, 1), recording)
    full, _ = model(tokens, positions, simulated_caches("full", 1), simulate)
    # Of one layer: keys and values of a deeper one differ in their last bits, and a float16 scale with them.
    np.testing.assert_allclose(by_page, packed_hidden(model, tokens, config, by_token=True), atol=2e-3)
    np.testing.assert_allclose(by_page, simulated, atol=2e-3)
    np.testing.assert_allclose(packed_hidden(model, tokens, config, inputs=inputs), simulated, atol=1e-4)
    assert np.max(np.abs(by_page - full)) > 2e-2


def test_a_window_that_ages_within_a_page_is_refused(model):
    with pytest.raises(ValueError, match=r"windows \[24\] are no multiples of the page"):
        packed_hidden(model, jnp.zeros((1, 9), jnp.int32), CacheConfig.kitty(page=16, window=24))
