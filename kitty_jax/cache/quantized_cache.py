"""Putting tokens into the state: buffers written, full pages quantized.

One token of every sequence goes in by :func:`insert_token` in each layer and one :func:`flush` for all layers; a chunk
by :func:`append_chunk`. Both end in the same state, bit for bit, for the same keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.cache.query_statistic import add_chunk, add_token, squared_queries
from kitty_jax.cache.selection import key_quantization
from kitty_jax.cache.state import FullLayer, KVState, Layer, QuantizedLayer
from kitty_jax.pallas_kernels.decode_attention import insert_token as insert
from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.ordering import not_before, zero
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV
from kitty_jax.pallas_kernels.quantize import quantize_keys
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages, value_records, write_records

FLUSH_ROWS = 4  # sequences whose pages the reference quantizes at a time


def insert_token(
    layer: Layer, keys: Array, values: Array, lengths: Array, active: Array, queries: Array | None = None
) -> Layer:
    """Writes one token per sequence into the buffers, in full precision; inactive sequences keep theirs.

    Args:
        layer: the layer before the token.
        keys, values: [B, K, D].
        lengths: int32 [B], tokens cached before.
        active: bool [B].
        queries: [B, N, D], where the layer's config weighs channels by them.
    """
    b = jnp.arange(lengths.shape[0])
    if isinstance(layer, FullLayer):
        slot = jnp.where(active, lengths, layer.keys.shape[1])
        return FullLayer(insert.put(layer.keys, (b, slot), keys), insert.put(layer.values, (b, slot), values))
    layer = dataclasses.replace(layer, kv=insert.insert_token(layer.kv, keys, values, lengths, active))
    return count_queries(layer, lengths, active, queries)


def count_queries(layer: QuantizedLayer, lengths: Array, active: Array, queries: Array | None) -> QuantizedLayer:
    """Adds one token's ``queries`` [B, N, D] to the statistic of a layer that carries one; see :func:`insert_token`."""
    if layer.query_squares is None:
        return layer
    s, squares = layer.kv.sink, _squared(layer, queries)
    i, past = jnp.maximum(lengths - s, 0), active & (lengths >= s)
    return dataclasses.replace(layer, query_squares=add_token(layer.query_squares, squares, i, past, layer.kv.fmt.page))


def _squared(layer: QuantizedLayer, queries: Array | None) -> Array:
    if queries is None:
        raise ValueError(f'selection "{layer.config.selection}" weighs channels by the queries: pass them')
    return squared_queries(queries, layer.query_squares.shape[1])


def flush(
    state: KVState, before: Array, implementation: Implementation = "auto", after: Array | None = None
) -> KVState:
    """Quantizes the pages that the step from lengths ``before`` int32 [B] to ``state.lengths`` has filled.

    That is at most one a sequence. ``after`` [B, ...]: what the step made of the attention's output, so that pages are
    written after they were read (see :func:`.ordering.ordered`).
    """
    quantized = tuple(x for x in state.layers if isinstance(x, QuantizedLayer))
    if not quantized or not state.page_table.shape[1]:
        return state
    after = jnp.zeros(before.shape) if after is None else after.reshape(after.shape[0], -1)[:, 0]
    facts = (before, state.lengths, state.page_table, after)
    pools = [(x.kv.key_pages, x.kv.value_pages) for x in quantized]
    pools = on_mesh(
        state.mesh,
        functools.partial(_flush, implementation),
        (quantized, *facts),
        (partition_specs(quantized, heads=1), *partition_specs(facts)),
        partition_specs(pools, heads=1),
    )
    stored = iter(pools)
    layers = tuple(_with_pools(x, *next(stored)) if isinstance(x, QuantizedLayer) else x for x in state.layers)
    return dataclasses.replace(state, layers=layers)


def _flush(
    implementation: Implementation, layers: tuple, before: Array, lengths: Array, table: Array, after: Array
) -> list[tuple[Array, Array]]:
    due = jnp.zeros(before.shape, bool)
    for kv in {x.kv.window: x.kv for x in layers}.values():
        (_, k0, v0), (_, k1, v1) = kv.counts(before), kv.counts(lengths)
        due = due | (k1 > k0) | (v1 > v0)
    # The kernels pass over sequences that have no page to write. The reference takes a few that have one at a time.
    batch, kernels = before.shape[0], choose(implementation, None) == "mosaic"
    size = batch if kernels else min(batch, FLUSH_ROWS)
    turns = (jnp.sum(due, dtype=jnp.int32) + size - 1) // size + zero(after[0])
    order = jnp.argsort(~due, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -batch % size), constant_values=batch)

    # A loop of no turn or some, not `lax.cond`: XLA updates what a loop carries in place, but copies pools that go
    # through a cond.
    def store(turn: Array, pools: list) -> list:
        now = [_with_pools(x, *pool) for x, pool in zip(layers, pools, strict=True)]
        if kernels:
            return [_flush_layer(x, before, lengths, table, implementation) for x in now]
        # XLA would compute what does not depend on the turn before the loop: in steps that fill no page too.
        turn, now = jax.lax.optimization_barrier((turn, now))
        rows = None if size == batch else jax.lax.dynamic_slice_in_dim(order, turn * size, size)
        for alike in _alike(layers):
            for i, pool in zip(alike, _flush_alike([now[i] for i in alike], rows, before, lengths, table), strict=True):
                pools[i] = pool
        return pools

    pools = [(x.kv.key_pages, x.kv.value_pages) for x in layers]
    return jax.lax.fori_loop(0, turns, store, pools)


def _with_pools(layer: QuantizedLayer, key_pages: Array, value_pages: Array) -> QuantizedLayer:
    return dataclasses.replace(layer, kv=dataclasses.replace(layer.kv, key_pages=key_pages, value_pages=value_pages))


# A jit of its own, so that a model of many layers traces and lowers the stores once.
@functools.partial(jax.jit, static_argnames="implementation")
def _flush_layer(
    layer: QuantizedLayer, before: Array, lengths: Array, table: Array, implementation: Implementation
) -> tuple[Array, Array]:
    kv = layer.kv
    page, key_ids, starts, value_ids = _filled(kv, before, lengths, table)
    keys = _store_keys(layer, kv.tail_keys, key_ids, page, layer.query_squares, implementation)
    shrink = layer.config.value_shrink
    values = store_value_pages(
        kv.value_pages, kv.ring_values, starts, value_ids, kv.fmt, shrink=shrink, implementation=implementation
    )
    return keys, values


def _alike(layers: tuple[QuantizedLayer, ...]) -> list[list[int]]:
    """Places of the layers, those together that differ in nothing but contents and index."""
    groups = {}
    for i, layer in enumerate(layers):
        leaves, structure = jax.tree.flatten(dataclasses.replace(layer, index=0))
        groups.setdefault((structure, *((x.shape, x.dtype) for x in leaves)), []).append(i)
    return list(groups.values())


def _flush_alike(
    layers: list[QuantizedLayer], rows: Array | None, before: Array, lengths: Array, table: Array
) -> list[tuple[Array, Array]]:
    """Pools of layers that are :func:`_alike`, by the reference.

    A loop over the layers quantizes the pages: compiled once, where a program for each layer would be most of what a
    decode step compiles. The loop sees buffers of ``rows`` alone; each layer's records then go to its own pools.
    """

    def of(x: Array) -> Array:
        # A row past the batch reads the last sequence, whose page is then written twice with the same contents.
        return x if rows is None else x.at[rows].get(mode="clip")

    first, fmt = layers[0], layers[0].kv.fmt
    page, key_ids, starts, value_ids = _filled(first.kv, *(of(x) for x in (before, lengths, table)))

    def records(buffers: tuple) -> tuple[Array, Array]:
        index, tails, rings, squares = buffers
        keys = quantize_keys(tails, fmt, **_key_options(first, index, page, tails, squares))
        return keys, value_records(rings, starts, fmt, shrink=first.config.value_shrink)

    buffers = [
        (jnp.int32(x.index), *jax.tree.map(of, (x.kv.tail_keys, x.kv.ring_values, x.query_squares))) for x in layers
    ]
    keys, values = jax.lax.map(records, jax.tree.map(lambda *x: jnp.stack(x), *buffers))
    return [
        (write_records(x.kv.key_pages, keys[i], key_ids), write_records(x.kv.value_pages, values[i], value_ids))
        for i, x in enumerate(layers)
    ]


def _filled(kv: LayerKV, before: Array, lengths: Array, table: Array) -> tuple[Array, Array, Array, Array]:
    """The pages that a step from lengths ``before`` to ``lengths`` has filled, int32 [B] each.

    The key page's number in its sequence and its record, the value page's first ring slot and its record; a record of
    M where none was filled.
    """
    (_, k0, v0), (_, k1, v1) = kv.counts(before), kv.counts(lengths)
    key_ids, value_ids = (_page_ids(kv, table, page[:, None], end)[:, 0] for page, end in ((k0, k1), (v0, v1)))
    return k0, key_ids, v0 * kv.fmt.page % kv.ring_values.shape[2], value_ids


def _page_ids(kv: LayerKV, table: Array, page: Array, end: Array) -> Array:
    """Pool records of pages ``page`` int32 [B, X]; M ("skip") where the page is not below ``end`` [B]."""
    ids = jnp.take_along_axis(table, jnp.clip(page, 0, table.shape[1] - 1), axis=1)
    return jnp.where((page < end[:, None]) & (ids >= 0), ids, kv.key_pages.shape[0])


def _store_keys(
    layer: QuantizedLayer, keys: Array, ids: Array, page: Array, squares: Array | None, implementation: Implementation
) -> Array:
    """Stores key pages [X, K, G, D]; ``page`` int32 [X] is each one's number in its sequence, ``squares`` [X, K, D]."""
    how = _key_options(layer, layer.index, page, keys, squares)
    return store_key_pages(layer.kv.key_pages, keys, ids, layer.kv.fmt, implementation=implementation, **how)


def _key_options(
    layer: QuantizedLayer, index: Array | int, page: Array, keys: Array, squares: Array | None
) -> dict[str, Any]:
    """How to quantize key pages, as for :func:`_store_keys`; ``index`` stands for the layer's."""
    heads = layer.kv.key_pages.shape[1]
    first = 0 if layer.shards == 1 else jax.lax.axis_index("model") * heads
    return key_quantization(layer.config, index, page, keys, squares, (first, heads * layer.shards))


def append_chunk(
    layer: Layer,
    keys: Array,
    values: Array,
    lengths: Array,
    num_new: Array,
    page_table: Array,
    implementation: Implementation = "auto",
    queries: Array | None = None,
    rows: Array | None = None,
    fresh: bool = False,
) -> Layer:
    """Puts a chunk of tokens into the layer and quantizes every page it fills.

    Args:
        keys, values: [B, T, K, D].
        lengths: int32 [B], tokens cached before; num_new: int32 [B], how many of the T tokens are real, for which
            :func:`.pool.reserve` has been called.
        page_table: int32 [B, P].
        queries: [B, T, N, D], where the layer's config weighs channels by them.
        rows: int32 [X], the sequences of the layer that the X rows of all other arguments belong to; by default all, in
            order. A row that is not a sequence of the layer's is padding.
        fresh: promise that ``lengths`` is 0 wherever ``num_new`` is not; no buffer is read then, which leaves XLA
            nothing to copy.
    """
    b = jnp.arange(lengths.shape[0]) if rows is None else rows
    t = jnp.arange(keys.shape[1], dtype=jnp.int32)
    if isinstance(layer, FullLayer):
        slot = jnp.where(t < num_new[:, None], lengths[:, None] + t, layer.keys.shape[1])
        return FullLayer(
            insert.put(layer.keys, (b[:, None], slot), keys), insert.put(layer.values, (b[:, None], slot), values)
        )
    kv = layer.kv
    s, g = kv.sink, kv.fmt.page
    keys, values = (jnp.swapaxes(x, 1, 2).astype(kv.tail_keys.dtype) for x in (keys, values))  # [B, K, T, D]
    (n0, k0, v0), (n1, k1, v1) = kv.counts(lengths), kv.counts(lengths + num_new)

    def chunk(x: Array, token: Array) -> Array:
        """Rows of the chunk by token past the sink, int32 [B, X] -> [B, K, X, D]; out-of-range tokens give some row."""
        index = jnp.clip(token + s - lengths[:, None], 0, t.shape[0] - 1)
        return jnp.take_along_axis(x, index[:, None, :, None], axis=2)

    def gather(x: Array, buffer: Array, first: Array, pages: int) -> Array:
        """Tokens past the sink from ``first`` [B] on, old ones from their buffer: [B * pages, K, G, D]."""
        token = first[:, None] + jnp.arange(pages * g, dtype=jnp.int32)
        tokens = chunk(x, token)
        if not fresh:
            slot = (token % buffer.shape[2])[:, None, :, None]
            old = jnp.take_along_axis(_rows_of(buffer, rows), slot, axis=2)
            tokens = jnp.where((token < n0[:, None])[:, None, :, None], old, tokens)
        return jnp.swapaxes(tokens.reshape(*tokens.shape[:2], pages, g, -1), 1, 2).reshape(
            -1, tokens.shape[1], g, tokens.shape[3]
        )

    key_pool, value_pool, read = kv.key_pages, kv.value_pages, []
    # A partial page of up to G - 1 old tokens, or the values that the window still held, plus T new ones.
    pages = min((t.shape[0] + g - 1) // g, page_table.shape[1])
    sums = squares = None
    if layer.query_squares is not None:
        total = _rows_of(layer.query_squares, rows)
        sums, total = add_chunk(total, _squared(layer, queries), lengths, num_new, s, g, pages)
        sums = sums.reshape(-1, *sums.shape[2:])
        squares = insert.put(layer.query_squares, (b,), total)
    if pages:
        page = k0[:, None] + jnp.arange(pages, dtype=jnp.int32)
        ids = _page_ids(kv, page_table, page, k1).reshape(-1)
        filled = gather(keys, kv.tail_keys, k0 * g, pages)
        read.append(filled)
        key_pool = _store_keys(layer, filled, ids, page.reshape(-1), sums, implementation)
        page = v0[:, None] + jnp.arange(pages, dtype=jnp.int32)
        ids = _page_ids(kv, page_table, page, v1).reshape(-1)
        filled = gather(values, kv.ring_values, v0 * g, pages)
        read.append(filled)
        shrink, starts = layer.config.value_shrink, jnp.zeros_like(ids)
        value_pool = store_value_pages(
            value_pool, filled, starts, ids, kv.fmt, shrink=shrink, implementation=implementation
        )
    if not fresh:
        keys, values = (not_before(x, read) for x in (keys, values))  # buffers are written where they are

    def newest(x: Array, buffer: Array) -> Array:
        """The buffer with the chunk's newest tokens in their slots."""
        width = buffer.shape[2]
        count = min(width, t.shape[0])
        token = (n1 - count)[:, None] + jnp.arange(count, dtype=jnp.int32)
        slot = jnp.where(token >= n0[:, None], token % width, width)
        return _put_tokens(buffer, b, slot, chunk(x, token))

    def sink(x: Array, buffer: Array) -> Array:
        token = lengths[:, None] + t[:s]
        slot = jnp.where(t[:s] < num_new[:, None], token, s)
        return _put_tokens(buffer, b, slot, x[:, :, :s])

    kv = dataclasses.replace(
        kv,
        key_pages=key_pool,
        value_pages=value_pool,
        sink_keys=sink(keys, kv.sink_keys),
        sink_values=sink(values, kv.sink_values),
        tail_keys=newest(keys, kv.tail_keys),
        ring_values=newest(values, kv.ring_values),
    )
    return dataclasses.replace(layer, kv=kv, query_squares=squares)


def _put_tokens(buffer: Array, b: Array, slot: Array, tokens: Array) -> Array:
    """``buffer`` [B, K, W, D] with ``tokens`` [X, K, T, D] in slots [X, T] of sequences ``b`` [X]; others are dropped.

    A scatter, which XLA does where the buffer is: only slots that change are touched.
    """
    if not buffer.size:
        return buffer
    at = buffer.at[b[:, None], :, slot]
    return at.set(jnp.swapaxes(tokens, 1, 2), mode="drop", unique_indices=True)


def take_rows(layer: Layer, rows: Array | None) -> Layer:
    """The layer of sequences ``rows`` int32 [X] alone: their buffers or tokens are copied, the pages are the same."""
    if rows is None:
        return layer
    if isinstance(layer, FullLayer):
        return FullLayer(_rows_of(layer.keys, rows), _rows_of(layer.values, rows))
    kv = dataclasses.replace(layer.kv, **{name: _rows_of(getattr(layer.kv, name), rows) for name in BUFFERS})
    squares = layer.query_squares
    squares = None if squares is None else _rows_of(squares, rows)
    return dataclasses.replace(layer, kv=kv, query_squares=squares)


def _rows_of(x: Array, rows: Array | None) -> Array:
    return x if rows is None else x.at[rows].get(mode="clip")
