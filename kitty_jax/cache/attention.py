"""Attention of one layer over its cache, whichever kind it is, and the insertion that belongs to it.

Three situations, three functions, each ``(step, layer, q, k, v) -> (out, layer)``:

* :func:`attend_fresh`: a prompt into an empty state; full-precision causal attention, then quantize;
* :func:`attend_chunk`: further tokens into a non-empty state; attends the state and the chunk, then quantizes;
* :func:`attend_token`: one token per sequence; attends, then inserts. The step flushes full pages afterwards, for all
  layers at once.

On a mesh each device does all of it for its own sequences and KV heads; nothing is exchanged.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from kitty_jax.cache.chunk_attention import attend_history, wants_history
from kitty_jax.cache.dense_attention import causal_attention, cudnn_takes, masked_attention
from kitty_jax.cache.mesh import on_mesh, partition_specs
from kitty_jax.cache.quantized_cache import append_chunk, count_queries, insert_token, take_rows
from kitty_jax.cache.rotation import rotate
from kitty_jax.cache.state import FullLayer, Layer, QuantizedLayer
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.implementation import Implementation
from kitty_jax.pallas_kernels.ordering import not_before, ordered


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What a step's attention needs beside q, k and v.

    Attributes:
        lengths: int32 [B], tokens cached before the step.
        num_new: int32 [B], real tokens of the step.
        page_table: int32 [B, P], with the step's pages handed out.
        rows: int32 [B], the sequence of the cache that each row of the step belongs to, counted within its group of
            the mesh; None where the rows are all sequences in order.
        implementation: for the operations on pages.
        mesh: the cache's.
    """

    lengths: Array
    num_new: Array
    page_table: Array
    implementation: Implementation = dataclasses.field(default="auto", metadata={"static": True})
    rows: Array | None = None
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})


def attend_fresh(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """Prompt tokens [B, T] into an empty state."""
    return _on_devices(_attend_fresh, step, layer, q, k, v)


def attend_chunk(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """A chunk of tokens [B, T] into a state that may hold tokens already."""
    return _on_devices(_attend_chunk, step, layer, q, k, v)


def attend_token(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """One token per sequence: q [B, 1, N, D], k and v [B, 1, K, D]. Inactive sequences have num_new 0."""
    return _on_devices(_attend_token, step, layer, q, k, v)


def _on_devices(attend, step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    mesh = step.mesh
    step = dataclasses.replace(step, mesh=None)
    heads = PartitionSpec("data", None, "model", None)
    of_layer = partition_specs(layer, heads=2 if isinstance(layer, FullLayer) else 1)
    specs = (partition_specs(step), of_layer, heads, heads, heads)
    return on_mesh(mesh, attend, (step, layer, q, k, v), specs, (heads, of_layer))


def _attend_fresh(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    return _written(causal_attention(q, k, v), _append(step, layer, q, k, _turn(layer, v), fresh=True))


def _attend_chunk(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    step = _in_turn(step, k)
    if isinstance(layer, FullLayer):
        layer = _append(step, layer, q, k, v)
        own = take_rows(layer, step.rows)
        return masked_attention(q, own.keys, own.values, step.lengths), layer
    v = _turn(layer, v)
    attend = attend_history if wants_history(q, k) else decode_attention
    kv = take_rows(layer, step.rows).kv
    out = attend(q, k, v, kv, step.page_table, step.lengths, step.num_new, implementation=step.implementation)
    return _written(_turn(layer, out), _append(step, layer, q, ordered(k, out), ordered(v, out)))


FEW = 8  # sequences whose buffers may wait in memory for all layers


def _in_turn(step: Step, k: Array) -> Step:
    """The step, with what its reads of the cache hang on not computable before ``k``.

    XLA would read the buffers of all layers when the program begins, and hold what it read. Places that hang on
    ``lengths`` are then computed in every layer anew, which takes a third more compilation: for few sequences, not.
    """
    if step.rows is not None:
        return dataclasses.replace(step, rows=not_before(step.rows, [k]))
    return step if k.shape[0] <= FEW else dataclasses.replace(step, lengths=not_before(step.lengths, [k]))


def _attend_token(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    active = step.num_new > 0
    if isinstance(layer, FullLayer):
        layer = insert_token(layer, k[:, 0], v[:, 0], step.lengths, active)
        return _decode_full(q, layer, step.lengths), layer
    facts = (step.page_table, step.lengths, step.num_new)
    options = {"implementation": step.implementation, "insert": True}
    out, kv = decode_attention(q, k, _turn(layer, v), layer.kv, *facts, **options)
    layer = dataclasses.replace(layer, kv=kv)
    return _turn(layer, out), count_queries(layer, step.lengths, active, q[:, 0])


def _turn(layer: Layer, x: Array) -> Array:
    """Values into the layer's basis, or attention outputs back from it (the rotation is its own inverse)."""
    return rotate(x) if isinstance(layer, QuantizedLayer) and layer.config.rotate_values else x


def _written(out: Array, layer: Layer) -> tuple[Array, Layer]:
    """Both; the model goes on with ``out`` once the layer is written, so that what it is written from can go."""
    return not_before(out, jax.tree.leaves(layer)), layer


def _append(step: Step, layer: Layer, q: Array, k: Array, v: Array, fresh: bool = False) -> Layer:
    facts = (step.lengths, step.num_new, step.page_table)
    return append_chunk(layer, k, v, *facts, step.implementation, queries=q, rows=step.rows, fresh=fresh)


def _decode_full(q: Array, layer: FullLayer, lengths: Array) -> Array:
    if cudnn_takes(q):
        return jax.nn.dot_product_attention(
            q, layer.keys, layer.values, key_value_seq_lengths=lengths + 1, implementation="cudnn"
        )
    return masked_attention(q, layer.keys, layer.values, lengths)
