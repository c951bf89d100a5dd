"""Attention of a few new tokens over a quantized layer: pages, edge pages, sink, key tail, value window, and the new
tokens.

The reference here is plain ``jax.numpy`` and runs everywhere. Its cost grows with the longest cached sequence of the
batch, not with the capacity: the loop over pages has a run-time bound.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.decode_attention.kernel import decode_attention_mosaic
from kitty_jax.pallas_kernels.decode_attention.kernel import unsupported as mosaic_unsupported
from kitty_jax.pallas_kernels.decode_attention.reference_insert import insert_token
from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.ordering import ordered
from kitty_jax.pallas_kernels.page_format import LayerKV
from kitty_jax.pallas_kernels.partials import Partial, empty_partial, finish, merge, partial_attention
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values


def decode_attention(
    q: Array,
    new_keys: Array,
    new_values: Array,
    kv: LayerKV,
    page_table: Array,
    lengths: Array,
    num_new: Array,
    *,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """Attends from new tokens over everything cached before them and over themselves, causally.

    The new tokens are *not* in ``kv`` yet; they count as full precision (DESIGN section 1: a step inserts, attends,
    then quantizes). Query head n reads KV head ``n // Q``, Q = N / K.

    Args:
        q: [B, T, N, D] queries of the T new tokens, after rotary embedding.
        new_keys, new_values: [B, T, K, D].
        kv: the layer's cache before the new tokens.
        page_table: int32 [B, P], page p of sequence b is record ``page_table[b, p]`` of the pool.
        lengths: int32 [B], tokens cached in ``kv``.
        num_new: int32 [B], how many of the T new tokens are real (the rest is padding at the end).
        scale: softmax scale, ``D ** -0.5`` by default.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        [B, T, N, D] in q's dtype. Rows of padding tokens are finite and meaningless; a token that sees no key cannot
        occur, it sees itself.

    Raises:
        ValueError: shapes disagree, or the named implementation cannot run these arguments here.
    """
    _check(q, new_keys, new_values, kv, page_table, lengths, num_new)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choose(implementation, mosaic_unsupported(q, kv, scale)) == "mosaic":
        return decode_attention_mosaic(q, new_keys, new_values, kv, page_table, lengths, num_new, scale)
    return _reference(q, new_keys, new_values, kv, page_table, lengths, num_new, scale)


def decode_attention_insert(
    q: Array,
    new_keys: Array,
    new_values: Array,
    kv: LayerKV,
    page_table: Array,
    lengths: Array,
    num_new: Array,
    *,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Array, LayerKV]:
    """:func:`decode_attention` of one new token a sequence, T = 1, which then goes into the buffers.

    The kernel does both in one launch. Donate ``kv`` (or use it in a loop), and its buffers are written in place.

    Returns:
        (attention [B, 1, N, D], the layer with the token of every sequence where ``num_new`` is above 0).

    Raises:
        ValueError: T is not 1, and as :func:`decode_attention`.
    """
    _check(q, new_keys, new_values, kv, page_table, lengths, num_new)
    if q.shape[1] != 1:
        raise ValueError(f"decode_attention_insert takes one new token a sequence, got q of shape {q.shape}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choose(implementation, mosaic_unsupported(q, kv, scale)) == "mosaic":
        return decode_attention_mosaic(q, new_keys, new_values, kv, page_table, lengths, num_new, scale, insert=True)
    out = _reference(q, new_keys, new_values, kv, page_table, lengths, num_new, scale)
    new = [ordered(x, out)[:, 0] for x in (new_keys, new_values)]
    return out, insert_token(kv, *new, lengths, num_new > 0)


def _check(q, new_keys, new_values, kv: LayerKV, page_table, lengths, num_new):
    b, t, n, d = q.shape
    k = kv.key_pages.shape[1]
    if n % k:
        raise ValueError(f"query heads must be a multiple of the cache's {k} KV heads, got {n}")
    wanted = {
        "new_keys": (new_keys, (b, t, k, d)),
        "new_values": (new_values, (b, t, k, d)),
        "sink_keys": (kv.sink_keys, (b, k, kv.sink, d)),
        "tail_keys": (kv.tail_keys, (b, k, kv.fmt.page, kv.fmt.head_dim)),
        "page_table": (page_table, (b, page_table.shape[-1])),
        "lengths": (lengths, (b,)),
        "num_new": (num_new, (b,)),
    }
    wrong = [f"{name}: wanted {shape}, got {x.shape}" for name, (x, shape) in wanted.items() if x.shape != shape]
    if wrong:
        raise ValueError(f"decode_attention with q of shape {q.shape}: " + "; ".join(wrong))


def _logits(q: Array, keys: Array, scale: float) -> Array:
    """q [B, K, Q, T, D], keys [B, K, X, D] -> float32 [B, K, Q, T, X]."""
    return scale * jnp.einsum("bkqtd,bkxd->bkqtx", q, keys.astype(jnp.float32), precision="highest")


def attend_pages(q: Array, kv: LayerKV, page_table: Array, lengths: Array, scale: float) -> Partial:
    """Partial over the pages. q: float32 [B, K, Q, T, D]. Pages whose values are still in the ring take them from
    there."""
    _, n_k, n_v = kv.counts(lengths)
    g, ring = kv.fmt.page, kv.ring_values.shape[2]

    def body(p, carry: Partial) -> Partial:
        page = jax.lax.dynamic_index_in_dim(page_table, p, 1, keepdims=False)
        page = jnp.clip(page, 0, kv.key_pages.shape[0] - 1)
        keys = dequantize_keys(kv.key_pages[page], kv.fmt)
        values = dequantize_values(kv.value_pages[page], kv.fmt)
        slots = (p * g + jnp.arange(g, dtype=jnp.int32)) % ring
        recent = jnp.take(kv.ring_values, slots, axis=2).astype(jnp.float32)
        values = jnp.where((p < n_v)[:, None, None, None], values, recent)
        mask = (p < n_k)[:, None, None, None, None]
        return merge(carry, partial_attention(_logits(q, keys, scale), mask, values))

    init = empty_partial(q.shape[:-1], q.shape[-1])
    if not page_table.shape[1]:
        return init
    return jax.lax.fori_loop(0, jnp.max(n_k), body, init)


def attend_buffers(q: Array, kv: LayerKV, lengths: Array, scale: float) -> Partial:
    """Partial over sink and key tail. q: float32 [B, K, Q, T, D]."""
    n, n_k, _ = kv.counts(lengths)
    g, ring = kv.fmt.page, kv.ring_values.shape[2]
    token = n_k[:, None] * g + jnp.arange(g, dtype=jnp.int32)  # [B, G], the token past the sink in each tail slot
    values = jnp.take_along_axis(kv.ring_values, (token % ring)[:, None, :, None], axis=2)
    mask = (token < n[:, None])[:, None, None, None, :]
    tail = partial_attention(_logits(q, kv.tail_keys, scale), mask, values)
    if not kv.sink:
        return tail
    mask = (jnp.arange(kv.sink) < lengths[:, None])[:, None, None, None, :]
    return merge(tail, partial_attention(_logits(q, kv.sink_keys, scale), mask, kv.sink_values))


def attend_new(q: Array, new_keys: Array, new_values: Array, num_new: Array, scale: float) -> Partial:
    """Partial over the new tokens themselves, causal. q: float32 [B, K, Q, T, D]; new_keys, new_values [B, T, K, D]."""
    t = jnp.arange(q.shape[3])
    mask = t[:, None] >= t[None, :]
    # A padding query sees all real tokens and itself, which keeps its row finite.
    mask = mask & ((t < num_new[:, None])[:, None, :] | (t[:, None] == t[None, :]))
    keys, values = (jnp.swapaxes(x, 1, 2) for x in (new_keys, new_values))
    return partial_attention(_logits(q, keys, scale), mask[:, None, None], values)


def _reference(q, new_keys, new_values, kv, page_table, lengths, num_new, scale) -> Array:
    b, t, n, d = q.shape
    k = new_keys.shape[2]
    grouped = q.reshape(b, t, k, n // k, d).transpose(0, 2, 3, 1, 4).astype(jnp.float32)
    out = finish(
        attend_pages(grouped, kv, page_table, lengths, scale),
        attend_buffers(grouped, kv, lengths, scale),
        attend_new(grouped, new_keys, new_values, num_new, scale),
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d).astype(q.dtype)
