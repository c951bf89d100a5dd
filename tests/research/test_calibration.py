"""Calibration: scores are the pages' own, lists and boosts go where they save most, and a list per layer simulates the
same whichever way it is compiled."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.spec import load_caches, save_caches
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.research import metrics
from kitty_jax.research.analysis import capture
from kitty_jax.research.calibration import (
    allocate,
    key_scores,
    layer_costs,
    with_boosts,
    with_lists,
)
from kitty_jax.research.metrics import evaluate_text
from kitty_jax.research.scoring import hidden_states
from kitty_jax.research.simulation import SimulatedLayer, simulated_attention

CACHE = CacheConfig.kitty_plus(sink=4, page=16, window=16)
TOKENS = np.random.default_rng(0).integers(0, 64, 90).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    sizes = {"embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    config = dataclasses.replace(config_from_name("qwen3-0.6b"), vocab_size=64, dtype=jnp.float32, **sizes)
    return random_model(config, seed=1)


def test_scores_are_the_mean_over_pages_of_range_times_query_size(model):
    scores = key_scores(model, TOKENS, CACHE)
    assert scores.shape == (2, 2, 16)
    for layer, (q, k) in capture(model, TOKENS, [0, 1]).items():
        wanted = np.zeros((2, 16))
        pages = (len(TOKENS) - 4) // 16
        for page in range(pages):
            rows = slice(4 + 16 * page, 20 + 16 * page)
            spread = np.ptp(np.asarray(k[rows]), axis=0)
            size = np.square(np.asarray(q[rows], np.float64)).reshape(16, 2, 2, 16).sum(2).mean(0)
            wanted += spread * np.sqrt(size) / pages
        np.testing.assert_allclose(scores[layer], wanted, rtol=1e-3)  # the statistic squares 12 bits of a query


def test_lists_are_the_channels_of_highest_score():
    scores = np.zeros((2, 2, 16), np.float32)
    scores[0, 0, [3, 9]], scores[0, 1, [15, 1]], scores[1, :, [7, 2]] = 1, 1, 1
    got = with_lists(CACHE, scores)
    assert [c.selection for c in got] == [((3, 9), (1, 15)), ((2, 7), (2, 7))]
    assert {dataclasses.replace(c, selection="sensitivity") for c in got} == {CACHE}
    assert with_lists(with_boosts(CACHE, [0, 0.125]), scores)[0].selection == "sensitivity"  # nothing to choose


def test_an_allocation_is_the_best_there_is():
    options = [0, 0.125, 0.25, 0.5]
    costs = np.random.default_rng(1).random((4, 4)) * [8, 4, 2, 1]
    for budget in (0.125, 0.2, 0.5):
        got = allocate(costs, options, budget)
        assert np.mean(got) <= budget + 1e-9
        every = [c for c in itertools.product(range(4), repeat=4) if np.mean([options[i] for i in c]) <= budget + 1e-9]
        best = min(sum(costs[layer, i] for layer, i in enumerate(choice)) for choice in every)
        assert sum(costs[layer, options.index(b)] for layer, b in enumerate(got)) == pytest.approx(best)


def test_allocations_by_hand():
    # Two layers at a mean of 1/8 share two units of 1/8; the last two options are three and four.
    costs = np.array([[9.0, 8, 7, 0, 0], [9, 5, 1, 0, 0]])
    assert allocate(costs, [0, 0.125, 0.25, 0.375, 0.5], 0.125) == (0, 0.25)
    costs = np.array([[3.0, 1], [9, 2], [4, 3]])
    assert allocate(costs, [0.125, 0.375], 0.21) == (0.125, 0.375, 0.125)
    assert allocate(costs * 1e-9, [0.1, 0.25], 0.15) == (0.1, 0.25, 0.1)
    assert allocate(costs, [0.125, 0.375], 1) == (0.375,) * 3
    assert allocate(np.zeros((2, 1)), [0], 0) == (0, 0)


@pytest.mark.parametrize(
    "costs,boosts,budget,message",
    [
        ([[1, 2], [np.nan, 3]], [0, 0.25], 0.2, r"costs must be finite, got nan for layer 1 and boost 0\.0"),
        ([[1, np.inf]], [0, 0.25], 0.2, r"costs must be finite, got inf for layer 0 and boost 0\.25"),
        ([[1, 2]], [0, 0.25, 0.5], 0.2, r"with 3 options, got shape \(1, 2\)"),
        ([1, 2], [0, 0.25], 0.2, r"\[layers, options\].* got shape \(2,\)"),
        ([[1, 2]], [0, np.nan], 0.2, "fractions of the channels from 0 to 1"),
        ([[1, 2]], [-0.25, 0.25], 0.2, "fractions of the channels from 0 to 1"),
        ([[1, 2]], [0, 0.25], np.nan, "mean boost must be a finite number, got nan"),
        ([[1, 2]], [0.25, 0.5], 0.1, r"mean boost of 0\.1 is less than the least option"),
    ],
)
def test_costs_and_options_that_cannot_be_are_refused(costs, boosts, budget, message):
    with pytest.raises(ValueError, match=message):
        allocate(np.array(costs), boosts, budget)


def test_the_layer_that_costs_most_gets_the_boost(model):
    costs = layer_costs(model, TOKENS, CACHE, [0, 0.125, 0.25], start=40)
    assert costs.shape == (2, 3)
    assert (costs > 0).all()
    assert (np.diff(costs, axis=1) < 0).all()  # more channels, less error
    errors = [
        evaluate_text(model, TOKENS, {"x": c}, start=40)["x"]["attn_rel_err"]
        for c in with_boosts(CACHE, [0, 0.125, 0.25])
    ]
    weights = costs / np.square(errors).T
    np.testing.assert_allclose(weights, np.broadcast_to(weights[:, :1], weights.shape), rtol=1e-5)


def test_lists_as_an_array_simulate_as_lists_in_the_config(model):
    caches = with_lists(CACHE, key_scores(model, TOKENS, CACHE))
    tokens = jnp.asarray(TOKENS)[None]
    got = hidden_states(model, tokens, caches)
    static = tuple(SimulatedLayer(c, jnp.int32(i)) for i, c in enumerate(caches))
    wanted, _ = model(tokens, jnp.arange(90, dtype=jnp.int32)[None], static, jax.jit(simulated_attention))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(np.asarray(hidden_states(model, tokens, CACHE) - wanted)).max() > 1e-3


def test_caches_come_back_from_a_file(tmp_path):
    caches = with_lists(with_boosts(CACHE, [0.125, 0]), np.random.default_rng(0).random((2, 2, 16)))
    save_caches(caches, tmp_path / "new" / "caches.json")
    assert load_caches(tmp_path / "new" / "caches.json") == caches
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"as calibrate\.py writes"):
        load_caches(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "content,message",
    [
        (b"\xff{}", r"as calibrate\.py writes; .*utf-8"),
        (b"{", r"as calibrate\.py writes; Expecting"),
        (b'{"layers": []}', r"as calibrate\.py writes, for one layer or more; got"),
        (b'{"layers": {"sink": 3}}', r"for one layer or more; got"),
        (b'{"layers": [{}, 3]}', r", layer 1: wanted .* got 3"),
        (b'{"layers": [{}, {"sink": -3}]}', ", layer 1: sink must be a whole number of tokens, 0 or more, got -3"),
        (b'{"layers": [{"colour": 1}]}', ", layer 0: .*colour"),
    ],
)
def test_a_file_of_no_caches_is_named(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_caches(tmp_path / "x.json")
    assert str(error.value).startswith(str(tmp_path / "x.json"))


def test_costs_of_a_text_just_long_enough_are_numbers(model):
    wide = dataclasses.replace(CACHE, sink=70)  # its one page is full with token 86
    with pytest.raises(ValueError, match=r"more than sink \+ page = 86 tokens, got 86: no position sees"):
        layer_costs(model, TOKENS[:86], wide, [0, 0.125], start=40)
    costs = layer_costs(model, TOKENS[:87], wide, [0, 0.125], start=40)
    assert (costs > 0).all()
    assert allocate(costs, [0, 0.125], 0.125) == (0.125, 0.125)


def test_a_layer_without_error_costs_nothing(model, monkeypatch):
    monkeypatch.setattr(metrics, "relative_error", lambda wanted, got, start: 0.0)
    assert (layer_costs(model, TOKENS, CACHE, [0, 0.125], start=40) == 0).all()


def test_a_text_without_a_page_is_refused(model):
    with pytest.raises(ValueError, match="20 tokens or more"):
        key_scores(model, TOKENS[:19], CACHE)
    with pytest.raises(ValueError, match="more than start"):
        layer_costs(model, TOKENS, CACHE, [0, 0.125], start=89)
