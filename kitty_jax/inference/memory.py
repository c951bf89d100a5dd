"""What a cache costs in bytes, planned without allocating it; amounts of memory as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.state import CacheShape, KVShape, init_state, nbytes


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of the whole cache of a batch.

    Attributes:
        payload: quantized codes, or all of a full-precision layer.
        metadata: scales, minima, boosted channels, padding of the records, page table, lengths, free pages.
        buffers: full-precision sink, key tail and value window.
        bf16: a bfloat16 cache of the same batch and capacity.
        elements: keys and values that batch and capacity hold.
    """

    payload: int
    metadata: int
    buffers: int
    bf16: int
    elements: int

    @property
    def total(self) -> int:
        """Everything that is on the device."""
        return self.payload + self.metadata + self.buffers

    @property
    def ratio(self) -> float:
        """How many times as large the bfloat16 cache is."""
        return self.bf16 / self.total

    @property
    def bits_per_element(self) -> float:
        """Bits per cached element when the cache is full, metadata and buffers included."""
        return self.total * 8 / self.elements


def state_bytes(
    cache: CacheConfig | str | Sequence[CacheConfig],
    shape: CacheShape,
    *,
    batch: int,
    capacity: int,
    pool_pages: int | None = None,
) -> dict[str, int]:
    """:func:`kitty_jax.cache.state.nbytes` of the state that :func:`kitty_jax.cache.state.init_state` would make."""
    return nbytes(
        jax.eval_shape(lambda: init_state(cache, shape, batch=batch, capacity=capacity, pool_pages=pool_pages))
    )


def bf16_bytes(shape: CacheShape, *, batch: int, capacity: int) -> int:
    """Bytes of the keys and values alone of a bfloat16 cache, whatever the shape's own dtype."""
    plain = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, jnp.dtype(jnp.bfloat16))
    return state_bytes("full", plain, batch=batch, capacity=capacity)["full_precision"]


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """ "80GB" -> 80 * 10**9, "80GiB" -> 80 * 2**30; a number alone is bytes.

    Raises:
        ValueError: text that names no amount of memory.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"an amount of memory is a number with a unit such as 80GB, 80GiB or 512MB, got {text!r}")
    return round(float(match[1]) * UNITS[match[2]])


def format_bytes(size: float) -> str:
    """In the largest decimal unit that leaves 1 or more: 80 * 10**9 -> "80.00 GB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(size) >= 10**power:
            return f"{size / 10**power:,.2f} {unit}"
    return f"{size:,.0f} B"


def cache_bytes(
    cache: CacheConfig | str | Sequence[CacheConfig],
    shape: CacheShape,
    *,
    batch: int = 1,
    capacity: int,
    pool_pages: int | None = None,
) -> CacheBytes:
    """Bytes that :func:`kitty_jax.cache.state.init_state` allocates for the same arguments; see there."""
    parts = state_bytes(cache, shape, batch=batch, capacity=capacity, pool_pages=pool_pages)
    bf16 = bf16_bytes(shape, batch=batch, capacity=capacity)
    payload = parts["key_codes"] + parts["value_codes"] + parts["full_precision"]
    buffers = parts["sink"] + parts["key_tail"] + parts["value_window"]
    return CacheBytes(payload, parts["total"] - payload - buffers, buffers, bf16, bf16 // 2)
