"""Samplers: the filters against a literal NumPy version, frequencies, ties, keys, refused values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.inference.sampling import Greedy, Sampling, row_keys, step_keys

LOGITS = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32) * 3


def keys(n: int, step: int = 0) -> jax.Array:
    return step_keys(row_keys(jnp.arange(n, dtype=jnp.uint32)), jnp.int32(step))


def kept_by_hand(row: np.ndarray, temperature=1.0, top_k=None, top_p=None, min_p=None) -> set[int]:
    """The ids that survive, one filter after the other, in float64 and token by token."""
    row = row.astype(np.float64) / temperature
    ids = sorted(range(len(row)), key=lambda i: -row[i])
    if top_k is not None:
        ids = ids[:top_k]
    if top_p is not None:
        weights = np.exp(row[ids] - row[ids].max())
        weights /= weights.sum()
        mass, enough = 0.0, 0
        while mass < top_p and enough < len(ids):
            mass += weights[enough]
            enough += 1
        ids = ids[:enough]
    if min_p is not None:
        ids = [i for i in ids if np.exp(row[i] - row[ids].max()) >= min_p]
    return set(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 1.0},
        {"min_p": 0.05},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        # Each order of the filters would keep another set here.
        {"temperature": 3.0, "top_k": 5, "top_p": 0.7, "min_p": 0.3},
    ],
)
def test_filters_keep_what_a_literal_version_keeps(options) -> None:
    filtered = np.asarray(Sampling(**options).filter(jnp.asarray(LOGITS)))
    for row, out in zip(LOGITS, filtered, strict=True):
        kept = np.flatnonzero(np.isfinite(out))
        assert set(kept.tolist()) == kept_by_hand(row, **options)
        np.testing.assert_allclose(out[kept], row[kept] / options.get("temperature", 1.0), rtol=1e-6)


def test_draws_follow_the_filtered_distribution() -> None:
    row = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125], jnp.float32))
    drawn = np.asarray(Sampling(top_k=2)(jnp.broadcast_to(row, (6000, 4)), keys(6000)))
    # Of the two kept tokens the first has 2/3; the standard deviation of its share is 0.006.
    assert set(drawn.tolist()) == {0, 1}
    assert abs((drawn == 0).mean() - 2 / 3) < 0.025
    cool = np.asarray(Sampling(temperature=0.5, top_k=2)(jnp.broadcast_to(row, (6000, 4)), keys(6000)))
    assert abs((cool == 0).mean() - 4 / 5) < 0.025


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = jnp.array([[0, 2, 2, 1], [3, 3, 3, 3], [-1, -2, -1, -1]], jnp.float32)
    out = Greedy()(logits, keys(3))
    assert out.dtype == jnp.int32
    assert out.tolist() == [1, 0, 0]


def test_equal_tokens_are_kept_or_removed_together() -> None:
    logits = jnp.array([[1, 2, 2, 2, 0]], jnp.float32)
    for sampler in (Sampling(top_k=1), Sampling(top_p=0.1), Sampling(top_k=2, top_p=0.1)):
        assert np.isfinite(np.asarray(sampler.filter(logits))).tolist() == [[False, True, True, True, False]]


def test_a_filter_that_removes_nothing_changes_no_draw() -> None:
    logits = jnp.asarray(LOGITS)
    plain = Sampling()(logits, keys(6))
    for sampler in (Sampling(top_k=50), Sampling(top_k=99), Sampling(top_p=1.0), Sampling(min_p=0.0)):
        assert sampler(logits, keys(6)).tolist() == plain.tolist()


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits, sampler = jnp.asarray(LOGITS), Sampling(temperature=1.3, top_k=30, top_p=0.95, min_p=0.01)
    together = sampler(logits, keys(6, step=4)).tolist()
    alone = [sampler(logits[b : b + 1], keys(6, step=4)[b : b + 1]).item() for b in range(6)]
    assert together == alone


def test_seeds_and_steps_give_different_draws() -> None:
    flat = jnp.zeros((64, 1000), jnp.float32)
    first, second = (np.asarray(Sampling()(flat, keys(64, step))) for step in (0, 1))
    assert len(set(first.tolist())) > 50
    assert (first == second).mean() < 0.1


def test_a_new_temperature_compiles_nothing() -> None:
    traced = []

    @jax.jit
    def draw(sampler, logits, keys):
        traced.append(sampler)
        return sampler(logits, keys)

    for sampler in (Sampling(0.7, 5, 0.9, 0.1), Sampling(1, 5, 0.5, 0.0), Sampling(2.5, 5, 1, 1)):
        draw(sampler, jnp.asarray(LOGITS), keys(6))
    assert len(traced) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0}, r"temperature must be above 0 \(for temperature 0 use Greedy\(\)\), got 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"temperature": float("inf")}, "temperature must be above 0"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": 1e-40}, r"temperature must be above 0 .*, got 1e-40 \(0.0 as a float32\)"),
        ({"temperature": 1e39}, "temperature must be above 0"),
        ({"top_p": 1e-39}, "top_p must be above 0"),
        ({"top_k": 0}, "top_k must be a whole number, 1 or more, or None, got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, or None, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, or None, got -0.1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_top_p_that_is_reached_exactly_keeps_no_further_token():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]], jnp.float32))
    kept = np.isfinite(Sampling(top_p=0.5).filter(logits))
    np.testing.assert_array_equal(kept, [[True, False, False]])
