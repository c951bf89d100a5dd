"""Bytes of a cache by hand, amounts of memory as text."""

import pytest

from kitty_jax.cache.state import KVShape
from kitty_jax.inference.memory import format_bytes, parse_bytes
from kitty_jax.inference.memory_plan import cache_bytes

GB = 10**9
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


def test_a_full_cache_in_bfloat16_is_its_own_measure() -> None:
    size = cache_bytes("full", QWEN3_8B, batch=2, capacity=100)
    assert size.payload == size.bf16
    assert size.buffers == 0
    assert size.ratio == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "text, size", [("80GB", 80 * GB), ("80 GiB", 80 * 2**30), ("1.5tb", 1_500 * GB), ("12", 12), ("3m", 3_000_000)]
)
def test_amounts_of_memory(text, size) -> None:
    assert parse_bytes(text) == size


def test_sizes_as_text() -> None:
    sizes = (0, 999, 1000, 5 * 10**6, 80 * GB, -1.5e12)
    assert [format_bytes(n) for n in sizes] == ["0 B", "999 B", "1.00 kB", "5.00 MB", "80.00 GB", "-1.50 TB"]


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1ib", "80 GB please"])
def test_what_is_no_amount_of_memory(text) -> None:
    with pytest.raises(ValueError, match="an amount of memory is a number with a unit such as 80GB"):
        parse_bytes(text)
