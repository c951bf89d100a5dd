"""The one-pass simulation against the literal oracle and against the packed cache, decoded token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.attention import Step, attend_token
from kitty_jax.cache.config import CACHE_NAMES, CacheConfig, cache_from_name
from kitty_jax.cache.flush import flush
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.cache.state import init_state
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.research import simulation
from kitty_jax.research.oracle import Oracle
from kitty_jax.research.simulation import SimulatedLayer, simulated_attention, simulated_caches

N, K, D = 4, 2, 16
# S, G, R that put every boundary of DESIGN section 9 into a short text; the second has a window that is no multiple of
# a page.
SIZES = [
    {"page": 16, "window": 16, "sink": 8},
    {"page": 16, "window": 24, "sink": 5},
    {"page": 32, "window": 0, "sink": 0},
]


def qkv(length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.2, 2, D)  # channels differ, so that selection has something to choose
    return tuple((rng.normal(size=(length, heads, D)) * scale).astype(np.float32) for heads in (N, K, K))


def shrunk(name: str, **sizes) -> CacheConfig:
    config = cache_from_spec(name)
    # A cache without a sink stays without one.
    return (
        dataclasses.replace(config, **{**sizes, "sink": min(sizes["sink"], config.sink)})
        if config.quantized
        else config
    )


simulate = jax.jit(simulated_attention)


def simulated(config: CacheConfig, q, k, v, index: int = 0) -> jax.Array:
    """One sequence, [T, N, D]."""
    return simulate(SimulatedLayer(config, jnp.int32(index)), *(jnp.array(x)[None] for x in (q, k, v)))[0][0]


def decoded(config: CacheConfig, q, k, v, index: int = 0) -> np.ndarray:
    """The same by the oracle."""
    oracle = Oracle(config, K, D, index)
    return np.stack([oracle.step(*row) for row in zip(q, k, v, strict=True)])


class TestAgainstTheOracle:
    @pytest.mark.parametrize(
        "name,sizes",
        [
            *((name, SIZES[0]) for name in CACHE_NAMES),
            *(("kitty", s) for s in SIZES[1:]),
        ],
    )
    def test_every_position(self, name, sizes):
        config = shrunk(name, **sizes)
        text = qkv(config.sink + 3 * sizes["page"] + sizes["window"] + 2)
        got = simulated(config, *text)
        np.testing.assert_allclose(got, decoded(config, *text), atol=2e-5)
        if config.quantized:
            full = simulated(CacheConfig.full(), *text)
            first = config.sink + sizes["page"]  # the first query that sees a page
            np.testing.assert_allclose(got[:first], full[:first], atol=1e-5)
            assert np.max(np.abs(got[first:] - full[first:])) > 1e-2

    @pytest.mark.parametrize("length", [1, 8, 9, 24, 25])
    def test_texts_that_end_at_a_boundary(self, length):
        config = shrunk("kitty", **SIZES[0])
        text = qkv(length, seed=length)
        np.testing.assert_allclose(simulated(config, *text), decoded(config, *text), atol=2e-5)

    def test_random_channels_follow_the_layer(self):
        config = dataclasses.replace(shrunk("kitty", **SIZES[0]), selection="random", seed=5)
        text = qkv(60)
        wanted = decoded(config, *text, index=3)
        np.testing.assert_allclose(simulated(config, *text, index=3), wanted, atol=2e-5)
        assert np.max(np.abs(simulated(config, *text, index=4) - wanted)) > 1e-3

    @pytest.mark.slow
    def test_a_text_long_enough_to_be_cut_into_spans(self, monkeypatch):
        config = shrunk("kitty", **SIZES[1])
        text = qkv(5 + 17 * 16)
        cut = simulated(config, *text)
        monkeypatch.setattr(simulation, "KEY_SPANS", 1)
        jax.clear_caches()
        np.testing.assert_allclose(cut, simulated(config, *text), atol=1e-6)
        np.testing.assert_allclose(cut, decoded(config, *text), atol=2e-5)


def test_sequences_of_a_batch_do_not_meet():
    config = shrunk("kitty", **SIZES[1])
    one, two = (qkv(70, seed) for seed in (1, 2))
    both = (jnp.stack(pair) for pair in zip(one, two, strict=True))
    both, _ = simulate(SimulatedLayer(config, jnp.int32(0)), *both)
    np.testing.assert_allclose(both[1], simulated(config, *two), atol=1e-6)


# Two caches at a time, a layer each: most of the time is compilation. The two have the same sink.
NO_SINK = [name for name in CACHE_NAMES if cache_from_name(name).quantized and not cache_from_name(name).sink]
PAIRS = [tuple(names[i : i + 2]) for names in (NO_SINK, [x for x in CACHE_NAMES if x not in NO_SINK])
         for i in range(0, len(names), 2)]  # fmt: skip


# The first and the last pair; the others, and another size, in `make test-all`.
DECODED = [(PAIRS[0], SIZES[0]), (PAIRS[-1], SIZES[0])] + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (*((p, SIZES[0]) for p in PAIRS[1:-1]), (("kitty",), SIZES[1]))
]


@pytest.mark.parametrize("names,sizes", DECODED)
def test_logits_equal_those_of_packed_decoding(names, sizes):
    """Keys and values are those of the one-pass run: in a run of its own their last bits differ, and with them, here
    and there, a code or a float16 scale, which is no difference between the two implementations.
    """
    model_config = dataclasses.replace(
        config_from_name("smollm2-135m"),
        vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=N, num_kv_heads=K, head_dim=D,
        dtype=jnp.float32,
    )  # fmt: skip
    model = random_model(model_config, seed=3)
    configs = [shrunk(names[0], **sizes), shrunk(names[-1], **sizes)]
    length = sizes["sink"] + 3 * sizes["page"] + sizes["window"] + 3
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, 64, jnp.int32)
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    def recording(cache, q, k, v):
        return simulate(cache, q, k, v)[0], (k, v)

    hidden, recorded = model(tokens, positions, simulated_caches(configs, 2), recording)
    wanted = model.logits(hidden)[0]

    def step(state, row):
        token, position, recorded = row
        before = state.lengths
        state, new = reserve(state, jnp.ones_like(before))
        now = Step(before, new, state.page_table, "xla")
        rest = iter(recorded)

        def attend(layer, q, k, v):
            k, v = next(rest)
            return attend_token(now, layer, q, k[None, None], v[None, None])

        hidden, layers = model(token[None, None], position[None, None], state.layers, attend)
        state = flush(dataclasses.replace(state, layers=layers, lengths=before + new), before, "xla")
        return state, model.logits(hidden)[0, 0]

    state = init_state(configs, model_config, batch=1, capacity=length)
    rows = (tokens[0], positions[0], jax.tree.map(lambda x: x[0], recorded))
    got = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows)[1])(state, rows)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
