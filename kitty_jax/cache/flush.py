"""Quantizing the pages that a decode step has filled, of all layers at once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.layer_cache import rows_of
from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.cache.quantized_cache import QuantizedCache
from kitty_jax.cache.state import KVState
from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.ordering import zero
from kitty_jax.pallas_kernels.quantize import quantize_keys
from kitty_jax.pallas_kernels.store.kernel import unsupported
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages, value_records, write_records

FLUSH_ROWS = 4  # sequences whose pages the reference quantizes at a time


def flush(
    state: KVState, before: Array, implementation: Implementation = "auto", after: Array | None = None
) -> KVState:
    """Quantizes the pages that the step from lengths ``before`` int32 [B] to ``state.lengths`` has filled.

    That is at most one a sequence. ``after`` [B, ...]: what the step made of the attention's output, so that pages are
    written after they were read (see :func:`.ordering.ordered`).
    """
    layers = {i: x for i, x in enumerate(state.layers) if isinstance(x, QuantizedCache)}
    if not layers or not state.page_table.shape[1]:
        return state
    after = jnp.zeros(before.shape) if after is None else after.reshape(after.shape[0], -1)[:, 0]
    caches, facts = tuple(layers.values()), (before, state.lengths, state.page_table, after)
    pools = [(x.kv.key_pages, x.kv.value_pages) for x in caches]
    pools = on_mesh(
        state.mesh,
        functools.partial(_flush, implementation),
        (caches, *facts),
        (partition_specs(caches, heads=1), *partition_specs(facts)),
        partition_specs(pools, heads=1),
    )
    layers = {i: x.with_pages(*pool) for (i, x), pool in zip(layers.items(), pools, strict=True)}
    return dataclasses.replace(state, layers=tuple(layers.get(i, x) for i, x in enumerate(state.layers)))


def _flush(
    implementation: Implementation,
    caches: tuple[QuantizedCache, ...],
    before: Array,
    lengths: Array,
    table: Array,
    after: Array,
) -> list[tuple[Array, Array]]:
    due = jnp.zeros(before.shape, bool)
    for kv in {x.kv.window: x.kv for x in caches}.values():
        (_, k0, v0), (_, k1, v1) = kv.counts(before), kv.counts(lengths)
        due = due | (k1 > k0) | (v1 > v0)
    # The kernels pass over sequences that have no page to write. The reference takes a few that have one at a time.
    kernels = all(_by_kernel(x, implementation) for x in caches)
    batch = before.shape[0]
    size = batch if kernels else min(batch, FLUSH_ROWS)
    iterations = (jnp.sum(due, dtype=jnp.int32) + size - 1) // size + zero(after[0])
    order = jnp.argsort(~due, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -batch % size), constant_values=batch)

    # A loop of no iteration or some, not `lax.cond`: XLA updates what a loop carries in place, but copies pools that go
    # through a cond.
    def store(iteration: Array, pools: list) -> list:
        now = [x.with_pages(*pool) for x, pool in zip(caches, pools, strict=True)]
        if kernels:
            return [_flush_by_kernel(x, before, lengths, table) for x in now]
        # XLA would compute what does not depend on the iteration before the loop: in steps that fill no page too.
        iteration, now = jax.lax.optimization_barrier((iteration, now))
        rows = None if size == batch else jax.lax.dynamic_slice_in_dim(order, iteration * size, size)
        for alike in _alike(caches):
            for i, pool in zip(alike, _flush_alike([now[i] for i in alike], rows, before, lengths, table), strict=True):
                pools[i] = pool
        return pools

    pools = [(x.kv.key_pages, x.kv.value_pages) for x in caches]
    return jax.lax.fori_loop(0, iterations, store, pools)


def _by_kernel(cache: QuantizedCache, implementation: Implementation) -> bool:
    return choose(implementation, unsupported(cache.kv.tail_keys.dtype, cache.kv.fmt)) == "mosaic"


# A jit of its own, so that a model of many layers traces and lowers the stores once.
@jax.jit
def _flush_by_kernel(cache: QuantizedCache, before: Array, lengths: Array, table: Array) -> tuple[Array, Array]:
    kv = cache.kv
    page, key_ids, starts, value_ids = _filled(cache, before, lengths, table)
    how = cache.key_options(cache.index, page, kv.tail_keys, cache.query_squares)
    keys = store_key_pages(kv.key_pages, kv.tail_keys, key_ids, kv.fmt, implementation="mosaic", **how)
    how = {"shrink": cache.config.value_shrink, "implementation": "mosaic"}
    return keys, store_value_pages(kv.value_pages, kv.ring_values, starts, value_ids, kv.fmt, **how)


def _alike(caches: tuple[QuantizedCache, ...]) -> list[list[int]]:
    """Places of the caches, those together that differ in nothing but contents and index."""
    groups = {}
    for i, cache in enumerate(caches):
        leaves, structure = jax.tree.flatten(dataclasses.replace(cache, index=0))
        groups.setdefault((structure, *((x.shape, x.dtype) for x in leaves)), []).append(i)
    return list(groups.values())


def _flush_alike(
    caches: list[QuantizedCache], rows: Array | None, before: Array, lengths: Array, table: Array
) -> list[tuple[Array, Array]]:
    """Pools of caches that are :func:`_alike`, by the reference.

    A loop over the layers quantizes the pages: compiled once, where a program for each layer would be most of what a
    decode step compiles. The loop sees buffers of ``rows`` alone; each layer's records then go to its own pools. A row
    past the batch reads the last sequence, whose page is then written twice with the same contents.
    """
    first, fmt = caches[0], caches[0].kv.fmt
    page, key_ids, starts, value_ids = _filled(first, *(rows_of(x, rows) for x in (before, lengths, table)))

    def records(buffers: tuple) -> tuple[Array, Array]:
        index, tails, rings, squares = buffers
        keys = quantize_keys(tails, fmt, **first.key_options(index, page, tails, squares))
        return keys, value_records(rings, starts, fmt, shrink=first.config.value_shrink)

    own = [x.take_rows(rows) for x in caches]
    buffers = [(jnp.int32(x.index), x.kv.tail_keys, x.kv.ring_values, x.query_squares) for x in own]
    keys, values = jax.lax.map(records, jax.tree.map(lambda *x: jnp.stack(x), *buffers))
    return [
        (write_records(x.kv.key_pages, keys[i], key_ids), write_records(x.kv.value_pages, values[i], value_ids))
        for i, x in enumerate(caches)
    ]


def _filled(cache: QuantizedCache, before: Array, lengths: Array, table: Array) -> tuple[Array, Array, Array, Array]:
    """The pages that a step from lengths ``before`` to ``lengths`` has filled, int32 [B] each.

    The key page's number in its sequence and its record, the value page's first ring slot and its record; a record of
    M where none was filled.
    """
    kv = cache.kv
    (_, k0, v0), (_, k1, v1) = kv.counts(before), kv.counts(lengths)
    key_ids, value_ids = (cache.page_ids(table, page[:, None], end)[:, 0] for page, end in ((k0, k1), (v0, v1)))
    return k0, key_ids, v0 * kv.fmt.page % kv.ring_values.shape[2], value_ids
