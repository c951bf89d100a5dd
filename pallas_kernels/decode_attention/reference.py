"""Decode attention in plain ``jax.numpy``: it runs everywhere, and is what the kernel is tested against.

Its cost grows with the longest cached sequence of the batch, not with the capacity: the loop over pages has a run-time
bound.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.page_format import LayerKV
from kitty_jax.pallas_kernels.partials import Partial, empty_partial, finish, merge, partial_attention
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values


def decode_attention_reference(inputs: DecodeInputs, scale: float) -> Array:
    """:func:`.operation.decode_attention`, [B, T, N, D] in q's dtype."""
    b, t, n, d = inputs.q.shape
    k, kv, lengths = inputs.kv_heads, inputs.kv, inputs.lengths
    q = inputs.q.reshape(b, t, k, n // k, d).transpose(0, 2, 3, 1, 4).astype(jnp.float32)
    out = finish(
        attend_pages(q, kv, inputs.page_table, lengths, scale),
        attend_buffers(q, kv, lengths, scale),
        attend_new(q, inputs.new_keys, inputs.new_values, inputs.num_new, scale),
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d).astype(inputs.q.dtype)


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
