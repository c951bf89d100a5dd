"""Pages of the pool back to numbers, for attention of many new tokens at a time.

Plain XLA: it fuses the unpacking into one pass, and the attention that follows takes far longer.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values


def dequantize_pages(
    pool: Array, page_ids: Array, fmt: PageFormat, side: Literal["keys", "values"], *, dtype=jnp.bfloat16
) -> Array:
    """Reads pages of the pool and dequantizes them.

    Args:
        pool: uint32 [M, K, words], records of ``side``.
        page_ids: int32 [X], records to read; an id outside of the pool gives zeros.
        fmt: page format.
        dtype: of the result, which is rounded from float32.

    Returns:
        [X, K, G, D].

    Raises:
        ValueError: no such side, or the pool does not hold records of this side and format.
    """
    if side not in ("keys", "values"):
        raise ValueError(f"side must be 'keys' or 'values', got {side!r}")
    words = fmt.key_words if side == "keys" else fmt.value_words
    if pool.ndim != 3 or pool.shape[2] != words or pool.dtype != jnp.uint32:
        raise ValueError(f"the pool of {side} must be uint32 [M, K, {words}], got {pool.dtype}{list(pool.shape)}")
    if not pool.size or not page_ids.size:
        return jnp.zeros((*page_ids.shape, pool.shape[1], fmt.page, fmt.head_dim), dtype)
    ids = jnp.where(page_ids < 0, pool.shape[0], page_ids)
    records = pool.at[ids].get(mode="fill", fill_value=0)
    return (dequantize_keys if side == "keys" else dequantize_values)(records, fmt).astype(dtype)
