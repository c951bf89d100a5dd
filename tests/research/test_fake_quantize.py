"""Fake quantization: the packed cache's numbers, and a gradient that passes straight through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.steps import functional
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values
from kitty_jax.research.fake_quantize import fake_quantize, fake_quantize_keys, fake_quantize_values
from kitty_jax.research.simulation import simulated_attention, simulated_caches

CONFIG = CacheConfig.kitty(sink=3, page=16, window=16)

fake_keys = jax.jit(lambda x: fake_quantize_keys(x, CONFIG))
fake_values = jax.jit(lambda x: fake_quantize_values(x, CONFIG))


@pytest.fixture
def text():
    return jax.random.normal(
        jax.random.key(0), (2, 40, 2, 16), jnp.float32
    )  # two full pages and five tokens of a third


def test_pages_read_as_the_packed_cache_and_the_rest_as_it_is(text):
    fmt = CONFIG.page_format(16)
    page = jnp.swapaxes(text[:, 19:35], 1, 2)
    for got, wanted in (
        (fake_keys(text), jax.jit(lambda x: dequantize_keys(quantize_keys(x, fmt), fmt))(page)),
        (fake_values(text), jax.jit(lambda x: dequantize_values(quantize_values(x, fmt), fmt))(page)),
    ):
        np.testing.assert_array_equal(got[:, 19:35], jnp.swapaxes(wanted, 1, 2))
        np.testing.assert_array_equal(got[:, :3], text[:, :3])
        np.testing.assert_array_equal(got[:, 35:], text[:, 35:])
        assert jnp.max(jnp.abs(got[:, 3:35] - text[:, 3:35])) > 0.05


def test_full_precision_changes_nothing(text):
    keys, values = fake_quantize(text, 2 * text, CacheConfig.full())
    np.testing.assert_array_equal(keys, text)
    np.testing.assert_array_equal(values, 2 * text)


def test_the_gradient_is_that_of_the_identity(text):
    weight = jax.random.normal(jax.random.key(1), (2, *text.shape), jnp.float32)

    def loss(keys, values):
        keys, values = fake_quantize(keys, values, CONFIG)
        return jnp.sum(weight[0] * keys) + jnp.sum(weight[1] * values)

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(text, text)
    np.testing.assert_array_equal(got[0], weight[0])
    np.testing.assert_array_equal(got[1], weight[1])


def test_names_are_taken_and_what_does_not_fit_is_refused(text):
    short = text[:, :35]
    for got, wanted in zip(fake_quantize(short, short, "kitty"), (short, short), strict=True):
        np.testing.assert_array_equal(got, wanted)  # no page of 128 is full
    for arguments, message in (
        ((text, text[:, :9], "kitty"), r"of one shape, got \(2, 40, 2, 16\) and \(2, 9, 2, 16\)"),
        ((text[0], text[0], "kitty"), r"must be \[B, T, K, D\]"),
        ((text, text, "kitten"), "unknown cache 'kitten'"),
    ):
        with pytest.raises(ValueError, match=message):
            fake_quantize(*arguments)
    with pytest.raises(ValueError, match=r"N a multiple of K, got \(2, 40, 1, 16\)"):
        fake_quantize(text, text, "kitty", queries=text[:, :, :1])
    with pytest.raises(ValueError, match="weighs channels by the queries: pass them"):
        fake_quantize(text, text, CacheConfig.kitty_plus(sink=3, page=16, window=16))


def test_finetuning_through_the_cache_lowers_the_loss():
    config = dataclasses.replace(
        config_from_name("smollm2-135m"),
        vocab_size=32, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        dtype=jnp.float32,
    )  # fmt: skip
    fm = functional(random_model(config))
    tokens = jnp.tile(jax.random.randint(jax.random.key(2), (2, 16), 0, 32, jnp.int32), (1, 4))
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), tokens.shape)
    optimizer = optax.adam(3e-3)

    def loss(params):
        model = nnx.merge(fm.graphdef, params)
        hidden, _ = model(tokens, positions, simulated_caches(CONFIG, 2), simulated_attention)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden[:, :-1]), tokens[:, 1:]))

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state, losses = fm.params, optimizer.init(fm.params), []
    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32 and divides by the count
        for _ in range(12):
            params, state, value = step(params, state)
            losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
