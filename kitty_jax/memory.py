"""What a cache costs in bytes, planned without allocating it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kitty_jax.config import CacheConfig
from kitty_jax.state import CacheShape, KVShape, init_state, nbytes


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


def cache_bytes(
    cache: CacheConfig | str | Sequence[CacheConfig],
    shape: CacheShape,
    *,
    batch: int = 1,
    capacity: int,
    pool_pages: int | None = None,
) -> CacheBytes:
    """Bytes that :func:`kitty_jax.state.init_state` allocates for the same arguments; see there."""
    state = jax.eval_shape(lambda: init_state(cache, shape, batch=batch, capacity=capacity, pool_pages=pool_pages))
    plain = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, jnp.dtype(jnp.bfloat16))
    bf16 = nbytes(jax.eval_shape(lambda: init_state("full", plain, batch=batch, capacity=capacity)))["full_precision"]
    parts = nbytes(state)
    payload = parts["key_codes"] + parts["value_codes"] + parts["full_precision"]
    buffers = parts["sink"] + parts["key_tail"] + parts["value_window"]
    return CacheBytes(payload, parts["total"] - payload - buffers, buffers, bf16, bf16 // 2)
