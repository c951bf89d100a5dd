"""Attention of a long chunk of new tokens over a packed history, within a bounded workspace.

A few pages at a time are dequantized and attended as flash attention does it; the partial results are merged. The
workspace is that of PAGES_AT_A_TIME pages of every sequence, whatever the length of the history. For few new tokens
:func:`.pallas_kernels.decode_attention.decode_attention` reads the packed pages themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.dense_attention import partial_dense_attention
from kitty_jax.pallas_kernels.dequantize import dequantize_pages
from kitty_jax.pallas_kernels.page_format import LayerKV
from kitty_jax.pallas_kernels.partials import Partial, finish, merge

PAGES_AT_A_TIME = 32  # pages of each sequence that are dequantized at a time
MIN_COLUMNS = 128  # new tokens x query heads per KV head above which dequantizing pays


def is_long(q: Array, k: Array) -> bool:
    """Whether a chunk is long enough for :func:`chunk_attention`: q [B, T, N, D], k [B, T, K, D]."""
    return q.shape[1] * q.shape[2] // k.shape[2] > MIN_COLUMNS


def chunk_attention(
    q: Array,
    new_keys: Array,
    new_values: Array,
    kv: LayerKV,
    page_table: Array,
    lengths: Array,
    num_new: Array,
) -> Array:
    """The same as ``decode_attention`` with the same arguments, for many new tokens: [B, T, N, D] in q's dtype.

    Keys and values of pages are rounded to q's dtype.
    """
    del num_new  # padding comes last: the causal mask hides it from the real tokens
    total = partial_dense_attention(q, new_keys, new_values, None)
    total = merge(total, _buffers(q, kv, lengths))
    if page_table.shape[1]:
        total = _with_pages(total, q, kv, page_table, lengths)
    return finish(total).astype(q.dtype)


def _buffers(q: Array, kv: LayerKV, lengths: Array) -> Partial:
    """Sink and key tail: the tail holds tokens only where the sink is full, so the real ones stand in a row."""
    n, n_k, _ = kv.counts(lengths)
    g, ring = kv.fmt.page, kv.ring_values.shape[2]
    slots = (n_k[:, None] * g + jnp.arange(g, dtype=jnp.int32)) % ring
    tail = jnp.take_along_axis(kv.ring_values, slots[:, None, :, None], axis=2)
    keys = jnp.concatenate([kv.sink_keys, kv.tail_keys], axis=2)
    values = jnp.concatenate([kv.sink_values, tail], axis=2)
    visible = jnp.minimum(lengths, kv.sink) + n % g
    return partial_dense_attention(q, *(jnp.swapaxes(x, 1, 2).astype(q.dtype) for x in (keys, values)), visible)


def _with_pages(total: Partial, q: Array, kv: LayerKV, table: Array, lengths: Array) -> Partial:
    """``total`` and the pages. A loop that began with nothing and was merged afterwards would begin with constants, and
    XLA makes those of all layers when the program starts."""
    _, n_k, n_v = kv.counts(lengths)
    b, g, ring = q.shape[0], kv.fmt.page, kv.ring_values.shape[2]
    size = min(PAGES_AT_A_TIME, table.shape[1])
    table = jnp.pad(table, [(0, 0), (0, -table.shape[1] % size)], constant_values=-1)

    def rows(pages: Array) -> Array:
        """[B * size, K, G, D] -> [B, size * G, K, D]."""
        _, k, _, d = pages.shape
        return pages.reshape(b, size, k, g, d).transpose(0, 1, 3, 2, 4).reshape(b, size * g, k, d)

    def body(block: Array, total: Partial) -> Partial:
        page = block * size + jnp.arange(size, dtype=jnp.int32)
        ids = jax.lax.dynamic_slice_in_dim(table, block * size, size, axis=1)
        keys, values = (
            dequantize_pages(
                pool,
                jnp.where(page < count[:, None], ids, -1).reshape(-1),
                kv.fmt,
                side,
                dtype=q.dtype,
            )
            for pool, count, side in ((kv.key_pages, n_k, "keys"), (kv.value_pages, n_v, "values"))
        )
        keys, values = rows(keys), rows(values)
        # The newest pages' values are still in the ring.
        token = page[0] * g + jnp.arange(size * g, dtype=jnp.int32)
        recent = jnp.swapaxes(jnp.take(kv.ring_values, token % ring, axis=2), 1, 2).astype(q.dtype)
        values = jnp.where((token // g < n_v[:, None])[:, :, None, None], values, recent)
        visible = jnp.clip((n_k - page[0]) * g, 0, size * g)
        return merge(total, partial_dense_attention(q, keys, values, visible))

    return jax.lax.fori_loop(0, (jnp.max(n_k) + size - 1) // size, body, total)
