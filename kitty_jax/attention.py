"""Attention of one layer over its cache, whichever kind it is, and the insertion that belongs to it.

Three situations, three functions, each ``(layer, q, k, v) -> (out, layer)`` once the step's facts are bound:

* :func:`attend_fresh`: a prompt into an empty state; full-precision causal attention, then quantize;
* :func:`attend_chunk`: further tokens into a non-empty state; attends the state and the chunk, then quantizes;
* :func:`attend_token`: one token per sequence; attends, then inserts. The step flushes full pages afterwards, for all
  layers at once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.decode_attention import decode_attention
from kitty_jax.pallas_kernels.implementation import Implementation
from kitty_jax.rotation import rotate
from kitty_jax.state import FullLayer, Layer, QuantizedLayer
from kitty_jax.update import append_chunk, insert_token, ordered

QUERY_BLOCK = 256  # queries attended at a time on the XLA path: bounds the logits at B * N * 256 * keys


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step's attention needs beside q, k and v.

    Attributes:
        lengths: int32 [B], tokens cached before the step.
        num_new: int32 [B], real tokens of the step.
        page_table: int32 [B, P], with the step's pages handed out.
        implementation: for the operations on pages.
    """

    lengths: Array
    num_new: Array
    page_table: Array
    implementation: Implementation = "auto"


def attend_fresh(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """Prompt tokens [B, T] into an empty state."""
    return causal_attention(q, k, v), _append(step, layer, q, k, _turn(layer, v))


def attend_chunk(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """A chunk of tokens [B, T] into a state that may hold tokens already."""
    if isinstance(layer, FullLayer):
        layer = _append(step, layer, q, k, v)
        return masked_attention(q, layer.keys, layer.values, step.lengths), layer
    v = _turn(layer, v)
    out = decode_attention(
        q, k, v, layer.kv, step.page_table, step.lengths, step.num_new, implementation=step.implementation
    )
    return _turn(layer, out), _append(step, layer, q, ordered(k, out), ordered(v, out))


def attend_token(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
    """One token per sequence: q [B, 1, N, D], k and v [B, 1, K, D]. Inactive sequences have num_new 0."""
    active = step.num_new > 0
    if isinstance(layer, FullLayer):
        layer = insert_token(layer, k[:, 0], v[:, 0], step.lengths, active)
        return _decode_full(q, layer, step.lengths), layer
    v = _turn(layer, v)
    out = decode_attention(
        q, k, v, layer.kv, step.page_table, step.lengths, step.num_new, implementation=step.implementation
    )
    k, v = ordered(k, out), ordered(v, out)
    return _turn(layer, out), insert_token(layer, k[:, 0], v[:, 0], step.lengths, active, q[:, 0])


def _turn(layer: Layer, x: Array) -> Array:
    """Values into the layer's basis, or attention outputs back from it (the rotation is its own inverse)."""
    return rotate(x) if isinstance(layer, QuantizedLayer) and layer.config.rotate_values else x


def _append(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> Layer:
    return append_chunk(layer, k, v, step.lengths, step.num_new, step.page_table, step.implementation, q)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of right-padded sequences over themselves: q [B, T, N, D], k and v [B, T, K, D] -> [B, T, N, D].

    cuDNN flash attention where it runs (GPU, 16-bit, head size a multiple of 8 up to 128), blocks of queries
    elsewhere. Padding comes after a sequence's tokens, so the causal mask hides it from them.
    """
    if _cudnn_takes(q) and q.shape[1] > 1:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return masked_attention(q, k, v, jnp.zeros(q.shape[0], jnp.int32))


def masked_attention(q: Array, k: Array, v: Array, first: Array) -> Array:
    """Attention in which query t of sequence b sees keys 0 to first[b] + t.

    Args:
        q: [B, T, N, D]; k, v: [B, X, K, D]; first: int32 [B].

    Returns:
        [B, T, N, D] in q's dtype; logits and softmax in float32.
    """
    b, t, n, d = q.shape
    if t <= QUERY_BLOCK:
        return _masked_block(q, k, v, first)
    blocks = -(-t // QUERY_BLOCK)
    padded = jnp.pad(q, [(0, 0), (0, blocks * QUERY_BLOCK - t), (0, 0), (0, 0)])
    padded = jnp.swapaxes(padded.reshape(b, blocks, QUERY_BLOCK, n, d), 0, 1)
    starts = jnp.arange(blocks, dtype=jnp.int32) * QUERY_BLOCK
    out = jax.lax.map(lambda x: _masked_block(x[0], k, v, first + x[1]), (padded, starts))
    return jnp.swapaxes(out, 0, 1).reshape(b, -1, n, d)[:, :t]


def _masked_block(q: Array, k: Array, v: Array, first: Array) -> Array:
    b, t, n, d = q.shape
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], d)
    exact = {"precision": "highest"} if q.dtype == jnp.float32 else {}
    logits = jnp.einsum("btkqd,bxkd->bkqtx", grouped, k, preferred_element_type=jnp.float32, **exact) * d**-0.5
    seen = jnp.arange(k.shape[1]) <= (first[:, None] + jnp.arange(t))[:, :, None]  # [B, T, X]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqtx,bxkd->btkqd", weights, v, preferred_element_type=jnp.float32, **exact)
    return out.reshape(b, t, n, d).astype(q.dtype)


def _decode_full(q: Array, layer: FullLayer, lengths: Array) -> Array:
    if _cudnn_takes(q):
        return jax.nn.dot_product_attention(
            q, layer.keys, layer.values, key_value_seq_lengths=lengths + 1, implementation="cudnn"
        )
    return masked_attention(q, layer.keys, layer.values, lengths)


def _cudnn_takes(q: Array) -> bool:
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
    )
