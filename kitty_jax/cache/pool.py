"""The page pool: pages handed out as sequences grow, given back when they end, shared by forks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.state import KVState, PagePool, constrain


def reserve(state: KVState, num_new: Array) -> tuple[KVState, Array]:
    """Hands out the pages that ``num_new`` int32 [B] further tokens fill.

    A sequence for which capacity or pool do not suffice gets none and is marked in ``exhausted``. Pages are handed out
    in batch order; where one sequence's need is not met, no later one of its group gets a page in this call either.

    Returns:
        The state with its page table extended, and int32 [B]: ``num_new``, or 0 for the refused sequences.
    """
    fits = state.lengths + num_new <= state.capacity
    if state.pool is None:
        refused = ~fits & (num_new > 0)
        return dataclasses.replace(state, exhausted=state.exhausted | refused), jnp.where(fits, num_new, 0)
    layer = next(x for x in state.layers if x.full_pages(state.lengths) is not None)  # all fill the same pages
    first, last = (layer.full_pages(x) for x in (state.lengths, state.lengths + num_new))
    need = jnp.where(fits, last - first, 0)

    # [X, B / X] from here on: a group of sequences has its pages to itself.
    groups = state.groups
    pool, table = state.pool, state.page_table.reshape(groups, state.batch // groups, -1)
    fits, need, first = (x.reshape(groups, -1) for x in (fits, need, first))
    total = jnp.cumsum(need, axis=1)
    granted = fits & ((need == 0) | (total <= pool.num_free[:, None]))
    top = pool.num_free[:, None] - (total - need)
    column = jnp.arange(table.shape[2], dtype=jnp.int32)
    rank = column - first[..., None]  # [X, B / X, P]
    new = granted[..., None] & (rank >= 0) & (rank < need[..., None])
    place = jnp.clip(top[..., None] - 1 - rank, 0, pool.free.shape[1] - 1)
    ids = jnp.take_along_axis(pool.free, place.reshape(groups, -1), axis=1).reshape(place.shape)
    held = jax.vmap(lambda x, i: x.at[i].add(1, mode="drop"))(
        pool.reference_counts, jnp.where(new, ids, pool.reference_counts.shape[1]).reshape(groups, -1)
    )
    left = pool.num_free - jnp.sum(jnp.where(granted, need, 0), axis=1, dtype=jnp.int32)
    granted = granted.reshape(-1)
    state = dataclasses.replace(
        state,
        page_table=jnp.where(new, ids, table).reshape(state.page_table.shape),
        pool=PagePool(pool.free, left, held),
        exhausted=state.exhausted | (~granted & (num_new > 0)),
    )
    return state, jnp.where(granted, num_new, 0)


def release(state: KVState, done: Array) -> KVState:
    """Empties the sequences where ``done`` bool [B]; pages that no other sequence holds go back to the pool."""
    lengths = jnp.where(done, 0, state.lengths)
    state = dataclasses.replace(state, lengths=lengths, exhausted=state.exhausted & ~done)
    if state.pool is None:
        return state
    groups, pages = state.pool.free.shape
    back = done[:, None] & (state.page_table >= 0)
    ids = jnp.where(back, state.page_table, pages).reshape(groups, -1)

    def give_back(free: Array, num_free: Array, counts: Array, ids: Array) -> tuple[Array, Array, Array]:
        left = counts.at[ids].add(-1, mode="drop")
        freed = (counts > 0) & (left == 0)
        slot = jnp.where(freed, num_free + jnp.cumsum(freed) - 1, pages)
        free = free.at[slot].set(jnp.arange(pages, dtype=jnp.int32), mode="drop")
        return free, num_free + jnp.sum(freed, dtype=jnp.int32), left

    pool = PagePool(*jax.vmap(give_back)(state.pool.free, state.pool.num_free, state.pool.reference_counts, ids))
    return dataclasses.replace(state, page_table=jnp.where(done[:, None], -1, state.page_table), pool=pool)


def fork(state: KVState, source: Array, target: Array) -> KVState:
    """Makes sequences ``target`` int32 [X] copies of sequences ``source`` int32 [X], which share their pages.

    Full pages never change, so only the page table and the full-precision buffers are copied (in a full-precision cache
    the tokens themselves). What a target held before is released. All sources are read before any target changes, so a
    sequence may be both (a swap, the reordering of a beam). An entry whose source or target is not from 0 to B - 1 is
    passed over; of several with one target, one counts.

    Raises:
        ValueError: a quantized state without a page pool, in which every sequence owns fixed pages, or one on a mesh
            with more than one place on "data".
    """
    if source.shape != target.shape or source.ndim != 1:
        raise ValueError(f"source and target must be int32 [X] alike, got shapes {source.shape} and {target.shape}")
    if state.pool is None and state.page_table.shape[1]:
        raise ValueError("fork shares pages and needs a page pool: make the state with init_state(..., pool_pages=M)")
    if state.groups > 1:
        raise ValueError(f"fork takes a mesh with one place on 'data', got {state.groups}")
    batch, entries = state.batch, jnp.arange(target.shape[0], dtype=jnp.int32)
    legal = (target >= 0) & (target < batch) & (source >= 0) & (source < batch)
    target = jnp.where(legal, target, batch)
    kept = jnp.zeros(batch, jnp.int32).at[target].set(entries, mode="drop").at[target].get(mode="clip") == entries
    target, source = jnp.where(kept, target, batch), jnp.clip(source, 0, batch - 1)
    before = state

    def copied(x: Array, old: Array) -> Array:
        return x.at[target].set(old[source], mode="drop") if x.size else x

    if state.pool is not None:
        # Sources' pages are counted for their new sequences before targets give theirs up.
        rows = jnp.where((target < batch)[:, None], state.page_table[source], -1)
        ids = jnp.where(rows >= 0, rows, state.pool.reference_counts.shape[1]).reshape(-1)
        counts = state.pool.reference_counts.at[0, ids].add(1, mode="drop")
        state = dataclasses.replace(state, pool=dataclasses.replace(state.pool, reference_counts=counts))
    state = release(state, jnp.zeros(batch, bool).at[target].set(True, mode="drop"))
    if state.pool is not None:
        state = dataclasses.replace(state, page_table=copied(state.page_table, before.page_table))

    return constrain(
        dataclasses.replace(
            state,
            lengths=copied(state.lengths, before.lengths),
            exhausted=copied(state.exhausted, before.exhausted),
            layers=tuple(x.copy_rows(source, target) for x in state.layers),
        )
    )
