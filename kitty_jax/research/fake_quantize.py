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
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values


def fake_quantize(
    keys: Array,
    values: Array,
    cache: CacheConfig | str,
    *,
    layer: Array | int = 0,
    queries: Array | None = None,
) -> tuple[Array, Array]:
    """Keys and values as a cache gives them back: every full page past the sink quantized, sink and tail as they are.

    Args:
        keys, values: [B, T, K, D] of a text from its first token on, keys after rotary embedding.
        cache: a config or a name; full precision gives both back as they are.
        layer: number of the layer; decides the channels of the "random" selection.
        queries: [B, T, N, D], needed by selections that weigh channels by the queries.

    Returns:
        float32 [B, T, K, D] twice, straight-through.

    Raises:
        ValueError: an unknown name, shapes that do not go together, or queries are needed and missing.
    """
    config = cache_from_spec(cache) if isinstance(cache, str) else cache
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(f"keys and values must be [B, T, K, D], of one shape, got {keys.shape} and {values.shape}")
    b, t, heads, d = keys.shape
    if queries is not None and (queries.shape[:2] + queries.shape[3:] != (b, t, d) or queries.shape[2] % heads):
        raise ValueError(
            f"queries must be [B, T, N, D] with N a multiple of K, got {queries.shape} for keys of {keys.shape}"
        )
    if not config.quantized:
        return keys, values
    return fake_quantize_keys(keys, config, layer=layer, queries=queries), fake_quantize_values(values, config)


def fake_quantize_keys(
    keys: Array,
    config: CacheConfig,
    *,
    layer: Array | int = 0,
    queries: Array | None = None,
    channels: Array | None = None,
) -> Array:
    """The keys of :func:`fake_quantize`, of a quantized cache.

    ``channels``, int32 [K or 1, C], boosts these in place of what the config selects: a fixed list as data, so that
    layers with other lists share a compilation.
    """
    fmt = config.page_format(keys.shape[-1])
    others = ()
    if channels is None and config.weighs_queries and queries is not None:
        # Summed in another order than the packed cache does: it decides nothing but the ranks of equals.
        squares = squared_queries(queries, keys.shape[2])
        others = (jnp.sum(split_pages(squares, config.sink, config.page), axis=-2),)

    def quantize(pages: Array, squares: Array | None = None) -> Array:
        if channels is None:
            numbers = jnp.arange(pages.shape[1], dtype=jnp.int32)
            how = key_quantization(config, layer, numbers, pages, squares)
        else:
            chosen = jnp.sum(jax.nn.one_hot(channels, keys.shape[-1], dtype=jnp.float32), axis=1)  # [K or 1, D]
            how = {"scores": jnp.broadcast_to(chosen, (*pages.shape[:3], keys.shape[-1])), "shrink": config.key_shrink}
        return dequantize_keys(quantize_keys(pages, fmt, **how), fmt)

    return _quantize_pages(keys, config, quantize, *others)


def fake_quantize_values(values: Array, config: CacheConfig) -> Array:
    """The values of :func:`fake_quantize`, of a quantized cache."""
    fmt = config.page_format(values.shape[-1])

    def quantize(pages: Array) -> Array:
        pages = rotate(pages) if config.rotate_values else pages
        out = dequantize_values(quantize_values(pages, fmt, shrink=config.value_shrink), fmt)
        return rotate(out) if config.rotate_values else out

    return _quantize_pages(values, config, quantize)


def split_pages(x: Array, sink: int, page: int) -> Array:
    """The full pages past the sink: [B, T, H, D] -> [B, pages, H, G, D]."""
    b, t, heads, d = x.shape
    pages = max(t - sink, 0) // page
    x = x[:, sink : sink + pages * page].reshape(b, pages, page, heads, d)
    return jnp.swapaxes(x, 2, 3)


def _quantize_pages(x: Array, config: CacheConfig, quantize: Callable[..., Array], *others: Array) -> Array:
    """``quantize(pages, *others)`` in place of the full pages, with the derivative of the identity in x."""

    @jax.custom_jvp
    def straight_through(pages, *others):
        return quantize(pages, *others)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
    x = x.astype(jnp.float32)
    pages = split_pages(x, config.sink, config.page)
    if not pages.shape[1]:
        return x
    b, count, heads, page, d = pages.shape
    middle = jnp.swapaxes(straight_through(pages, *others), 2, 3).reshape(b, count * page, heads, d)
    return jnp.concatenate([x[:, : config.sink], middle, x[:, config.sink + count * page :]], axis=1)
