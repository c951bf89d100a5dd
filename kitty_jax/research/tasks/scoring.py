"""Teacher-forced log-probabilities of a batch of texts over a cache: in one pass of the simulation, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.steps import FunctionalModel, functional
from kitty_jax.research.packed_scoring import packed_hidden
from kitty_jax.research.simulation import simulated_attention, simulated_caches

SCORINGS = ("simulation", "packed")
_CHUNK = 256  # positions whose logits are in memory at a time


def score(
    model: Any,
    tokens: np.ndarray,
    cache: CacheConfig | str | Sequence[CacheConfig],
    *,
    scoring: str = "simulation",
) -> tuple[np.ndarray, np.ndarray]:
    """What each token of some texts costs, every position seeing the cache as a token-by-token run would.

    Args:
        model: a decoder, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        tokens: int32 [B, T], right-padded; padding changes nothing before it.
        cache: config, name, or one config per layer.
        scoring: "simulation", one pass; or "packed", the packed cache itself, a page of tokens at a time.

    Returns:
        (log-probabilities float32 [B, T - 1] of tokens[:, 1:], bool [B, T - 1] where that token is the most likely).
    """
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    fm = functional(model)
    tokens = jnp.asarray(tokens, jnp.int32)
    if scoring == "simulation":
        log_probs, greedy = _simulated(fm, tokens, simulated_caches(cache, fm.config.num_layers))
    else:
        log_probs, greedy = _targets(fm, packed_hidden(fm, tokens, cache), tokens)
    return np.asarray(log_probs), np.asarray(greedy)


@jax.jit
def _simulated(fm: FunctionalModel, tokens: Array, caches) -> tuple[Array, Array]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = fm.merge()(tokens, positions, caches, simulated_attention)
    return _log_probs(fm, hidden, tokens)


@jax.jit
def _targets(fm: FunctionalModel, hidden: Array, tokens: Array) -> tuple[Array, Array]:
    return _log_probs(fm, hidden, tokens)


def _log_probs(fm: FunctionalModel, hidden: Array, tokens: Array) -> tuple[Array, Array]:
    model = fm.merge()
    count = tokens.shape[1] - 1
    chunks = -(-count // _CHUNK)
    size = -(-count // chunks)

    def split(x: Array) -> Array:  # [B, count, ...] -> [chunks, B, size, ...]
        x = jnp.pad(x, [(0, 0), (0, chunks * size - count), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    def one(x: tuple[Array, Array]) -> tuple[Array, Array]:
        logits, target = jax.nn.log_softmax(model.logits(x[0])), x[1]
        got = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return got, jnp.argmax(logits, axis=-1) == target

    log_probs, greedy = jax.lax.map(one, (split(hidden[:, :-1]), split(tokens[:, 1:])))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(tokens.shape[0], -1)[:, :count]  # noqa: E731
    return join(log_probs), join(greedy)
