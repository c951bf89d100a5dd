"""Attention of one layer over its cache, whichever kind it is, and the writing that belongs to it.

Three situations, three functions, each ``(step, layer, q, k, v) -> (out, layer)``:

* :func:`attend_fresh`: a prompt into an empty state; full-precision causal attention, then quantize;
* :func:`attend_chunk`: further tokens into a non-empty state; attends the state and the chunk, then quantizes;
* :func:`attend_token`: one token per sequence; attends, then inserts. The step flushes full pages afterwards, for all
  layers at once.

Here XLA's reads and writes of a layer are put in order. On a mesh each device does all of it for its own sequences and
KV heads; nothing is exchanged.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import Array
from jax.sharding import PartitionSpec

from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.cache.layer_cache import LayerCache, Step
from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.pallas_kernels.ordering import not_before, ordered

FEW = 8  # sequences whose buffers may wait in memory for all layers


def attend_fresh(step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    """Prompt tokens [B, T] into an empty state."""
    return _on_devices(_fresh, step, layer, q, k, v)


def attend_chunk(step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    """A chunk of tokens [B, T] into a state that may hold tokens already."""
    return _on_devices(_chunk, step, layer, q, k, v)


def attend_token(step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    """One token per sequence: q [B, 1, N, D], k and v [B, 1, K, D]. Inactive sequences have num_new 0."""
    return _on_devices(lambda step, layer, *qkv: layer.decode(step, *qkv), step, layer, q, k, v)


def _on_devices(attend, step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    mesh = step.mesh
    step = dataclasses.replace(step, mesh=None)
    heads = PartitionSpec("data", None, "model", None)
    of_layer = partition_specs(layer, heads=layer.heads_axis)
    specs = (partition_specs(step), of_layer, heads, heads, heads)
    return on_mesh(mesh, attend, (step, layer, q, k, v), specs, (heads, of_layer))


def _fresh(step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    out = causal_attention(q, k, v)
    return _written(out, layer.append(dataclasses.replace(step, fresh=True), q, k, v))


def _chunk(step: Step, layer: LayerCache, q: Array, k: Array, v: Array) -> tuple[Array, LayerCache]:
    step = _reads_after(step, k)
    if layer.writes_first:
        layer = layer.append(step, q, k, v)
        return layer.attend(step, q, k, v), layer
    out = layer.attend(step, q, k, v)
    return _written(out, layer.append(step, q, ordered(k, out), ordered(v, out)))


def _reads_after(step: Step, k: Array) -> Step:
    """The step, with what its reads of the cache hang on not computable before ``k``.

    XLA would read the buffers of all layers when the program begins, and hold what it read. Places that hang on
    ``lengths`` are then computed in every layer anew, which takes a third more compilation: for few sequences, not.
    """
    if step.rows is not None:
        return dataclasses.replace(step, rows=not_before(step.rows, [k]))
    return step if k.shape[0] <= FEW else dataclasses.replace(step, lengths=not_before(step.lengths, [k]))


def _written(out: Array, layer: LayerCache) -> tuple[Array, LayerCache]:
    """Both; the model goes on with ``out`` once the layer is written, so that what it is written from can go."""
    return not_before(out, jax.tree.leaves(layer)), layer
