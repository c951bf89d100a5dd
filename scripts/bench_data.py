"""Random pages, and a cache full of random numbers as if it held text: on one device or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kitty_jax.cache.full_cache import FullCache
from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.cache.state import KVState
from kitty_jax.pallas_kernels.page_format import PageFormat, join_record

PAGES, ROWS = 61, 4099  # different pages and rows of a layer; prime, so that they fall differently in every sequence
SCALES = (0.05, 0.55)


def random_records(key: jax.Array, fmt: PageFormat, pool: int, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Legal records of random codes: (key pages, value pages), uint32 [pool, kv_heads, words] each."""
    keys = iter(jax.random.split(key, 8))
    batch = (pool, kv_heads)

    def record(layout):
        parts = {}
        for name, part in layout.items():
            shape = (*batch, part.count)
            if name in ("low", "high"):
                parts[name] = jax.random.bits(next(keys), shape, jnp.uint32)
            elif name == "scale":
                scale = jax.random.uniform(next(keys), shape, minval=SCALES[0], maxval=SCALES[1])
                parts |= {"scale": scale.astype(jnp.float16), "min": (-1.5 * scale).astype(jnp.float16)}
            elif name == "channels":
                order = jnp.argsort(jax.random.uniform(next(keys), (*batch, fmt.head_dim)), -1)[..., : part.count]
                parts[name] = jnp.sort(order, -1).astype(jnp.uint8)
            elif name != "min":
                parts[name] = jnp.zeros(shape, jnp.int8)
        return join_record(parts, layout)

    return record(fmt.key_parts), record(fmt.value_parts)


def random_state(make: Callable[[], KVState]) -> KVState:
    """The state that ``make()`` gives, with random pages and buffers, made layer by layer without a second copy.

    Lengths stay 0; set them. On a mesh each device makes its own part, which is the same for all.
    """
    empty = jax.eval_shape(make)
    tables = jax.jit(lambda: dataclasses.replace(make(), layers=()))()
    layers = []
    for index, layer in enumerate(empty.layers):
        leaves, structure = jax.tree.flatten(layer)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        layers.append(_random_layer(jax.random.key(index), structure, shapes, empty.mesh))
        jax.block_until_ready(layers[-1])
    return dataclasses.replace(tables, layers=tuple(layers))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_layer(key: jax.Array, structure, shapes: tuple, mesh: Mesh | None):
    """A layer of a tree structure and its leaves' (shape, dtype); layers of equal ones are compiled once."""
    layer = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes])
    if mesh is None:
        return _fill(key, layer)
    specs = partition_specs(layer, heads=layer.heads_axis)
    own = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype), layer, specs
    )
    return on_mesh(mesh, lambda key: _fill(key, own), (key,), (PartitionSpec(),), specs)


def _fill(key: jax.Array, layer):
    leaves, structure = jax.tree.flatten(layer)
    keys = jax.random.split(key, len(leaves) + 1)
    made = jax.tree.unflatten(structure, [_normal(k, x) for k, x in zip(keys[1:], leaves, strict=True)])
    if isinstance(layer, FullCache):
        return made
    pool, kv_heads, _ = layer.kv.key_pages.shape
    pages = random_records(keys[0], layer.kv.fmt, PAGES, kv_heads)
    key_pages, value_pages = (x[jnp.arange(pool, dtype=jnp.int32) % PAGES] for x in pages)
    squares = made.query_squares
    return dataclasses.replace(
        made,
        kv=dataclasses.replace(made.kv, key_pages=key_pages, value_pages=value_pages),
        query_squares=None if squares is None else jnp.abs(squares),
    )


def _normal(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random rows, the same ones again and again: drawing all would take several times the array's memory."""
    if not like.size:
        return jnp.zeros(like.shape, like.dtype)
    rows = jax.random.normal(key, (ROWS, like.shape[-1]), jnp.float32).astype(like.dtype)
    count = int(np.prod(like.shape[:-1], dtype=np.int64))
    return rows[jnp.arange(count, dtype=jnp.int32) % ROWS].reshape(like.shape)
