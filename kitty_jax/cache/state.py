"""The KV state: a pytree of sink, buffers and quantized pages for every layer (DESIGN sections 2 and 5).

The state keeps ``lengths`` and derives every counter from it. Functions take a state and return a new one; jit them
with the state donated and the pools are updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.full_cache import FullCache
from kitty_jax.cache.layer_cache import LayerCache, LayerShape, size_in_bytes
from kitty_jax.cache.mesh import constrain_to, partition_specs
from kitty_jax.cache.quantized_cache import QuantizedCache


class CacheShape(Protocol):
    """What a state needs to know of a model; every model config has it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class KVShape:
    """A :class:`CacheShape` by itself, for states without a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype = jnp.bfloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagePool:
    """Which pages are free, for each of the X groups of sequences and pages (X is 1 without a mesh).

    Attributes:
        free: int32 [X, M / X], a stack; ``free[x, :num_free[x]]`` are the pages of group x that no sequence holds.
        num_free: int32 [X].
        reference_counts: int32 [X, M / X], how many sequences hold a page: more than one after a fork.
    """

    free: Array
    num_free: Array
    reference_counts: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVState:
    """The cache of a batch of sequences.

    Attributes:
        lengths: int32 [B], tokens cached.
        page_table: int32 [B, P], pool record of each page; -1 where no page has been handed out. On a mesh the
            sequences and the records are split into equal groups, one for each place of the "data" axis, and records
            are counted from the start of the group's.
        exhausted: bool [B], a token or chunk of this sequence was refused because the pool had no page left or the
            capacity was reached. What was cached before stays intact.
        pool: pages not handed out; None when every sequence owns its pages from the start.
        layers: one entry per layer.
        capacity: most tokens a sequence can hold.
        mesh: the devices the state is spread over, or None for one device.
    """

    lengths: Array
    page_table: Array
    exhausted: Array
    pool: PagePool | None
    layers: tuple[LayerCache, ...]
    capacity: int = dataclasses.field(metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def groups(self) -> int:
        """Groups of sequences that have their pages to themselves: the size of the mesh's "data" axis, or 1."""
        return self.mesh.shape["data"] if self.mesh else 1

    @property
    def batch(self) -> int:
        """B, number of sequences."""
        return self.lengths.shape[0]


def pages_per_sequence(capacity: int, config: CacheConfig) -> int:
    """P: pages that a sequence of ``capacity`` tokens fills."""
    return max(capacity - config.sink, 0) // config.page


def init_state(
    cache: CacheConfig | str | Sequence[CacheConfig],
    shape: CacheShape,
    *,
    batch: int,
    capacity: int,
    pool_pages: int | None = None,
    mesh: Mesh | None = None,
) -> KVState:
    """An empty state. Works under ``jax.eval_shape``, so memory can be planned without allocating.

    Args:
        cache: a config, a name, or one config per layer.
        shape: a model config, or :class:`KVShape`.
        batch: B, sequences.
        capacity: most tokens a sequence can hold.
        pool_pages: M, pages in the pool. By default ``batch`` times the pages of ``capacity``, each sequence owning
            its own; a smaller pool hands pages out as sequences grow, and a sequence that gets none is marked in
            ``exhausted``.
        mesh: spread the state over a mesh with the axes "data" (sequences and their pages) and "model" (KV heads). Call
            this under ``jax.jit`` then, so that no device ever holds all of it.

    Raises:
        ValueError: sizes below 1, a cache that does not fit the head size, or sizes that the mesh does not divide.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"batch and capacity must be 1 or more, got batch {batch}, capacity {capacity}")
    configs = layer_configs(cache, shape.num_layers)
    quantized = next((c for c in configs if c.quantized), None)
    per_sequence = pages_per_sequence(capacity, quantized) if quantized else 0
    pool = None
    pages = batch * per_sequence
    if pool_pages is not None:
        if not quantized:
            raise ValueError("pool_pages is for quantized caches; a full-precision cache has no page pool")
        if not 1 <= pool_pages:
            raise ValueError(f"pool_pages must be 1 or more, got {pool_pages}")
        pages = pool_pages
    groups, shards = (mesh.shape["data"], mesh.shape["model"]) if mesh else (1, 1)
    for name, size, ways in (("batch", batch, groups), ("pool_pages", pages, groups)):
        if size % ways:
            raise ValueError(f"{name} must be a multiple of the mesh's {ways} 'data' places, got {size}")
    if shape.num_kv_heads % shards:
        raise ValueError(f"{shape.num_kv_heads} KV heads cannot be split over a 'model' axis of {shards}")
    own = pages // groups
    table = jnp.tile(jnp.arange(own, dtype=jnp.int32), groups).reshape(batch, -1) if pool_pages is None else None
    if pool_pages is not None:
        free = jnp.tile(jnp.arange(own, dtype=jnp.int32)[::-1], (groups, 1))
        pool = PagePool(free, jnp.full(groups, own, jnp.int32), jnp.zeros((groups, own), jnp.int32))
        table = jnp.full((batch, per_sequence), -1, jnp.int32)
    pages = max(pages, groups)
    sizes = (batch, capacity, shape.num_kv_heads, shape.head_dim, shape.dtype, pages)
    layers = tuple(
        (QuantizedCache if c.quantized else FullCache).empty(c, LayerShape(*sizes, i, shards))
        for i, c in enumerate(configs)
    )
    state = KVState(jnp.zeros(batch, jnp.int32), table, jnp.zeros(batch, bool), pool, layers, capacity, mesh)
    return constrain(state)


def constrain(state: KVState) -> KVState:
    """The same state, each array split over the state's mesh as :func:`.mesh.partition_specs` says."""
    return state if state.mesh is None else constrain_to(state.mesh, state, state_specs(state))


def state_specs(state: KVState) -> KVState:
    """The state with a ``PartitionSpec`` in place of each array."""
    layers = tuple(partition_specs(x, heads=x.heads_axis) for x in state.layers)
    rest = partition_specs(dataclasses.replace(state, layers=()))
    return dataclasses.replace(rest, layers=layers)


def nbytes(state: KVState) -> dict[str, int]:
    """Bytes of a state by part, exactly what its arrays occupy. Takes the result of ``jax.eval_shape`` too.

    Keys: ``key_codes``, ``key_metadata`` (scale, min, boosted channels, exponent, padding), ``value_codes``,
    ``value_metadata``, ``sink``, ``key_tail``, ``value_window``, ``query_statistic``, ``full_precision``, ``tables``
    (page table, lengths, pool), and their sum ``total``.
    """
    out = dict.fromkeys(PARTS, 0)
    for layer in state.layers:
        for part, size in layer.nbytes().items():
            out[part] += size
    out["tables"] = size_in_bytes(state.lengths, state.page_table, state.exhausted, state.pool)
    out["total"] = sum(out.values())
    return out


PARTS = (
    "key_codes",
    "key_metadata",
    "value_codes",
    "value_metadata",
    "sink",
    "key_tail",
    "value_window",
    "query_statistic",
    "full_precision",
)
