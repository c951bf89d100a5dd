"""Sequences that share pages: fork, release, and several samples of a prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.pool import fork, release
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.inference.generate import generate, prepare
from kitty_jax.inference.sampling import Sampling
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import (
    append_jit,
    assert_equals_oracle,
    fill_oracle,
    insert_all_jit,
    open_layer,
    random_kv,
)
from tests.inference.generate_cases import PROMPTS, small_cache, tiny_model

CONFIG = CacheConfig.kitty(sink=4, page=16, window=16)
KEYS, VALUES = random_kv(8, 4, 120, 1, 16)
fork_jit = jax.jit(fork)


def _empty(pool_pages=24, batch=4):
    return init_state(CONFIG, KVShape(1, 1, 16, jnp.float32), batch=batch, capacity=100, pool_pages=pool_pages)


def _grow(state, by, text, by_token=True):
    """``by[b]`` more tokens of text[b] for sequence b, from the place where it stands."""
    at = np.minimum(np.asarray(state.lengths)[:, None] + np.arange(60), 119)
    k, v = (x[np.array(text)[:, None], at] for x in (KEYS, VALUES))
    return (insert_all_jit if by_token else append_jit)(state, k, v, jnp.array(by))


def _check_pool(state):
    """Every page is free once, or held by as many sequences as name it."""
    held = np.bincount([p for row in np.asarray(state.page_table) for p in row if p >= 0], minlength=24)
    assert state.pool.reference_counts[0].tolist() == held.tolist()
    free = state.pool.free[0, : int(state.pool.num_free[0])].tolist()
    assert sorted(free) == np.flatnonzero(held == 0).tolist()


@pytest.mark.parametrize("length", [2, 20, 37, 58])
def test_a_fork_goes_on_by_itself(length):
    """Copies hold the source's tokens in the source's pages; then each grows with its own text, like the oracle."""
    state = _grow(_empty(), [length, 0, 21, 0], [0, 1, 2, 3], by_token=False)
    state = fork_jit(state, jnp.array([0, 0, 0]), jnp.array([1, 3, 4]))  # 4 is no sequence: passed over
    assert state.lengths.tolist() == [length, length, 21, length]
    pages = max(length - 4, 0) // 16
    assert state.page_table[1].tolist() == state.page_table[0].tolist() == state.page_table[3].tolist()
    assert int(state.pool.num_free[0]) == 24 - pages - 1
    _check_pool(state)
    state = _grow(state, [33, 40, 3, 17], [0, 1, 2, 3])
    _check_pool(state)
    opened = open_layer(state)
    for b, by in enumerate((33, 40, 3, 17)):
        first = 0 if b != 2 else 2
        start = length if b != 2 else 21
        k, v = (jnp.concatenate([x[first, :start], x[b, start:]]) for x in (KEYS, VALUES))
        assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, 1, 16), k, v, start + by))


def test_pages_return_when_the_last_holder_leaves():
    state = fork_jit(_grow(_empty(), [52, 0, 0, 0], [0, 1, 2, 3], by_token=False), jnp.array([0, 0]), jnp.array([1, 2]))
    assert int(state.pool.num_free[0]) == 21
    for done, free in (([1, 0, 0, 0], 21), ([0, 1, 0, 0], 21), ([0, 0, 1, 0], 24)):
        state = release(state, jnp.array(done, bool))
        assert int(state.pool.num_free[0]) == free
        _check_pool(state)
    both = fork_jit(_grow(_empty(), [52, 0, 0, 0], [0, 1, 2, 3], by_token=False), jnp.array([0]), jnp.array([1]))
    both = release(both, jnp.array([True, True, False, False]))
    assert int(both.pool.num_free[0]) == 24
    _check_pool(both)


def test_a_target_gives_up_what_it_held():
    state = _grow(_empty(), [36, 70, 0, 0], [0, 1, 2, 3], by_token=False)
    state = fork_jit(state, jnp.array([0]), jnp.array([1]))
    assert int(state.pool.num_free[0]) == 22
    _check_pool(state)


@pytest.mark.parametrize(
    "source, target, wanted",
    [
        ([0], [0], [60, 40, 22, 0]),
        ([1, 0], [0, 1], [40, 60, 22, 0]),
        ([0, 0, 1], [0, 1, 2], [60, 60, 40, 0]),
        ([2, 0, 1], [0, 1, 2], [22, 60, 40, 0]),
        ([-1, 4, 3, 1], [0, 1, 2, 3], [60, 40, 0, 40]),  # no sequences: passed over
    ],
)
def test_a_sequence_may_be_source_and_target(source, target, wanted):
    before = _grow(_empty(), [60, 40, 22, 0], [0, 1, 2, 3], by_token=False)
    state = fork_jit(before, jnp.array(source), jnp.array(target))
    assert state.lengths.tolist() == wanted
    _check_pool(state)
    opened, owner = open_layer(state), list(range(4))
    for a, b in zip(source, target, strict=True):
        owner[b] = a if 0 <= a < 4 else b
    for b, length in enumerate(wanted):
        k, v = (x[owner[b], :length] for x in (KEYS, VALUES))
        assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, 1, 16), k, v, length))


def test_one_of_several_sources_counts():
    state = fork_jit(
        _grow(_empty(), [60, 40, 22, 0], [0, 1, 2, 3], by_token=False), jnp.array([0, 1]), jnp.array([3, 3])
    )
    assert state.lengths.tolist() in ([60, 40, 22, 60], [60, 40, 22, 40])
    _check_pool(state)


def test_the_query_statistic_is_copied():
    config = CacheConfig.kitty_plus(sink=4, page=16, window=16)
    state = init_state(config, KVShape(1, 1, 16, jnp.float32), batch=3, capacity=100, pool_pages=9)
    layer = dataclasses.replace(state.layers[0], query_squares=jnp.arange(48.0).reshape(3, 1, 16))
    state = fork_jit(dataclasses.replace(state, layers=(layer,)), jnp.array([1]), jnp.array([2]))
    assert (state.layers[0].query_squares[2] == layer.query_squares[1]).all()


def test_fork_without_a_pool_is_refused():
    with pytest.raises(ValueError, match="needs a page pool"):
        fork(_empty(None), jnp.array([0]), jnp.array([1]))
    with pytest.raises(ValueError, match=r"got shapes \(1,\) and \(2,\)"):
        fork(_empty(), jnp.array([0]), jnp.array([1, 2]))


def test_samples_are_what_each_would_be_alone():
    options = {
        "cache": small_cache("kitty_pro"),
        "max_new_tokens": 20,
        "capacity": 96,
        "sampler": Sampling(temperature=1.2),
    }
    result = generate(tiny_model(), PROMPTS, seed=5, samples=3, **options)
    assert result.tokens.shape == (9, 20)
    rows = result.sequences()
    assert len({tuple(row) for row in rows}) == 9
    repeated = [prompt for prompt in PROMPTS for _ in range(3)]
    assert rows == generate(tiny_model(), repeated, seed=5, **options).sequences()


def test_samples_share_the_pages_of_their_prompt():
    prompt = [list(range(90)) * 2]
    options = {"cache": small_cache("kitty"), "max_new_tokens": 20, "capacity": 200, "sampler": Sampling()}
    generation = prepare(tiny_model(), prompt, samples=8, **options)
    assert generation.programs.pool_pages == 32  # 11 of the prompt once and 8 x 1, rounded up; 8 x 12 without sharing
    state = generation.run(keep_state=True).state
    assert int(state.pool.num_free[0]) >= 32 - 11 - 8
    assert len(np.unique(np.asarray(state.page_table)[:, :11])) == 11
