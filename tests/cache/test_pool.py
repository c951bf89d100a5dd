"""A pool smaller than the batch could fill: pages on demand, running out, giving back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.pool import release
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import (
    append_jit,
    assert_equals_oracle,
    differences,
    fill_oracle,
    insert_all_jit,
    open_layer,
    random_kv,
)

CONFIG = CacheConfig.kitty(sink=4, page=16, window=16)
BATCH, CAPACITY, CHUNK = 3, 68, 40
KEYS, VALUES = random_kv(21, BATCH, CAPACITY + CHUNK, 1, 16)


def _empty(pool_pages):
    return init_state(CONFIG, KVShape(1, 1, 16, jnp.float32), batch=BATCH, capacity=CAPACITY, pool_pages=pool_pages)


def _grow(state, *by, by_token=False):
    """``by[b]`` further tokens of sequence b's own text."""
    rows = np.minimum(np.asarray(state.lengths)[:, None] + np.arange(CHUNK), CAPACITY + CHUNK - 1)
    k, v = (jnp.take_along_axis(x, rows[:, :, None, None], axis=1) for x in (KEYS, VALUES))
    return (insert_all_jit if by_token else append_jit)(state, k, v, jnp.array(by))


def _pages(state):
    return [[int(p) for p in row if p >= 0] for row in state.page_table]


def _check(state, lengths, pool_pages, exhausted=(False,) * BATCH):
    """Lengths and flags; contents equal to the oracle; every page is held once or free once."""
    assert state.lengths.tolist() == list(lengths)
    assert state.exhausted.tolist() == list(exhausted)
    held = _pages(state)
    assert [len(p) for p in held] == [max(n - 4, 0) // 16 for n in lengths]
    free = state.pool.free[0, : int(state.pool.num_free[0])].tolist()
    assert sorted([*(page for pages in held for page in pages), *free]) == list(range(pool_pages))
    assert state.pool.reference_counts[0].tolist() == [int(page not in free) for page in range(pool_pages)]
    opened = open_layer(state)
    for b, length in enumerate(lengths):
        assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, 1, 16), KEYS[b], VALUES[b], length))


@pytest.mark.parametrize("by_token", [False, True], ids=["chunks", "tokens"])
def test_pages_are_handed_out_as_sequences_grow(by_token):
    state = _empty(8)
    _check(state, (0, 0, 0), 8)
    for by, lengths in (((3, 19, 20), (3, 19, 20)), ((30, 1, 0), (33, 20, 20)), ((4, 16, 33), (37, 36, 53))):
        state = _grow(state, *by, by_token=by_token)
        _check(state, lengths, 8)
    assert sum(len(p) for p in _pages(state)) == 7


def test_a_scrambled_table_reads_the_same():
    """Sequences grow in turns and one is released in between; nobody's content depends on where its pages are."""
    state = _grow(_empty(8), 22, 25, 22)
    state = release(_grow(state, 0, 20, 0), jnp.array([True, False, False]))
    state = _grow(_grow(state, 0, 0, 35), 40, 0, 0)
    _check(state, (40, 45, 57), 8)
    steps = [np.diff(pages) for pages in _pages(state)]
    assert any(s.min() < 0 < s.max() for s in steps)
    assert any(np.abs(s).max() > 1 for s in steps)


@pytest.mark.parametrize("by_token", [False, True], ids=["chunks", "tokens"])
def test_an_empty_pool_is_reported_and_nothing_is_lost(by_token):
    state = _grow(_empty(3), 21, 36, 10)
    _check(state, (21, 36, 10), 3)
    # Sequence 0 needs a page at 36 tokens: as a chunk it is refused whole; by tokens it stops before the page.
    state = _grow(state, 16, 3, 1, by_token=by_token)
    first = 35 if by_token else 21
    _check(state, (first, 39, 11), 3, (True, False, False))
    # It stays refused, the others go on, and they too are refused where they need a page.
    state = _grow(state, 16, 2, 20, by_token=by_token)
    _check(state, (first, 41, 19 if by_token else 11), 3, (True, False, True))
    state = release(state, jnp.array([False, True, False]))
    _check(state, (first, 0, 19 if by_token else 11), 3, (True, False, True))
    state = _grow(state, 1 if by_token else 16, 0, 0, by_token=by_token)
    assert (int(state.lengths[0]), _pages(state)[1]) == (36 if by_token else 37, [])
    assert int(state.pool.num_free[0]) == 1


def test_refused_in_batch_order():
    """One page is left and two sequences want it: the first gets it."""
    state = _grow(_empty(2), 20, 19, 19)
    state = _grow(state, 0, 1, 1)
    _check(state, (20, 20, 19), 2, (False, False, True))


def test_capacity_is_a_limit_with_and_without_a_pool():
    for pool_pages in (12, None):
        state = _grow(_grow(_empty(pool_pages), 40, 40, 0), 28, 29, 5)
        assert state.lengths.tolist() == [CAPACITY, 40, 5]
        assert state.exhausted.tolist() == [False, True, False]
        again = _grow(state, 1, 1, 1)
        assert again.lengths.tolist() == [CAPACITY, 41, 6]
        assert again.exhausted.tolist() == [True, True, False]
        opened = open_layer(again)
        for b, length in enumerate(again.lengths.tolist()):
            assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, 1, 16), KEYS[b], VALUES[b], length))


def test_inactive_sequences_do_not_change():
    state = _grow(_empty(12), 30, 37, 20)
    assert differences(_grow(state, 0, 0, 0), state) == []
    after = _grow(state, 0, 20, 0, by_token=True)

    def of(state, b):
        kv = state.layers[0].kv
        records = [pool[jnp.array(_pages(state)[b])] for pool in (kv.key_pages, kv.value_pages)]
        buffers = [x[b] for x in (kv.sink_keys, kv.sink_values, kv.tail_keys, kv.ring_values)]
        return [state.lengths[b], state.page_table[b], state.exhausted[b], *records, *buffers]

    assert differences(of(after, 0), of(state, 0)) == []
    assert differences(of(after, 2), of(state, 2)) == []
    assert len(differences(of(after, 1), of(state, 1))) > 3


def test_release_gives_each_page_back_once():
    state = _grow(_empty(5), 36, 21, 3)
    done = jnp.array([True, False, True])
    once = release(state, done)
    _check(once, (0, 21, 0), 5)
    assert differences(release(once, done), once) == []
    assert differences(jax.jit(release)(state, done), once) == []
    _check(release(once, jnp.array([True, True, True])), (0, 0, 0), 5)
    # What is given back is usable, all of it.
    _check(_grow(release(once, ~done), 0, 36, 40), (0, 36, 40), 5)


def test_release_without_a_pool_empties_the_sequence():
    state = _grow(_empty(None), 36, 21, 3)
    state = _grow(release(state, jnp.array([True, False, False])), 25, 0, 0)
    assert state.lengths.tolist() == [25, 21, 3]
    opened = open_layer(state)
    for b, length in enumerate((25, 21, 3)):
        assert_equals_oracle(opened, b, fill_oracle(Oracle(CONFIG, 1, 16), KEYS[b], VALUES[b], length))


def test_release_clears_the_flag_of_the_released_alone():
    state = dataclasses.replace(_empty(5), exhausted=jnp.array([True, True, False]))
    assert release(state, jnp.array([True, False, True])).exhausted.tolist() == [False, True, False]
