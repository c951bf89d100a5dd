"""A layer's keys and values in 2-bit pages and full-precision buffers.

Tokens come in chunks (:meth:`QuantizedCache.append`) or one at a time (:meth:`QuantizedCache.decode`, and one
:func:`.flush.flush` for all layers). Both end in the same state, bit for bit, for the same keys and values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.chunk_attention import chunk_attention, is_long
from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.layer_cache import LayerCache, LayerShape, Step, copy_rows_of, rows_of, size_in_bytes
from kitty_jax.cache.query_statistic import add_chunk, add_token, squared_queries
from kitty_jax.cache.rotation import rotate
from kitty_jax.cache.selection import key_quantization
from kitty_jax.pallas_kernels.decode_attention.insert_token import put
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.ordering import not_before
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache(LayerCache):
    """One layer in 2-bit pages and full-precision buffers.

    Attributes:
        kv: pages and buffers.
        query_squares: float32 [B, K, D], the squares of the queries summed over the tokens so far of each sequence's
            newest page (:mod:`.query_statistic`); None unless the config weighs channels by them.
        config: its cache config.
        index: its number where the config draws random channels, which depend on it; 0 elsewhere, so that equal layers
            share what is traced for one of them.
        shards: devices that share the KV heads, the size of the mesh's "model" axis.
    """

    kv: LayerKV
    query_squares: Array | None
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    index: int = dataclasses.field(metadata={"static": True})
    shards: int = dataclasses.field(default=1, metadata={"static": True})

    heads_axis = 1
    writes_first = False

    @classmethod
    def empty(cls, config: CacheConfig, shape: LayerShape) -> QuantizedCache:
        """Zeros; ValueError where the config does not fit the model's heads."""
        b, k, d = shape.batch, shape.kv_heads, shape.head_dim
        fmt = config.page_format(d)
        lists = config.channel_lists()
        if len(lists) not in (0, 1, k):
            raise ValueError(f"selection lists channels for {len(lists)} KV heads, the model has {k}")

        def buffer(tokens: int) -> Array:
            return jnp.zeros((b, k, tokens, d), shape.dtype)

        kv = LayerKV(
            key_pages=jnp.zeros((shape.pages, k, fmt.key_words), jnp.uint32),
            value_pages=jnp.zeros((shape.pages, k, fmt.value_words), jnp.uint32),
            sink_keys=buffer(config.sink),
            sink_values=buffer(config.sink),
            tail_keys=buffer(fmt.page),
            ring_values=buffer(fmt.page + config.window),
            fmt=fmt,
        )
        squares = jnp.zeros((b, k, d), jnp.float32) if config.weighs_queries else None
        return cls(kv, squares, config, shape.index if config.selection == "random" else 0, shape.shards)

    def attend(self, step: Step, q: Array, k: Array, v: Array) -> Array:
        """See :meth:`.LayerCache.attend`."""
        own = self.take_rows(step.rows).kv
        arguments = (q, k, self._rotate(v), own, step.page_table, step.lengths, step.num_new)
        if is_long(q, k):
            return self._rotate(chunk_attention(*arguments))
        return self._rotate(decode_attention(*arguments, implementation=step.implementation))

    def append(self, step: Step, q: Array | None, k: Array, v: Array) -> QuantizedCache:
        """See :meth:`.LayerCache.append`. q may be None where the config does not weigh channels by the queries."""
        return _append(self, step, q, k, self._rotate(v))

    def decode(self, step: Step, q: Array, k: Array, v: Array) -> tuple[Array, QuantizedCache]:
        """See :meth:`.LayerCache.decode`."""
        facts = (step.page_table, step.lengths, step.num_new)
        options = {"implementation": step.implementation, "insert": True}
        out, kv = decode_attention(q, k, self._rotate(v), self.kv, *facts, **options)
        return self._rotate(out), dataclasses.replace(self, kv=kv).count_queries(step, q)

    def count_queries(self, step: Step, q: Array | None) -> QuantizedCache:
        """Adds one token's queries [B, 1, N, D] to the statistic, where the cache carries one."""
        if self.query_squares is None:
            return self
        past = jnp.maximum(step.lengths - self.kv.sink, 0)
        counted = (step.num_new > 0) & (step.lengths >= self.kv.sink)
        squares = add_token(self.query_squares, self.squared(q)[:, 0], past, counted, self.kv.fmt.page)
        return dataclasses.replace(self, query_squares=squares)

    def squared(self, q: Array | None) -> Array:
        """Squares of q [B, T, N, D] by KV head, [B, T, K, D]."""
        if q is None:
            raise ValueError(f'selection "{self.config.selection}" weighs channels by the queries: pass them')
        return squared_queries(q, self.query_squares.shape[1])

    def take_rows(self, rows: Array | None) -> QuantizedCache:
        """See :meth:`.LayerCache.take_rows`."""
        return self._own(lambda x: rows_of(x, rows))

    def copy_rows(self, source: Array, target: Array) -> QuantizedCache:
        """See :meth:`.LayerCache.copy_rows`."""
        return self._own(lambda x: copy_rows_of(x, source, target))

    def _own(self, function) -> QuantizedCache:
        """``function`` of every array with one entry per sequence."""
        buffers = {name: function(getattr(self.kv, name)) for name in BUFFERS}
        squares = jax.tree.map(function, self.query_squares)
        return dataclasses.replace(self, kv=dataclasses.replace(self.kv, **buffers), query_squares=squares)

    def nbytes(self) -> dict[str, int]:
        """See :meth:`.LayerCache.nbytes`."""
        kv = self.kv
        out = {
            "sink": size_in_bytes(kv.sink_keys, kv.sink_values),
            "key_tail": size_in_bytes(kv.tail_keys),
            "value_window": size_in_bytes(kv.ring_values),
            "query_statistic": size_in_bytes(self.query_squares),
        }
        sides = (("key", kv.key_pages, kv.fmt.key_parts), ("value", kv.value_pages, kv.fmt.value_parts))
        for name, records, parts in sides:
            codes = records.shape[0] * records.shape[1] * (parts["low"].size + parts["high"].size)
            out[f"{name}_codes"] = codes
            out[f"{name}_metadata"] = size_in_bytes(records) - codes
        return out

    def full_pages(self, lengths: Array) -> Array:
        """See :meth:`.LayerCache.full_pages`."""
        return self.kv.counts(lengths)[1]

    def page_ids(self, table: Array, page: Array, end: Array) -> Array:
        """Pool records of pages ``page`` int32 [B, X]; M ("skip") where the page is not below ``end`` [B]."""
        ids = jnp.take_along_axis(table, jnp.clip(page, 0, table.shape[1] - 1), axis=1)
        return jnp.where((page < end[:, None]) & (ids >= 0), ids, self.kv.key_pages.shape[0])

    def key_options(self, index: Array | int, page: Array, keys: Array, squares: Array | None) -> dict[str, Any]:
        """How to quantize key pages [X, K, G, D]: arguments of the quantizer.

        Args:
            index: number of the layer.
            page: int32 [X], each page's number in its sequence.
            squares: float32 [X, K, D], sums of squared queries.
        """
        heads = self.kv.key_pages.shape[1]
        first = 0 if self.shards == 1 else jax.lax.axis_index("model") * heads
        return key_quantization(self.config, index, page, keys, squares, (first, heads * self.shards))

    def with_pages(self, key_pages: Array, value_pages: Array) -> QuantizedCache:
        """The cache with other pools."""
        return dataclasses.replace(self, kv=dataclasses.replace(self.kv, key_pages=key_pages, value_pages=value_pages))

    def _rotate(self, x: Array) -> Array:
        """Values into the cache's basis, or attention outputs back from it (the rotation is its own inverse)."""
        return rotate(x) if self.config.rotate_values else x


def _append(cache: QuantizedCache, step: Step, q: Array | None, k: Array, v: Array) -> QuantizedCache:
    """:meth:`QuantizedCache.append` of values in the cache's basis."""
    kv, g, b = cache.kv, cache.kv.fmt.page, step.sequences
    chunk = _Chunk(kv, step, *(jnp.swapaxes(x, 1, 2).astype(kv.tail_keys.dtype) for x in (k, v)))
    (_, k0, v0), (_, k1, v1) = kv.counts(step.lengths), kv.counts(step.lengths + step.num_new)
    # A partial page of up to G - 1 old tokens, or the values that the window still held, plus T new ones.
    pages = min((k.shape[1] + g - 1) // g, step.page_table.shape[1])
    key_pages, value_pages, sums, squares = kv.key_pages, kv.value_pages, None, None
    if cache.query_squares is not None:
        total = rows_of(cache.query_squares, step.rows)
        sums, total = add_chunk(total, cache.squared(q), step.lengths, step.num_new, kv.sink, g, pages)
        sums = sums.reshape(-1, *sums.shape[2:])
        squares = put(cache.query_squares, (b,), total)
    if pages:
        nth = jnp.arange(pages, dtype=jnp.int32)
        page = k0[:, None] + nth
        ids = cache.page_ids(step.page_table, page, k1).reshape(-1)
        keys = chunk.pages(chunk.keys, kv.tail_keys, k0, pages)
        how = cache.key_options(cache.index, page.reshape(-1), keys, sums)
        key_pages = store_key_pages(key_pages, keys, ids, kv.fmt, implementation=step.implementation, **how)
        ids = cache.page_ids(step.page_table, v0[:, None] + nth, v1).reshape(-1)
        values = chunk.pages(chunk.values, kv.ring_values, v0, pages)
        how = {"shrink": cache.config.value_shrink, "implementation": step.implementation}
        value_pages = store_value_pages(value_pages, values, jnp.zeros_like(ids), ids, kv.fmt, **how)
        if not step.fresh:  # buffers are written where they are, after they were read
            chunk = dataclasses.replace(
                chunk, keys=not_before(chunk.keys, [keys, values]), values=not_before(chunk.values, [keys, values])
            )
    kv = dataclasses.replace(
        kv,
        key_pages=key_pages,
        value_pages=value_pages,
        sink_keys=chunk.in_sink(chunk.keys, kv.sink_keys),
        sink_values=chunk.in_sink(chunk.values, kv.sink_values),
        tail_keys=chunk.newest(chunk.keys, kv.tail_keys),
        ring_values=chunk.newest(chunk.values, kv.ring_values),
    )
    return dataclasses.replace(cache, kv=kv, query_squares=squares)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk's keys and values [B, K, T, D] in the cache's dtype, and the step that brings them.

    Token i past the sink goes to slot ``i % W`` of a buffer of W slots, tail or ring: see :func:`.buffer_slots`.
    """

    kv: LayerKV
    step: Step
    keys: Array
    values: Array

    def _tokens(self, x: Array, past: Array) -> Array:
        """Tokens of x by number past the sink, int32 [B, X] -> [B, K, X, D]; out-of-range numbers give some token."""
        index = jnp.clip(past + self.kv.sink - self.step.lengths[:, None], 0, x.shape[2] - 1)
        return jnp.take_along_axis(x, index[:, None, :, None], axis=2)

    def pages(self, x: Array, buffer: Array, first: Array, pages: int) -> Array:
        """Pages from page ``first`` [B] on, tokens before the chunk from their buffer: [B * pages, K, G, D]."""
        g = self.kv.fmt.page
        past = first[:, None] * g + jnp.arange(pages * g, dtype=jnp.int32)
        tokens = self._tokens(x, past)
        if not self.step.fresh:
            slot = (past % buffer.shape[2])[:, None, :, None]
            old = jnp.take_along_axis(rows_of(buffer, self.step.rows), slot, axis=2)
            cached = past < self.kv.counts(self.step.lengths)[0][:, None]
            tokens = jnp.where(cached[:, None, :, None], old, tokens)
        b, k, _, d = tokens.shape
        return jnp.swapaxes(tokens.reshape(b, k, pages, g, d), 1, 2).reshape(-1, k, g, d)

    def newest(self, x: Array, buffer: Array) -> Array:
        """The tail or the ring with the chunk's newest tokens in their slots."""
        width, step = buffer.shape[2], self.step
        count = min(width, x.shape[2])
        begin, end = (self.kv.counts(n)[0][:, None] for n in (step.lengths, step.lengths + step.num_new))
        past = end - count + jnp.arange(count, dtype=jnp.int32)
        slot = jnp.where(past >= begin, past % width, width)
        return self._put(buffer, slot, self._tokens(x, past))

    def in_sink(self, x: Array, buffer: Array) -> Array:
        """The sink with the chunk's first tokens in their slots; what lies past it is dropped."""
        sink = self.kv.sink
        t = jnp.arange(min(sink, x.shape[2]), dtype=jnp.int32)
        slot = jnp.where(t < self.step.num_new[:, None], self.step.lengths[:, None] + t, sink)
        return self._put(buffer, slot, x[:, :, :sink])

    def _put(self, buffer: Array, slot: Array, tokens: Array) -> Array:
        """``buffer`` [B, K, W, D] with ``tokens`` [X, K, T, D] in slots [X, T]; slots from W on are dropped.

        A scatter, which XLA does where the buffer is: only slots that change are touched.
        """
        if not buffer.size:
            return buffer
        place = buffer.at[self.step.sequences[:, None], :, slot]
        return place.set(jnp.swapaxes(tokens, 1, 2), mode="drop", unique_indices=True)
