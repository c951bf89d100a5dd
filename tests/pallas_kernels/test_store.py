"""Storing pages in the pool: which records change, where the tokens of a page come from, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels.dequantize.operation import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import quantize_keys, quantize_values
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages, write_records

FMT = PageFormat(page=16, head_dim=32, boosted=4)
POOL, HEADS = 5, 2


def pool(words, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (POOL, HEADS, words), np.uint32))


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_key_pages_go_to_their_records_and_the_id_of_no_record_is_skipped():
    before, keys = pool(FMT.key_words), normal(4, HEADS, 16, 32)
    ids = jnp.asarray([3, POOL, 0, POOL], jnp.int32)
    after = np.asarray(jax.jit(lambda p, k, i: store_key_pages(p, k, i, FMT))(before, keys, ids))
    records = np.asarray(quantize_keys(keys, FMT))
    np.testing.assert_array_equal(after[3], records[0])
    np.testing.assert_array_equal(after[0], records[2])
    np.testing.assert_array_equal(after[[1, 2, 4]], np.asarray(before)[[1, 2, 4]])


def test_options_of_keys_reach_the_quantizer():
    before, keys = pool(FMT.key_words), normal(1, HEADS, 16, 32)
    ids = jnp.asarray([2], jnp.int32)
    scores = normal(1, HEADS, 32, seed=2).astype(jnp.float32)
    weights = jnp.abs(normal(1, HEADS, 32, seed=3)).astype(jnp.float32)
    for options in (
        {"score": "variance"},
        {"score": "range", "weights": weights},
        {"scores": scores},
        {"scores": scores, "weights": weights, "shrink": (1.0, 0.8)},
    ):
        after = store_key_pages(before, keys, ids, FMT, **options)
        np.testing.assert_array_equal(after[2], quantize_keys(keys, FMT, **options)[0])


@pytest.mark.parametrize("value_bits", [2, 4])
def test_value_pages_come_out_of_the_ring(value_bits):
    fmt = PageFormat(page=16, head_dim=32, boosted=0, value_bits=value_bits)
    before, ring = pool(fmt.value_words), normal(4, HEADS, 40, 32)
    ids = jnp.asarray([1, 4, POOL, 2], jnp.int32)
    starts = [0, 24, 3, 33]
    after = np.asarray(store_value_pages(before, ring, jnp.asarray(starts, jnp.int32), ids, fmt))
    for page, start, record in zip(ring, starts, ids, strict=True):
        if record == POOL:
            continue
        tokens = jnp.stack([page[:, (start + i) % 40] for i in range(16)], 1)  # slot 39 is followed by slot 0
        np.testing.assert_array_equal(after[record], quantize_values(tokens, fmt))
    np.testing.assert_array_equal(after[[0, 3]], np.asarray(before)[[0, 3]])


def test_values_without_a_ring():
    before, values = pool(FMT.value_words), normal(2, HEADS, 16, 32)
    after = store_value_pages(before, values, jnp.zeros(2, jnp.int32), jnp.asarray([4, 0], jnp.int32), FMT)
    np.testing.assert_array_equal(after[jnp.asarray([4, 0])], quantize_values(values, FMT))


def test_no_pages_and_an_empty_pool():
    before, none = pool(FMT.key_words), jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(store_key_pages(before, normal(0, HEADS, 16, 32), none, FMT), before)
    empty, ids = jnp.zeros((0, HEADS, FMT.value_words), jnp.uint32), jnp.zeros(2, jnp.int32)
    assert store_value_pages(empty, normal(2, HEADS, 40, 32), ids, ids, FMT).shape == empty.shape
    assert dequantize_pages(before, none, FMT, "keys").shape == (0, HEADS, 16, 32)
    assert not dequantize_pages(empty, ids, FMT, "values").any()


def test_what_does_not_fit_is_refused():
    keys, ids = normal(2, HEADS, 16, 32), jnp.zeros(2, jnp.int32)
    good = pool(FMT.key_words)
    with pytest.raises(ValueError, match=rf"the pool of keys must be uint32 \[M, K, {FMT.key_words}\], got uint32"):
        store_key_pages(pool(FMT.key_words + 4), keys, ids, FMT)
    with pytest.raises(ValueError, match=r"page_ids must be \[X\] and keys \[X, K = 2, tokens, head_dim\], got \[3\]"):
        store_key_pages(good, keys, jnp.zeros(3, jnp.int32), FMT)
    with pytest.raises(ValueError, match=r"keys must end in \[16, 32\], got \[2, 2, 15, 32\]"):
        store_key_pages(good, keys[:, :, :15], ids, FMT)
    with pytest.raises(ValueError, match="score must be one of magnitude, variance, range, got 'mean'"):
        store_key_pages(good, keys, ids, FMT, score="mean")
    with pytest.raises(ValueError, match=r"values must end in at least \[16, 32\], got \[2, 2, 12, 32\]"):
        store_value_pages(pool(FMT.value_words), keys[:, :, :12], ids, ids, FMT)
    with pytest.raises(ValueError, match="implementation must be one of auto, mosaic, xla, got 'cuda'"):
        store_key_pages(good, keys, ids, FMT, implementation="cuda")
    with pytest.raises(ValueError, match=rf"records must be uint32\[2, 2, {FMT.key_words}\] for page_ids \[2\]"):
        write_records(good, good[:1], ids)
