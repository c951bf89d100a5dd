"""A cache full of random numbers, as if it held text, for benchmarks of decode steps: on one device or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.cache.state import FullLayer, KVState, Layer
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages

PAGES, ROWS = 61, 4099  # different pages and rows of a layer; prime, so that they fall differently in every sequence


def random_state(make: Callable[[], KVState]) -> KVState:
    """The state that ``make()`` gives, with random pages and buffers, made layer by layer without a second copy.

    Pages are quantized random numbers. Lengths stay 0; set them. On a mesh each device makes its own part, which is the
    same for all.
    """
    empty = jax.eval_shape(make)
    tables = jax.jit(lambda: dataclasses.replace(make(), layers=()))()
    layers = []
    for index, layer in enumerate(empty.layers):
        layers.append(_random_layer(jax.random.key(index), _Static(layer, empty.mesh)))
        jax.block_until_ready(layers[-1])
    whole = jax.tree.unflatten(jax.tree.structure(empty.layers), jax.tree.leaves(layers))
    return dataclasses.replace(tables, layers=whole)


class _Static:
    """A layer's shapes as a static argument: equal for layers of equal shapes, whatever their numbers."""

    def __init__(self, layer: Layer, mesh: Mesh | None):
        self.layer, self.mesh = layer, mesh
        shapes = ((x.shape, x.dtype.name) for x in jax.tree.leaves(layer))
        self.key = (type(layer), mesh, getattr(layer, "config", 0), *shapes)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other) -> bool:
        return self.key == other.key


@functools.partial(jax.jit, static_argnums=1)
def _random_layer(key: jax.Array, static: _Static) -> Layer:
    layer, mesh = static.layer, static.mesh
    if mesh is None:
        return _fill(key, layer)
    specs = partition_specs(layer, heads=2 if isinstance(layer, FullLayer) else 1)
    own = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype), layer, specs
    )
    return on_mesh(mesh, lambda key: _fill(key, own), (key,), (PartitionSpec(),), specs)


def _fill(key: jax.Array, layer: Layer) -> Layer:
    keys = iter(jax.random.split(key, 16))
    if isinstance(layer, FullLayer):
        return FullLayer(*(_normal(next(keys), x) for x in (layer.keys, layer.values)))
    kv, fmt = layer.kv, layer.kv.fmt
    page = (PAGES, kv.key_pages.shape[1], fmt.page, fmt.head_dim)
    ids = jnp.arange(PAGES, dtype=jnp.int32)
    empty = (jnp.zeros((PAGES, *x.shape[1:]), x.dtype) for x in (kv.key_pages, kv.value_pages))
    some_keys, some_values = (jax.random.normal(next(keys), page).astype(kv.tail_keys.dtype) for _ in range(2))
    key_pages = store_key_pages(next(empty), some_keys, ids, fmt)
    value_pages = store_value_pages(next(empty), some_values, jnp.zeros_like(ids), ids, fmt)
    pool = jnp.arange(kv.key_pages.shape[0], dtype=jnp.int32) % PAGES
    buffers = {name: _normal(next(keys), getattr(kv, name)) for name in BUFFERS}
    squares = None if layer.query_squares is None else jnp.abs(_normal(next(keys), layer.query_squares))
    made = LayerKV(key_pages=key_pages[pool], value_pages=value_pages[pool], fmt=fmt, **buffers)
    return dataclasses.replace(layer, kv=made, query_squares=squares)


def _normal(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random rows, the same ones again and again: drawing all would take several times the array's memory."""
    if not like.size:
        return jnp.zeros(like.shape, like.dtype)
    rows = jax.random.normal(key, (ROWS, like.shape[-1]), jnp.float32).astype(like.dtype)
    count = int(np.prod(like.shape[:-1], dtype=np.int64))
    return rows[jnp.arange(count, dtype=jnp.int32) % ROWS].reshape(like.shape)
