"""Choosing channels, and how many a layer boosts, once from a text instead of page by page.

    scores = key_scores(model, tokens, cache)                       # one pass in full precision
    caches = with_lists(cache, scores)                              # a config per layer with a fixed list per KV head
    boosts = allocate(layer_costs(model, tokens, cache, options), options, budget=0.125)
    caches = with_boosts(cache, boosts)                             # more channels where the error costs more

A config per layer goes wherever a cache does: ``generate``, ``init_state``, the simulation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.cache.query_statistic import squared_queries
from kitty_jax.pallas_kernels.quantize import channel_scores
from kitty_jax.research.fake_quantize import split_pages
from kitty_jax.research.metrics import START, attention_errors
from kitty_jax.research.scoring import compare, hidden_states


def key_scores(model, tokens: Array, cache: CacheConfig) -> np.ndarray:
    """What each key channel's quantization costs on a text: range times root mean square of the queries.

    Args:
        model: a decoder of this project.
        tokens: int32 [T], a text.
        cache: a quantized cache, for S and G.

    Returns:
        float32 [L, K, D], the mean over the text's pages; the same number that ``selection="sensitivity"`` ranks the
        channels of one page by.

    Raises:
        ValueError: the text does not fill a page.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape[0] < cache.sink + cache.page:
        raise ValueError(
            f"calibration needs a page: {cache.sink + cache.page} tokens or more of text, got {tokens.shape[0]}"
        )
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    attend = functools.partial(_score_attend, cache.sink, cache.page)
    _, scores = model(tokens[None], positions, (None,) * model.config.num_layers, attend)
    return np.stack([np.asarray(x) for x in scores])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score_attend(sink: int, page: int, cache, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    squares = jnp.mean(split_pages(squared_queries(q, k.shape[2]), sink, page), axis=-2)  # [1, pages, K, D]
    scores = channel_scores(split_pages(k, sink, page), "range") * jnp.sqrt(squares)
    return causal_attention(q, k, v), jnp.mean(scores, axis=(0, 1))


def with_lists(cache: CacheConfig | Sequence[CacheConfig], scores: np.ndarray) -> tuple[CacheConfig, ...]:
    """A config per layer that boosts the channels of highest score, a list per KV head. scores: [L, K, D]."""
    caches = (cache,) * len(scores) if isinstance(cache, CacheConfig) else tuple(cache)
    out = []
    for config, rows in zip(caches, scores, strict=True):
        count = config.page_format(rows.shape[-1]).boosted
        best = np.sort(np.argsort(-rows, axis=-1, kind="stable")[:, :count], axis=-1)
        out.append(dataclasses.replace(config, selection=tuple(map(tuple, best.tolist()))) if count else config)
    return tuple(out)


def with_boosts(cache: CacheConfig, boosts: Sequence[float]) -> tuple[CacheConfig, ...]:
    """A config per layer with that layer's boost."""
    return tuple(dataclasses.replace(cache, boost=float(boost)) for boost in boosts)


def layer_costs(model, tokens: Array, cache: CacheConfig, boosts: Sequence[float], *, start: int = START) -> np.ndarray:
    """What each layer's quantization costs, by the boost it gets: [L, options].

    The squared error of the attention output (relative, every layer fed the full-precision run's inputs) at each boost,
    times a weight per layer: the KL divergence of the whole model when that layer alone is cached with the cache's own
    boost, over its squared error then. That is a pass of the model per layer.

    Args:
        tokens: int32 [T], more than ``start``.
        boosts: fractions of the channels, the options.
        start: first position of the averages.

    Raises:
        ValueError: the text is so short that no position from ``start`` on sees a quantized page.
    """
    tokens, layers = jnp.asarray(tokens, jnp.int32), model.config.num_layers
    if tokens.shape[0] <= start + 1:
        raise ValueError(f"wanted a text of more than start + 1 = {start + 1} tokens, got {tokens.shape[0]}")
    if tokens.shape[0] <= cache.sink + cache.page:
        raise ValueError(
            f"wanted a text of more than sink + page = {cache.sink + cache.page} tokens, got {tokens.shape[0]}: no "
            "position sees a quantized page, so nothing can be said of its cost"
        )
    full, errors = attention_errors(model, tokens, [*with_boosts(cache, boosts), cache], start)
    squares = np.square(errors.T)  # [L, options + 1]
    for layer in range(layers):
        alone = [CacheConfig.full()] * layers
        alone[layer] = cache
        hidden = hidden_states(model, tokens[None], alone)[0]
        kl, square = compare(model, full, hidden, tokens, start)["kl"], squares[layer, -1]
        squares[layer] *= kl / square if square else 0.0  # a layer without error costs nothing
    return squares[:, :-1]


def allocate(costs: np.ndarray, boosts: Sequence[float], budget: float) -> tuple[float, ...]:
    """The boost of each layer that makes the sum of costs least, while their mean is at most the budget.

    Args:
        costs: [L, options], from :func:`layer_costs`.
        boosts: the options, fractions from 0 to 1, in any order.
        budget: the mean boost to keep to.

    Raises:
        ValueError: no choice keeps to the budget, or the costs are no finite numbers for each layer and option.
    """
    costs, boosts = np.asarray(costs, np.float64), [float(b) for b in boosts]
    if costs.ndim != 2 or not costs.size or costs.shape[1] != len(boosts):
        raise ValueError(f"costs must be [layers, options], with {len(boosts)} options, got shape {costs.shape}")
    if not np.isfinite(costs).all():
        layer, option = np.argwhere(~np.isfinite(costs))[0]
        raise ValueError(
            f"costs must be finite, got {costs[layer, option]} for layer {layer} and boost {boosts[option]}; was the "
            "text long enough, and the model's output finite?"
        )
    if not np.isfinite(budget):
        raise ValueError(f"the mean boost must be a finite number, got {budget}")
    if not all(0 <= b <= 1 for b in boosts):
        raise ValueError(f"boosts are fractions of the channels from 0 to 1, got {boosts}")
    if budget < min(boosts):
        raise ValueError(f"a mean boost of {budget} is less than the least option, {min(boosts)}")
    layers, options = costs.shape
    one_each = scipy.optimize.LinearConstraint(np.kron(np.eye(layers), np.ones(options)), 1, 1)
    within = scipy.optimize.LinearConstraint(np.tile(boosts, layers), -np.inf, budget * layers + 1e-9)
    scaled = costs.ravel() / (np.abs(costs).max() or 1)  # the solver's tolerances are absolute
    found = scipy.optimize.milp(
        scaled, integrality=1, bounds=(0, 1), constraints=[one_each, within], options={"mip_rel_gap": 0}
    )
    return tuple(boosts[i] for i in found.x.reshape(layers, options).argmax(1))
