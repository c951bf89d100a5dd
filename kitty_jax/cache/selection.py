"""How a config's ``selection`` and ``key_shrink`` become arguments of the quantizer, for the packed cache and the
simulation alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.pallas_kernels.quantize import SCORES, channel_errors


def key_quantization(
    config: CacheConfig,
    layer: Array | int,
    page: Array,
    keys: Array,
    query_squares: Array | None,
    heads: tuple[Array | int, int] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``quantize_keys`` and ``store_key_pages`` for pages of keys.

    Args:
        layer: number of the layer.
        page: int32 [X], each page's number in its sequence.
        keys: [..., X, K, G, D].
        query_squares: float32 [..., X, K, D], sums over each page's tokens (:mod:`.query_statistic`); None where the
            config does not weigh channels by queries.
        heads: the number of the first of the K heads and of all heads, where these are only some of them.
    """
    out = {"score": config.selection if config.selection in SCORES else "magnitude", "shrink": config.key_shrink}
    if config.weighs_queries and query_squares is None:
        raise ValueError(f'selection "{config.selection}" weighs channels by the queries: pass them')
    if config.selection == "sensitivity" and config.weighs_queries:
        return out | {"score": "range", "weights": jnp.sqrt(query_squares)}
    if config.selection == "error" and config.weighs_queries:
        return out | {"scores": query_squares * channel_errors(keys, config.key_shrink)}
    first, total = heads or (0, keys.shape[-3])
    scores = given_scores(config, layer, page, total, keys.shape[-1])
    if scores is not None and total != keys.shape[-3]:
        scores = jax.lax.dynamic_slice_in_dim(scores, first, keys.shape[-3], axis=1)
    return out | {"scores": scores}


def given_scores(
    config: CacheConfig, layer: Array | int, page: Array, num_kv_heads: int, head_dim: int
) -> Array | None:
    """Channel scores that come from neither keys nor queries, float32 [X, K, D], or None.

    They are random, or 1 for the channels of a fixed list. Random scores depend on the seed, the layer, the page's
    number ``page`` int32 [X] in its sequence, and the KV head.
    """
    if config.selection == "random":
        key = jax.random.fold_in(jax.random.key(config.seed), layer)
        draw = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p), (num_kv_heads, head_dim), jnp.float32))
        return draw(page)
    lists = config.channel_lists()
    if not lists:
        return None
    listed = jnp.zeros((len(lists), head_dim), jnp.float32)
    listed = jax.vmap(lambda row, channels: row.at[channels].set(1))(listed, jnp.array(lists, jnp.int32))
    return jnp.broadcast_to(listed, (page.shape[0], num_kv_heads, head_dim))
