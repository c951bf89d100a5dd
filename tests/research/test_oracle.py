"""The oracle itself, by hand: what is quantized when, and what a code is."""

import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.research.oracle import Oracle, page_exponent, quantize_group, quantize_key_page, quantize_value_page


def test_a_group_by_hand():
    codes, scale, low = quantize_group(np.array([-1, 0, 0.9, 2], np.float32), 2)
    assert (scale, low) == (1, -1)
    assert codes.tolist() == [0, 1, 2, 3]
    codes, scale, low = quantize_group(np.array([0, 15, 7.25], np.float32), 4)
    assert (scale, low, codes.tolist()) == (1, 0, [0, 15, 7])


def test_halves_round_to_even():
    codes, scale, _ = quantize_group(np.array([0, 0.5, 1.5, 2.5, 3], np.float32), 2)
    assert scale == 1
    assert codes.tolist() == [0, 0, 2, 2, 3]


def test_codes_follow_the_stored_metadata():
    x = np.array([1.00001, 1.5, 2.00003], np.float32)
    codes, scale, low = quantize_group(x, 2)
    assert low == np.float16(1)
    assert scale == np.float16((x[2] - np.float32(1)) / 3)
    assert codes.tolist() == [0, round((0.5) / float(scale)), 3]


def test_a_flat_group_gives_back_its_value():
    page = quantize_value_page(np.full((16, 16), 0.375, np.float32), 2)
    assert not page.codes.any()
    assert not page.scale.any()
    np.testing.assert_array_equal(page.restored, 0.375)


def test_shrinking_keeps_the_better_range():
    x = np.concatenate([np.linspace(-1, 1, 127), [9.0]]).astype(np.float32)
    plain = quantize_group(x, 2)
    shrunk = quantize_group(x, 2, (1.0, 0.5))

    def error(q):
        return np.sum((q[0] * np.float32(q[1]) + np.float32(q[2]) - x) ** 2)

    same = quantize_group(x, 2, (1.0, 1.0))
    assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))
    assert error(shrunk) <= error(plain)
    assert error(quantize_group(x, 4, (1.0, 0.9, 0.8))) <= error(quantize_group(x, 4))


@pytest.mark.parametrize(
    "top, limit, wanted", [(0, 13, 0), (8191, 13, 0), (8192, 13, 1), (31.9, 5, 0), (32, 5, 1), (1e30, 13, 87)]
)
def test_page_exponent(top, limit, wanted):
    assert page_exponent(np.array([[top, -1]], np.float32), limit) == wanted


def test_boosted_channels_have_finer_codes():
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    page = quantize_key_page(x, (3, 5))
    assert page.codes[:, [3, 5]].max() == 15
    assert np.delete(page.codes, [3, 5], axis=1).max() == 3
    step = page.scale.astype(np.float32)
    assert np.all(np.abs(page.restored - x) <= step / 2 + 1e-3)


def _filled(config, tokens, head_dim=16):
    oracle = Oracle(config, 1, head_dim)
    rng = np.random.default_rng(1)
    data = rng.normal(size=(tokens, 2, 1, head_dim)).astype(np.float32)
    for k, v in data:
        oracle.insert(k, v)
        oracle.age()
    return oracle, data


@pytest.mark.parametrize(
    "tokens, key_pages, value_pages",
    [(0, 0, 0), (19, 0, 0), (20, 1, 0), (35, 1, 0), (36, 2, 0), (43, 2, 0), (44, 2, 1), (59, 3, 1), (60, 3, 2)],
)
def test_pages_age_when_they_should(tokens, key_pages, value_pages):
    """S = 4, G = 16, R = 24: key page p at S + (p + 1) G tokens, value page p at S + R + (p + 1) G."""
    oracle, data = _filled(CacheConfig.kitty(sink=4, page=16, window=24), tokens)
    assert (len(oracle.key_pages), len(oracle.value_pages)) == (key_pages, value_pages)
    same_keys = [np.array_equal(k, d[0]) for k, d in zip(oracle.keys, data, strict=True)]
    same_values = [np.array_equal(v, d[1]) for v, d in zip(oracle.values, data, strict=True)]
    assert same_keys == [not 4 <= t < 4 + 16 * key_pages for t in range(tokens)]
    assert same_values == [not 4 <= t < 4 + 16 * value_pages for t in range(tokens)]


def test_a_step_attends_before_it_quantizes():
    config = CacheConfig.kivi2(page=16, window=0)
    oracle, _ = _filled(config, 15)
    q, k, v = np.random.default_rng(2).normal(size=(3, 1, 16)).astype(np.float32)
    wanted = _attend([*oracle.keys, k], [*oracle.values, v], q)
    np.testing.assert_allclose(oracle.step(q, k, v), wanted, rtol=1e-12)
    assert len(oracle.key_pages) == 1
    assert not np.allclose(oracle.attend(q, 16), wanted, atol=1e-3)


def _attend(keys, values, q):
    logits = np.array([np.dot(k[0].astype(np.float64), q[0]) for k in keys]) / 4
    weights = np.exp(logits) / np.exp(logits).sum()
    return sum(w * v.astype(np.float64) for w, v in zip(weights, values, strict=True))


def test_a_chunk_is_attended_in_full_precision_and_its_history_is_not():
    config = CacheConfig.kivi2(page=16, window=0)
    oracle, _ = _filled(config, 16)
    q, k, v = np.random.default_rng(3).normal(size=(3, 20, 1, 16)).astype(np.float32)
    keys, values = [*oracle.keys, *k], [*oracle.values, *v]  # the history as quantized
    out = oracle.prefill(q, k, v)
    for t in (0, 15, 19):
        np.testing.assert_allclose(out[t], _attend(keys[: 17 + t], values[: 17 + t], q[t]), rtol=1e-10)
    assert len(oracle.key_pages) == 2


@pytest.mark.parametrize("selection, wanted", [("magnitude", (1, 2)), ("variance", (2, 3)), ("range", (3, 5))])
def test_selection(selection, wanted):
    x = np.zeros((16, 16))
    x[:, 1] = 10  # large and flat
    x[:, 2] = np.tile([6, -6], 8)
    x[:, 3] = np.tile([5, -5, 5, -5.0], 4)
    x[0, 3] = 14
    x[0, 5] = 18
    config = CacheConfig.kitty(selection=selection)
    assert Oracle(config, 1, 16).boosted_channels(x, 0, 0) == wanted


def test_ties_go_to_the_lowest_channel():
    assert Oracle(CacheConfig.kitty(), 1, 16).boosted_channels(np.ones((16, 16)), 0, 0) == (0, 1)


def test_fixed_lists_per_head():
    oracle = Oracle(CacheConfig.kitty(selection=((7, 3), (1, 2))), 2, 16)
    assert [oracle.boosted_channels(np.ones((16, 16)), 0, h) for h in range(2)] == [(3, 7), (1, 2)]


def test_random_channels_depend_on_layer_page_head_and_seed():
    x = np.ones((16, 64))

    def draw(layer=0, page=0, head=0, seed=0):
        return Oracle(CacheConfig.kitty(selection="random", seed=seed), 2, 64, layer).boosted_channels(x, page, head)

    assert draw() == draw()
    assert len({draw(), draw(layer=1), draw(page=1), draw(head=1), draw(seed=1)}) == 5


def test_full_precision_keeps_everything():
    oracle, data = _filled(CacheConfig.full(), 400)
    np.testing.assert_array_equal(np.array(oracle.keys), data[:, 0])
    assert not oracle.key_pages
