"""Texts over a cache, in one pass and packed: the same hidden states, and log-probabilities by plain computation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.research import scoring
from kitty_jax.research.scoring import hidden_states, score


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(
        config_from_name("smollm2-135m"),
        vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        dtype=jnp.float32,
    )  # fmt: skip
    return random_model(config, seed=3)


TOKENS = jax.random.randint(jax.random.key(1), (2, 75), 0, 64, jnp.int32)


@pytest.mark.parametrize("name", [pytest.param("kitty", marks=pytest.mark.slow), "kitty_plus"])
def test_the_packed_cache_and_the_simulation_agree(model, name):
    config = getattr(CacheConfig, name)(sink=5, page=16, window=16)
    packed = hidden_states(model, TOKENS, config, scoring="packed")
    # Of one layer: keys and values of a deeper one differ in their last bits, and a float16 scale with them.
    np.testing.assert_allclose(packed, hidden_states(model, TOKENS, config), atol=2e-3)
    assert np.max(np.abs(packed - hidden_states(model, TOKENS, "full"))) > 2e-2


def test_log_probabilities_by_a_plain_computation(model, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", 32)  # 74 predictions: two whole chunks and a part of a third
    got, greedy = score(model, TOKENS, "full")
    logits = np.asarray(model.logits(hidden_states(model, TOKENS, "full"))[:, :-1], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    following = np.asarray(TOKENS)[:, 1:]
    np.testing.assert_allclose(got, np.take_along_axis(log_probs, following[..., None], -1)[..., 0], atol=1e-4)
    np.testing.assert_array_equal(greedy, logits.argmax(-1) == following)
    np.testing.assert_allclose(score(model, TOKENS, "full", scoring="packed")[0], got, atol=1e-4)


@pytest.mark.parametrize(
    "cache,how,message",
    [
        (CacheConfig.kitty(page=16, window=24), "packed", r"windows \[24\] are no multiples of the page"),
        ("kitty", "packing", "scoring must be one of simulation, packed, got 'packing'"),
        (CacheConfig.kitty(selection=(1, 16)), "simulation", "distinct channels from 0 to 15"),
    ],
)
def test_what_cannot_be_is_refused(model, cache, how, message):
    with pytest.raises(ValueError, match=message):
        hidden_states(model, jnp.zeros((1, 9), jnp.int32), cache, scoring=how)
