"""kitty_jax.inference.memory: bytes of a cache by hand, and bytes on the device."""

import jax
import jax.numpy as jnp
import pytest

from kitty_jax.cache.config import CACHE_NAMES, CacheConfig
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.inference.memory import cache_bytes

QWEN3_8B = KVShape(36, 8, 128)


def test_kitty_pro_at_8192_tokens_by_hand() -> None:
    size = cache_bytes("kitty_pro", QWEN3_8B, capacity=8192)
    heads, pages = 36 * 8, (8192 - 32) // 128
    elements = heads * pages * 128 * 128
    assert size.payload == elements * 2 // 8 * 2 + elements * 32 // 128 * 2 // 8
    # A scale and a minimum of 16 bits per channel (keys) and per token (values), 32 boosted channels of 8 bits, an
    # exponent, padding to 16 bytes: keys 512 + 32 + 1 -> 560, values 512 + 1 -> 528. Then page table, length, flag.
    assert size.metadata == heads * pages * (560 + 528) + pages * 4 + 4 + 1
    assert size.buffers == heads * (2 * 32 + 128 + 256) * 128 * 2
    assert size.bf16 == heads * 8192 * 128 * 2 * 2
    assert size.total == size.payload + size.metadata + size.buffers
    assert size.ratio == pytest.approx(5.49, abs=0.01)
    assert size.bits_per_element == pytest.approx(16 / size.ratio)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_planned_bytes_are_the_bytes_on_the_device(name) -> None:
    shape = KVShape(2, 2, 32, jnp.dtype(jnp.bfloat16))
    state = init_state(name, shape, batch=3, capacity=600)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert cache_bytes(name, shape, batch=3, capacity=600).total == held


def test_a_full_cache_in_bfloat16_is_its_own_measure() -> None:
    size = cache_bytes("full", QWEN3_8B, batch=2, capacity=100)
    assert size.payload == size.bf16
    assert size.buffers == 0
    assert size.ratio == pytest.approx(1, abs=1e-4)


def test_a_smaller_pool_is_counted() -> None:
    whole = cache_bytes(CacheConfig.kitty(), QWEN3_8B, batch=4, capacity=8192)
    half = cache_bytes(CacheConfig.kitty(), QWEN3_8B, batch=4, capacity=8192, pool_pages=126)
    assert half.payload * 2 == whole.payload
