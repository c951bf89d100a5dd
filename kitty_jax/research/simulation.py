"""One-pass simulation: a whole text in one forward pass, every query seeing what a token-by-token run would show it.

    caches = simulated_caches("kitty", model.config.num_layers)
    hidden, _ = model(tokens, positions, caches, simulated_attention)

A step of the cache inserts its token, attends, and then quantizes (DESIGN section 1). With u = t - S tokens past the
sink, the query at position t therefore sees key page p quantized iff p < u // G, and value page p quantized iff
p < (u - R) // G; all else, its own key and value included, it sees in full precision. So all queries of one page see
the same keys, and the text is attended one page of queries at a time over one mixed set of keys.

Where the authors' own simulation times things otherwise is listed in :mod:`.oracle`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.pallas_kernels.partials import MASKED
from kitty_jax.research.fake_quantize import fake_quantize_keys, fake_quantize_values

KEY_SPANS = 4  # a long text is cut into this many spans of queries; each attends no further than its own end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SimulatedLayer:
    """What :func:`simulated_attention` must know of a layer.

    Attributes:
        config: its cache, static.
        index: its number, int32 [].
        channels: int32 [K or 1, C], a fixed list of boosted channels as data: static lists, another for each layer,
            would compile each layer's attention on its own. ``config`` then has none.
    """

    config: CacheConfig = dataclasses.field(metadata={"static": True})
    index: Array
    channels: Array | None = None


def simulated_caches(cache: CacheConfig | str | Sequence[CacheConfig], num_layers: int) -> tuple[SimulatedLayer, ...]:
    """The ``caches`` argument of a model for a config, a name, or one config per layer."""
    out = []
    for index, config in enumerate(layer_configs(cache, num_layers)):
        lists = config.channel_lists() if config.quantized else ()
        if lists:
            config = dataclasses.replace(config, selection="magnitude")
        out.append(SimulatedLayer(config, jnp.int32(index), jnp.array(lists, jnp.int32) if lists else None))
    return tuple(out)


def simulated_attention(cache: SimulatedLayer, q: Array, k: Array, v: Array) -> tuple[Array, SimulatedLayer]:
    """Causal attention of a text over its own simulated cache, differentiable (straight-through).

    Args:
        cache: from :func:`simulated_caches`; returned as it is.
        q: [B, T, N, D]; k, v: [B, T, K, D], from the first token of the text on. Padding may follow, never precede.

    Returns:
        ([B, T, N, D] in q's dtype, cache).
    """
    if not cache.config.quantized:
        return causal_attention(q, k, v), cache
    quantized_k = fake_quantize_keys(k, cache.config, layer=cache.index, queries=q, channels=cache.channels)
    quantized_v = fake_quantize_values(v, cache.config)
    return _timed_attention(q, k, v, quantized_k, quantized_v, cache.config), cache


def _timed_attention(
    q: Array, k: Array, v: Array, quantized_k: Array, quantized_v: Array, config: CacheConfig
) -> Array:
    """Causal attention in which the cache's timing decides, per query and key, between full-precision and quantized.

    Args:
        q: [B, T, N, D].
        k, v: [B, T, K, D], full precision.
        quantized_k, quantized_v: [B, T, K, D], as pages give them back; equal to k, v where no page is.
        config: a quantized cache, for S, G and R.

    Returns:
        [B, T, N, D] in q's dtype.
    """
    b, t, n, d = q.shape
    kv_heads, g = k.shape[2], config.page
    # Pages of queries: token t is row t + front, and the first page of the cache starts at row ``first`` * G.
    front = -config.sink % g
    first, blocks = (config.sink + front) // g, -(-(t + front) // g)

    def rows(x: Array) -> Array:  # [B, T, H, D] -> float32 [B, H, blocks * G, D]
        x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
        return jnp.pad(x, [(0, 0), (0, 0), (front, blocks * g - t - front), (0, 0)])

    keys, values = (rows(k), rows(quantized_k)), (rows(v), rows(quantized_v))
    queries = rows(q).reshape(b, kv_heads, n // kv_heads, blocks, g, d) * d**-0.5
    queries = jnp.moveaxis(queries, 3, 0).reshape(blocks, b, kv_heads, -1, d)  # [blocks, B, K, Q * G, D]

    def attend_block(block: Array, q: Array, keys, values) -> Array:
        row = jnp.arange(keys[0].shape[2], dtype=jnp.int32)
        page = row // g - first
        own = block - first
        mixed = jnp.where((page < own)[:, None], keys[1], keys[0])
        logits = jnp.einsum("bkrd,bkxd->bkrx", q, mixed, precision="highest")
        at = block * g + jnp.tile(jnp.arange(g, dtype=jnp.int32), n // kv_heads)  # the row of each query
        seen = (row >= front) & (row <= at[:, None])
        weights = jax.nn.softmax(jnp.where(seen, logits, MASKED), axis=-1)
        if config.window % g == 0:  # all queries of the block have the same value window
            mixed = jnp.where((page < own - config.window // g)[:, None], values[1], values[0])
            return jnp.einsum("bkrx,bkxd->bkrd", weights, mixed, precision="highest")
        aged = page < ((at - first * g - config.window) // g)[:, None]  # [Q * G, X]
        recent = jnp.einsum("bkrx,bkxd->bkrd", jnp.where(aged, 0, weights), values[0], precision="highest")
        return recent + jnp.einsum("bkrx,bkxd->bkrd", jnp.where(aged, weights, 0), values[1], precision="highest")

    # Recomputed in the backward pass: the weights of all blocks together would be the whole [T, T] matrix of every
    # head.
    attend_block = jax.checkpoint(attend_block)
    spans = KEY_SPANS if blocks >= 4 * KEY_SPANS else 1
    out, start = [], 0
    for span in range(1, spans + 1):
        end = blocks * span // spans
        upto = [tuple(x[:, :, : end * g] for x in pair) for pair in (keys, values)]
        body = lambda x, upto=upto: attend_block(x[0], x[1], *upto)  # noqa: E731
        out.append(jax.lax.map(body, (jnp.arange(start, end, dtype=jnp.int32), queries[start:end])))
        start = end
    out = jnp.concatenate(out).reshape(blocks, b, kv_heads, n // kv_heads, g, d)
    out = jnp.moveaxis(out, 0, 3).reshape(b, n, blocks * g, d)[:, :, front : front + t]
    return jnp.swapaxes(out, 1, 2).astype(q.dtype)
