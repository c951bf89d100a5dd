"""Page dequantization: records of the pool back to keys or values (Kitty, arXiv 2511.18643, Algorithm 1)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kitty_jax.pallas_kernels.dequantize import kernel as dequantize_mgpu
from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values

Side = Literal["keys", "values"]


def dequantize_pages(
    pool: Array,
    page_ids: Array,
    fmt: PageFormat,
    side: Side,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation = "auto",
) -> Array:
    """Keys or values of some pages.

    Args:
        pool: key records uint32 [M, K, fmt.key_words], or value records uint32 [M, K, fmt.value_words].
        page_ids: int32 [X], the records to read; an id that is not from 0 to M - 1 gives zeros.
        fmt: page format.
        side: "keys" or "values": what the pool holds.
        dtype: bfloat16, float16 or float32 of the result, rounded from float32; float16 overflows to infinity.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        [X, K, G, D] in ``dtype``, tokens in page order.

    Raises:
        ValueError: the pool is not of this side and format, or the named implementation cannot run this here.
    """
    if side not in ("keys", "values"):
        raise ValueError(f"side must be 'keys' or 'values', got {side!r}")
    words = fmt.key_words if side == "keys" else fmt.value_words
    if pool.ndim != 3 or pool.shape[2] != words or pool.dtype != jnp.uint32:
        raise ValueError(f"a pool of {side} must be uint32 [M, K, {words}], got {pool.dtype}{list(pool.shape)}")
    if page_ids.ndim != 1:
        raise ValueError(f"page_ids must be int32 [X], got shape {page_ids.shape}")
    if not pool.size or not page_ids.size:
        return jnp.zeros((page_ids.shape[0], pool.shape[1], fmt.page, fmt.head_dim), dtype)
    if choose(implementation, dequantize_mgpu.unsupported(fmt, dtype)) == "mosaic":
        return dequantize_mgpu.dequantize(pool, page_ids, fmt, side, dtype)
    ids = jnp.where(page_ids < 0, pool.shape[0], page_ids)
    records = pool.at[ids].get(mode="fill", fill_value=0)
    restore = dequantize_keys if side == "keys" else dequantize_values
    return restore(records, fmt).astype(dtype)
