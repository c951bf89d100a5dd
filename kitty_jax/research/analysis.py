"""What the paper's Figure 2 shows, computed: key magnitudes, and what each channel's quantization costs the logits."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.research.fake_quantize import fake_quantize_keys


def capture(model, tokens: Array, layers: Collection[int]) -> dict[int, tuple[Array, Array]]:
    """Queries [T, N, D] and keys [T, K, D] of some layers in a full-precision run over ``tokens`` int32 [T]."""
    wrong = [i for i in layers if not 0 <= i < model.config.num_layers]
    if wrong:
        raise ValueError(f"this model has layers 0 to {model.config.num_layers - 1}, got {wrong}")

    def attend(wanted, q: Array, k: Array, v: Array):
        return causal_attention(q, k, v), (q[0], k[0]) if wanted else None

    tokens = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    wanted = tuple(i in layers for i in range(model.config.num_layers))
    _, caches = model(tokens, positions, wanted, attend)
    return {i: pair for i, pair in enumerate(caches) if pair is not None}


def channel_sensitivity(q: Array, k: Array, config: CacheConfig) -> Array:
    """Mean squared error of the attention logits when one channel of the keys alone is quantized (Figure 2b).

    The mean is over all pairs of a query and a key that the query sees quantized. Channel d's error adds
    q_td (k'_sd - k_sd) / sqrt(D) to the logit of query t and key s, so no logit needs to be computed.

    Args:
        q: [T, N, D]; k: [T, K, D], after rotary embedding.
        config: the cache; with ``boost=0`` channels have 2 bits.

    Returns:
        float32 [N, D].
    """
    t, n, d = q.shape
    error = jnp.square(fake_quantize_keys(k[None], config)[0] - k.astype(jnp.float32))  # zero outside pages
    page = jnp.maximum(jnp.arange(t, dtype=jnp.int32) - config.sink, -1) // config.page
    pages = (t - 1 - config.sink) // config.page  # that some query sees
    if pages < 1:
        raise ValueError(
            f"{t} tokens are too few: no query sees a page of {config.page} after {config.sink} sink tokens"
        )
    # Errors of all pages before the query's own.
    before = jnp.cumsum(jnp.stack([jnp.sum(error[page == p], 0) for p in range(pages)]), 0)  # [pages, K, D]
    seen = jnp.where((page > 0)[:, None, None], before[jnp.clip(page - 1, 0, pages - 1)], 0)  # [T, K, D]
    count = jnp.sum(jnp.maximum(page, 0) * config.page)
    squares = jnp.square(q.astype(jnp.float32)) * jnp.repeat(seen, n // k.shape[1], axis=1)
    return jnp.sum(squares, 0) / (d * count.astype(jnp.float32))
