"""Quantize and dequantize a whole text at once, with straight-through gradients (fake quantization).

The codes are those of the packed cache: pages go through :func:`.pallas_kernels.quantize.quantize_keys` and back. The
derivative is that of the identity, so a model can be finetuned through its cache.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.query_statistic import squared_queries
from kitty_jax.cache.rotation import rotate
from kitty_jax.cache.selection import key_quantization
from kitty_jax.pallas_kernels.quantize import (
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)


def straight_through(quantize: Callable[..., Array], x: Array, *others: Array) -> Array:
    """``quantize(x, *others)``, exactly, with the derivative of the identity in x and none in the others.

    ``quantize`` keeps the shape and dtype of x.
    """

    @jax.custom_jvp
    def apply(x, *others):
        return quantize(x, *others)

    apply.defjvp(lambda primals, tangents: (apply(*primals), tangents[0]))
    return apply(x, *others)


def fake_quantize_keys(
    keys: Array, config: CacheConfig, *, layer: Array | int = 0, queries: Array | None = None
) -> Array:
    """Every full page of keys past the sink as the cache gives it back; sink and tail as they are.

    Args:
        keys: [B, T, K, D] of a text from its first token on, after rotary embedding.
        config: a quantized cache.
        layer: number of the layer; decides the channels of the "random" selection.
        queries: [B, T, N, D], needed by selections that weigh channels by the queries.

    Returns:
        float32 [B, T, K, D], straight-through.
    """
    fmt = config.page_format(keys.shape[-1])

    others = ()
    if config.weighs_queries and queries is not None:
        # Summed in another order than the packed cache does: it decides nothing but the ranks of equals.
        squares = squared_queries(queries, keys.shape[2])
        others = (jnp.sum(split_pages(squares, config.sink, config.page), axis=-2),)

    def quantize(pages: Array, squares: Array | None = None) -> Array:
        numbers = jnp.arange(pages.shape[1], dtype=jnp.int32)
        how = key_quantization(config, layer, numbers, pages, squares)
        return dequantize_keys(quantize_keys(pages, fmt, **how), fmt)

    return _quantize_pages(keys, config, quantize, *others)


def fake_quantize_values(values: Array, config: CacheConfig) -> Array:
    """Every full page of values past the sink as the cache gives it back: [B, T, K, D] -> float32, straight-through."""
    fmt = config.page_format(values.shape[-1])

    def quantize(pages: Array) -> Array:
        pages = rotate(pages) if config.rotate_values else pages
        out = dequantize_values(quantize_values(pages, fmt, shrink=config.value_shrink), fmt)
        return rotate(out) if config.rotate_values else out

    return _quantize_pages(values, config, quantize)


def fake_quantize(
    keys: Array, values: Array, config: CacheConfig, *, layer: Array | int = 0, queries: Array | None = None
) -> tuple[Array, Array]:
    """:func:`fake_quantize_keys` and :func:`fake_quantize_values`; full precision gives both back as they are."""
    if not config.quantized:
        return keys, values
    return fake_quantize_keys(keys, config, layer=layer, queries=queries), fake_quantize_values(values, config)


def split_pages(x: Array, sink: int, page: int) -> Array:
    """The full pages past the sink: [B, T, H, D] -> [B, pages, H, G, D]."""
    b, t, heads, d = x.shape
    pages = max(t - sink, 0) // page
    x = x[:, sink : sink + pages * page].reshape(b, pages, page, heads, d)
    return jnp.swapaxes(x, 2, 3)


def _quantize_pages(x: Array, config: CacheConfig, quantize: Callable[..., Array], *others: Array) -> Array:
    x = x.astype(jnp.float32)
    pages = split_pages(x, config.sink, config.page)
    if not pages.shape[1]:
        return x
    b, count, heads, page, d = pages.shape
    middle = jnp.swapaxes(straight_through(quantize, pages, *others), 2, 3).reshape(b, count * page, heads, d)
    return jnp.concatenate([x[:, : config.sink], middle, x[:, config.sink + count * page :]], axis=1)
