"""Channels chosen by the queries: the statistic is the same however tokens come, and the pages are the oracle's."""

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.layer_cache import Step
from kitty_jax.cache.pool import release
from kitty_jax.cache.query_statistic import squared_queries
from kitty_jax.cache.state import KVShape, init_state, nbytes
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import append_jit, assert_equals_oracle, differences, insert_all_jit, open_layer, random_kv

N, K, D, G, S = 4, 2, 16, 16, 4
CONFIGS = (
    CacheConfig.kitty_plus(sink=S, page=G, window=16, rotate_values=False),
    CacheConfig.kitty(sink=S, page=G, window=24, selection="error", boost=0.25),
    CacheConfig.kitty(sink=S, page=G, window=16),  # has no statistic, beside layers that have one
)
LENGTHS = np.array([70, 0, 53, 4, 36, 5])  # 36: a page is full; 4: the sink is
CAPACITY = 72


@pytest.fixture(scope="module")
def case():
    keys, values = random_kv(11, len(LENGTHS), max(LENGTHS), K, D)
    # Queries that matter where keys do not, and that change from page to page.
    rng = np.random.default_rng(5)
    size = np.exp(rng.normal(size=(len(LENGTHS), max(LENGTHS) // G + 1, N, D)))
    queries = rng.normal(size=(*keys.shape[:2], N, D)) * np.repeat(size, G, axis=1)[:, : max(LENGTHS)]
    queries = jnp.array(queries, jnp.float32)
    empty = init_state(CONFIGS, KVShape(len(CONFIGS), K, D, jnp.float32), batch=len(LENGTHS), capacity=CAPACITY)
    tokens = insert_all_jit(empty, keys, values, jnp.array(LENGTHS), queries)
    return keys, values, queries, empty, tokens


def test_one_chunk_ends_where_tokens_end(case):
    keys, values, queries, empty, tokens = case
    assert differences(append_jit(empty, keys, values, jnp.array(LENGTHS), queries), tokens) == []


def test_chunks_end_where_tokens_end(case):
    width = 7
    keys, values, queries, state, tokens = case
    done, rng = np.zeros_like(LENGTHS), np.random.default_rng(width)
    while (done < LENGTHS).any():
        size = np.minimum(rng.integers(0, width + 1, len(LENGTHS)), LENGTHS - done)
        rows = np.minimum(done[:, None] + np.arange(width), keys.shape[1] - 1)[:, :, None, None]
        k, v, q = (jnp.take_along_axis(x, rows, axis=1) for x in (keys, values, queries))
        state = append_jit(state, k, v, jnp.array(size), q)
        done = done + size
    assert differences(state, tokens) == []


def test_a_sequence_that_follows_another_does_not_see_its_queries(case):
    keys, values, queries, _, tokens = case
    again = release(tokens, jnp.ones(len(LENGTHS), bool))
    again = append_jit(again, keys, values, jnp.array(LENGTHS), queries)
    for layer, (got, wanted) in enumerate(zip(again.layers[:2], tokens.layers[:2], strict=True)):
        past = LENGTHS > S
        np.testing.assert_array_equal(got.query_squares[past], wanted.query_squares[past], err_msg=f"layer {layer}")
        np.testing.assert_array_equal(got.kv.key_pages, wanted.kv.key_pages)


@pytest.mark.parametrize("layer", range(len(CONFIGS)))
def test_pages_are_the_oracles(case, layer):
    keys, values, queries, _, tokens = case
    opened = open_layer(tokens, layer)
    by_keys_alone = 0
    for b, length in enumerate(LENGTHS):
        oracle = Oracle(CONFIGS[layer], K, D, layer)
        for t in range(length):
            oracle.insert(*(np.asarray(x[b, t]) for x in (keys, values, queries)))
            oracle.age()
        assert_equals_oracle(opened, b, oracle)
        for p, heads in enumerate(oracle.key_pages):
            for h, page in enumerate(heads):
                x = np.asarray(keys[b, S + p * G : S + (p + 1) * G, h], np.float64)
                top = np.argsort(-np.mean(np.abs(x), 0), kind="stable")[: len(page.channels)]
                by_keys_alone += page.channels == tuple(sorted(top.tolist()))
    if CONFIGS[layer].weighs_queries:
        assert by_keys_alone < 8  # of 16 pages: the queries did decide


def test_the_statistic_by_definition(case):
    _, _, queries, _, tokens = case
    for b, length in enumerate(LENGTHS):
        past = length - S
        if past <= 0:
            assert not np.any(tokens.layers[0].query_squares[b])
            continue
        page = np.asarray(queries[b, S + (past - 1) // G * G : length], np.float64)
        wanted = np.sum(page.reshape(-1, K, N // K, D) ** 2, axis=(0, 2))
        np.testing.assert_allclose(tokens.layers[0].query_squares[b], wanted, rtol=1e-3)


def test_memory_counts_it_and_only_where_it_is(case):
    _, _, _, empty, _ = case
    assert [x.query_squares is None for x in empty.layers] == [False, False, True]
    assert nbytes(empty)["query_statistic"] == 2 * len(LENGTHS) * K * D * 4
    for boost in (0.0, 1.0):  # nothing to choose, nothing to remember
        assert not CacheConfig.kitty_plus(boost=boost).weighs_queries


def test_squares_of_a_group_are_summed():
    queries = jnp.array([[[1.0, 2], [3, 4], [5, 6], [7, 8]]])
    np.testing.assert_array_equal(squared_queries(queries, 2), [[[10, 20], [74, 100]]])


def test_without_queries_it_says_so(case):
    keys, values, _, empty, _ = case
    with pytest.raises(ValueError, match='"sensitivity" weighs channels by the queries: pass them'):
        empty.layers[0].append(Step(empty.lengths, empty.lengths, empty.page_table), None, keys, values)
