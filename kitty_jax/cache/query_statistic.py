"""What the cache remembers of the queries, for selections that weigh channels by them.

The error of channel d of a key costs a logit q_d times as much. So the square of the queries, summed over the tokens of
a page and the query heads that read a KV head, says how much a channel's error matters: one float32 per KV head and
channel. It is summed token by token in the order of the tokens, whatever brings them, and of numbers short enough that
no product is rounded: a chunk and single tokens give the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def squared_queries(queries: Array, num_kv_heads: int) -> Array:
    """Sum of squares over the query heads of each KV head: [..., N, D] -> float32 [..., K, D]."""
    n, d = queries.shape[-2:]
    # 12 significant bits: the square is exact, and a fused multiply-add cannot change the sum.
    squares = jnp.square(jax.lax.reduce_precision(queries.astype(jnp.float32), exponent_bits=8, mantissa_bits=11))
    heads = squares.reshape(*queries.shape[:-2], num_kv_heads, n // num_kv_heads, d)
    total = heads[..., 0, :]
    for head in range(1, heads.shape[-2]):
        total = total + heads[..., head, :]
    return total


def add_token(total: Array, squares: Array, past: Array, active: Array, page: int) -> Array:
    """One token per sequence.

    Args:
        total: float32 [B, K, D], sums over the tokens so far of each sequence's newest page.
        squares: float32 [B, K, D] of the new token.
        past: int32 [B], tokens past the sink before it.
        active: bool [B], where there is a new token and it lies past the sink.
        page: G.
    """
    old = jnp.where((past % page > 0)[:, None, None], total, 0)
    return jnp.where(active[:, None, None], old + squares, total)


def add_chunk(
    total: Array, squares: Array, lengths: Array, num_new: Array, sink: int, page: int, pages: int
) -> tuple[Array, Array]:
    """A chunk of T tokens per sequence.

    Args:
        total: float32 [B, K, D], as for :func:`add_token`.
        squares: float32 [B, T, K, D]; rows from ``num_new`` int32 [B] on are padding.
        lengths: int32 [B], tokens cached before, those in the sink included.
        sink, page: S, G.
        pages: most pages that the chunk fills.

    Returns:
        (float32 [B, pages, K, D], the sums of the pages from the one that was being filled on; the new total). Pages
        that the chunk does not fill have sums that mean nothing.
    """
    old = jnp.maximum(lengths - sink, 0)
    new = jnp.maximum(lengths + num_new - sink, 0)
    first = old // page
    start = (first[:, None] + jnp.arange(pages + 1, dtype=jnp.int32)) * page  # [B, pages + 1]
    begun = (old % page > 0)[:, None, None, None] & (jnp.arange(pages + 1) == 0)[:, None, None]
    sums = jnp.where(begun, total[:, None], jnp.zeros((), jnp.float32))

    def add(i: Array, sums: Array) -> Array:
        token = start + i  # past the sink
        index = jnp.clip(token + sink - lengths[:, None], 0, squares.shape[1] - 1)
        row = jnp.take_along_axis(squares, index[:, :, None, None], axis=1)
        real = (token >= old[:, None]) & (token < new[:, None])
        return sums + jnp.where(real[:, :, None, None], row, 0)

    sums = jax.lax.fori_loop(0, page, add, sums)
    last = jnp.clip((new - 1) // page - first, 0, pages)[:, None, None, None]  # the newest token's page
    newest = jnp.take_along_axis(sums, last, axis=1)[:, 0]
    return sums[:, :pages], jnp.where((new > old)[:, None, None], newest, total)
