"""The state by itself: what it occupies, before and after allocation, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.full_cache import FullCache
from kitty_jax.cache.state import KVShape, init_state, nbytes, pages_per_sequence
from kitty_jax.pallas_kernels.page_format import PageFormat

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
PARTS = ["key_codes", "key_metadata", "value_codes", "value_metadata", "sink", "key_tail", "value_window"]


@pytest.mark.parametrize("name, pool_pages", [("full", None), ("kitty_plus", None), ("kivi4", 5)])
def test_nbytes_is_what_the_arrays_occupy(name, pool_pages):
    state = init_state(name, SHAPE, batch=2, capacity=700, pool_pages=pool_pages)
    report = nbytes(state)
    assert report["total"] == sum(x.nbytes for x in jax.tree.leaves(state))
    assert report["total"] == sum(v for k, v in report.items() if k != "total")
    planned = jax.eval_shape(lambda: init_state(name, SHAPE, batch=2, capacity=700, pool_pages=pool_pages))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(planned))
    assert nbytes(planned) == report


def test_parts_by_hand():
    """Kitty, 64 channels of which 8 boosted, 2 sequences of 700 tokens: 5 pages each."""
    report = nbytes(init_state("kitty", SHAPE, batch=2, capacity=700))
    heads = 3 * 2 * 2  # layers, KV heads, sequences
    assert report["key_codes"] == heads * 5 * 128 * (64 + 8) // 4
    assert report["value_codes"] == heads * 5 * 128 * 64 // 4
    assert report["key_metadata"] == heads * 5 * (64 * 4 + 8 + 1 + 7)  # scale and min, channels, exponent, padding
    assert report["value_metadata"] == heads * 5 * (128 * 4 + 1 + 15)
    assert report["sink"] == heads * 2 * 32 * 64 * 2
    assert report["key_tail"] == heads * 128 * 64 * 2
    assert report["value_window"] == heads * 256 * 64 * 2
    assert report["full_precision"] == 0
    assert report["tables"] == 4 * 2 + 4 * 10 + 2
    full = nbytes(init_state("full", SHAPE, batch=2, capacity=700))
    assert full["full_precision"] == heads * 2 * 700 * 64 * 2
    assert not any(full[part] for part in PARTS)


def test_planning_allocates_nothing():
    """A state of 160 TiB."""
    shape = KVShape(num_layers=64, num_kv_heads=8, head_dim=128)
    planned = jax.eval_shape(lambda: init_state("kitty_pro", shape, batch=4096, capacity=2**20))
    assert nbytes(planned)["total"] > 2**47


@pytest.mark.parametrize("boosted, paper, ours", [(16, 2.40625, 2.387), (32, 2.53125, 2.516)])
def test_bits_per_element(boosted, paper, ours):
    """The paper's formula, an upper bound: we store a quarter of its index of boosted channels, and padding."""
    r = 2 * boosted / 128
    assert (2 + r + 20 / 128 + 16 / 128 + 2 + 16 / 128 + 16 / 128) / 2 == pytest.approx(paper, abs=0.02)
    fmt = PageFormat(128, 128, boosted, 2)
    assert fmt.bits_per_element < paper
    assert fmt.bits_per_element == pytest.approx(ours, abs=5e-4)
    pool = init_state(CacheConfig.kitty(boost=boosted / 128), KVShape(1, 1, 128), batch=1, capacity=32 + 128 * 10)
    kv = pool.layers[0].kv
    assert 8 * (kv.key_pages.nbytes + kv.value_pages.nbytes) == fmt.bits_per_element * 2 * 10 * 128 * 128


def test_layers_of_different_kinds():
    configs = [CacheConfig.full(), CacheConfig.kitty(selection="random"), "kivi2-sink"]
    state = init_state(configs, SHAPE, batch=1, capacity=300)
    assert isinstance(state.layers[0], FullCache)
    assert [getattr(layer, "kv", None) and layer.kv.fmt.boosted for layer in state.layers] == [None, 8, 0]
    assert [x.index for x in state.layers[1:]] == [1, 0]
    assert state.page_table.shape == (1, 2)
    assert (state.batch, state.capacity) == (1, 300)


@pytest.mark.parametrize("capacity, pages", [(1, 0), (32, 0), (159, 0), (160, 1), (287, 1), (288, 2)])
def test_pages_of_a_capacity(capacity, pages):
    assert pages_per_sequence(capacity, CacheConfig.kitty()) == pages
    state = init_state("kitty", SHAPE, batch=2, capacity=capacity)
    assert state.page_table.shape == (2, pages)


def test_every_sequence_owns_its_pages_by_default():
    state = init_state("kitty", SHAPE, batch=3, capacity=600)
    assert state.pool is None
    np.testing.assert_array_equal(
        np.sort(state.page_table, axis=None), np.arange(state.layers[0].kv.key_pages.shape[0])
    )


@pytest.mark.parametrize(
    "cache, change, message",
    [
        ("kitty", {"batch": 0}, "batch and capacity must be 1 or more, got batch 0, capacity 64"),
        ("kitty", {"capacity": 0}, "got batch 2, capacity 0"),
        ("kitty", {"pool_pages": 0}, "pool_pages must be 1 or more, got 0"),
        ("full", {"pool_pages": 4}, "a full-precision cache has no page pool"),
        (CacheConfig.kitty(selection=((0,) * 8,)), {}, "distinct channels"),
        (CacheConfig.kitty(selection=tuple(tuple(range(8)) for _ in range(3))), {}, "3 KV heads, the model has 2"),
        (CacheConfig.kitty(boost=0.13), {}, "not a whole number"),
        (["kitty"], {}, "one per layer: wanted 3, got 1"),
        ("kitten", {}, "known caches: full, kivi2, kivi2-sink, kivi4, k2v4, k4v2,.*kitty, kitty-pro"),
    ],
)
def test_refusals(cache, change, message):
    with pytest.raises(ValueError, match=message):
        init_state(cache, SHAPE, **{"batch": 2, "capacity": 64, **change})
