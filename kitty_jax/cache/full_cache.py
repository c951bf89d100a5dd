"""A layer's keys and values in full precision, for comparison."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import cudnn_takes, masked_attention
from kitty_jax.cache.layer_cache import LayerCache, LayerShape, Step, copy_rows_of, rows_of, size_in_bytes
from kitty_jax.pallas_kernels.decode_attention.insert_token import put


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullCache(LayerCache):
    """One layer in full precision: keys and values [B, capacity, K, D]."""

    keys: Array
    values: Array

    heads_axis = 2
    writes_first = True

    @classmethod
    def empty(cls, config: CacheConfig, shape: LayerShape) -> FullCache:
        """Zeros in the model's dtype."""
        size = (shape.batch, shape.capacity, shape.kv_heads, shape.head_dim)
        return cls(jnp.zeros(size, shape.dtype), jnp.zeros(size, shape.dtype))

    def attend(self, step: Step, q: Array, k: Array, v: Array) -> Array:
        """See :meth:`.LayerCache.attend`; the step's tokens are cached already."""
        own = self.take_rows(step.rows)
        if q.shape[1] == 1 and cudnn_takes(q):
            seen = step.lengths + 1
            return jax.nn.dot_product_attention(
                q, own.keys, own.values, key_value_seq_lengths=seen, implementation="cudnn"
            )
        return masked_attention(q, own.keys, own.values, step.lengths)

    def append(self, step: Step, q: Array, k: Array, v: Array) -> FullCache:
        """See :meth:`.LayerCache.append`."""
        t = jnp.arange(k.shape[1], dtype=jnp.int32)
        slot = jnp.where(t < step.num_new[:, None], step.lengths[:, None] + t, self.keys.shape[1])
        place = (step.sequences[:, None], slot)
        return FullCache(put(self.keys, place, k), put(self.values, place, v))

    def decode(self, step: Step, q: Array, k: Array, v: Array) -> tuple[Array, FullCache]:
        """See :meth:`.LayerCache.decode`."""
        written = self.append(step, q, k, v)
        return written.attend(step, q, k, v), written

    def take_rows(self, rows: Array | None) -> FullCache:
        """See :meth:`.LayerCache.take_rows`."""
        return FullCache(rows_of(self.keys, rows), rows_of(self.values, rows))

    def copy_rows(self, source: Array, target: Array) -> FullCache:
        """See :meth:`.LayerCache.copy_rows`."""
        return FullCache(copy_rows_of(self.keys, source, target), copy_rows_of(self.values, source, target))

    def nbytes(self) -> dict[str, int]:
        """See :meth:`.LayerCache.nbytes`."""
        return {"full_precision": size_in_bytes(self.keys, self.values)}
