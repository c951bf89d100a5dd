"""Teacher-forced runs of a text over any cache, by the one-pass simulation or by the packed cache itself.

``hidden_states`` runs the model; ``score`` gives the log-probability of every token; ``compare`` holds a cached run
against the full-precision one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.attention import Step, attend_chunk
from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.layer_cache import LayerCache
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.state import init_state
from kitty_jax.cache.steps import functional
from kitty_jax.research.simulation import simulated_attention, simulated_caches

Cache = CacheConfig | str | Sequence[CacheConfig]

SCORINGS = ("simulation", "packed")
CHUNK = 256  # positions whose logits are in memory at a time

# Jitted here, and the model around it not: one compilation serves all layers that share a config, in every pass.
simulate = jax.jit(simulated_attention)


def check_scoring(scoring: str) -> None:
    """Raises a ValueError for anything but "simulation" and "packed"."""
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")


def hidden_states(model: Any, tokens: Array, cache: Cache, *, scoring: str = "simulation") -> Array:
    """Final hidden states [B, T, E] of texts int32 [B, T], every position seeing what a token-by-token run shows it.

    Args:
        model: a decoder, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        tokens: right-padded; padding changes nothing before it.
        cache: config, name, or one config per layer.
        scoring: "simulation", one pass; or "packed", the packed cache itself, a page of tokens at a time: between two
            page boundaries nothing is quantized.

    Raises:
        ValueError: another ``scoring``; or "packed" with a window that is no multiple of the page, so that values age
            within a page.
    """
    check_scoring(scoring)
    fm = functional(model)
    tokens = jnp.asarray(tokens, jnp.int32)
    configs = layer_configs(cache, fm.config.num_layers)
    for config in configs:
        if config.quantized:
            config.page_format(fm.config.head_dim)  # refuses what does not fit the head size
    if scoring == "packed":
        return _packed(fm.merge(), tokens, configs)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return fm.merge()(tokens, positions, simulated_caches(configs, fm.config.num_layers), simulate)[0]


def _packed(model: Any, tokens: Array, configs: Sequence[CacheConfig]) -> Array:
    quantized = [c for c in configs if c.quantized]
    uneven = sorted({c.window for c in quantized if c.window % c.page})
    if uneven:
        raise ValueError(f"windows {uneven} are no multiples of the page: values age within a page; use the simulation")
    batch, length = tokens.shape
    state = init_state(configs, model.config, batch=batch, capacity=length)
    sink, page = (quantized[0].sink, quantized[0].page) if quantized else (0, CHUNK)
    hidden, start = [], 0
    for end in [*range(sink, length, page), length]:
        if end == start:
            continue
        before = state.lengths
        state, new = reserve(state, jnp.full_like(before, end - start))
        positions = before[:, None] + jnp.arange(end - start, dtype=jnp.int32)
        attend = functools.partial(_attend_chunk, before, new, state.page_table)
        out, layers = model(tokens[:, start:end], positions, state.layers, attend)
        state = dataclasses.replace(state, layers=tuple(layers), lengths=before + new)
        hidden.append(out)
        start = end
    return jnp.concatenate(hidden, axis=1)


@functools.partial(jax.jit, donate_argnums=3)
def _attend_chunk(lengths: Array, new: Array, table: Array, layer: LayerCache, q: Array, k: Array, v: Array):
    return attend_chunk(Step(lengths, new, table), layer, q, k, v)


def score(
    model: Any, tokens: np.ndarray, cache: Cache, *, scoring: str = "simulation"
) -> tuple[np.ndarray, np.ndarray]:
    """What each token of some texts costs over a cache. Arguments and errors as :func:`hidden_states`.

    Returns:
        (log-probabilities float32 [B, T - 1] of tokens[:, 1:], bool [B, T - 1] where that token is the most likely).
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    decoder = functional(model).merge()
    hidden = hidden_states(decoder, tokens, cache, scoring=scoring)[:, :-1]
    chunks = [
        _targets(decoder.logits(hidden[:, first : first + CHUNK]), tokens[:, first + 1 : first + CHUNK + 1])
        for first in range(0, hidden.shape[1], CHUNK)
    ]
    log_probs, greedy = (np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True))
    return log_probs, greedy


@jax.jit
def _targets(logits: Array, target: Array) -> tuple[Array, Array]:
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]
    return log_probs, jnp.argmax(logits, axis=-1) == target


def compare(model: Any, full: Array, hidden: Array, tokens: Array, start: int) -> dict[str, float]:
    """``nll``, ``ppl``, ``kl`` and ``top1`` (see :func:`.metrics.evaluate_text`) of a cached run of one text.

    Args:
        full, hidden: final hidden states [T, E] of the full-precision run and the cached one.
        tokens: int32 [T].
        start: first position of ``kl`` and ``top1``.
    """
    count, sums = tokens.shape[0], np.zeros(3)
    following = jnp.append(tokens[1:], jnp.int32(0))
    for first in range(0, count, CHUNK):
        rows = slice(first, first + CHUNK)
        got = model.logits(hidden[rows])
        wanted = got if hidden is full else model.logits(full[rows])
        nll, kl, same = (np.asarray(x, np.float64) for x in _divergence(wanted, got, following[rows]))
        position = first + np.arange(len(nll))
        scored = position >= start
        sums += nll[position < count - 1].sum(), kl[scored].sum(), same[scored].sum()
    nll = sums[0] / (count - 1)
    return {"nll": nll, "ppl": float(np.exp(nll)), "kl": sums[1] / (count - start), "top1": sums[2] / (count - start)}


@jax.jit
def _divergence(wanted: Array, got: Array, target: Array) -> tuple[Array, Array, Array]:
    p, q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(got)
    nll = -jnp.take_along_axis(q, target[:, None], axis=-1)[:, 0]
    return nll, jnp.sum(jnp.exp(p) * (p - q), axis=-1), jnp.argmax(p, -1) == jnp.argmax(q, -1)
