"""Hidden states of a whole text through the packed cache, for comparison with the one-pass simulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.cache.attention import Step, attend_chunk, attend_token
from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.quantized_cache import flush
from kitty_jax.cache.state import KVState, Layer, init_state
from kitty_jax.cache.steps import FunctionalModel, functional


def packed_hidden(
    model,
    tokens: Array,
    cache: CacheConfig | str | Sequence[CacheConfig],
    *,
    by_token: bool = False,
    inputs: Sequence[tuple[Array, Array, Array]] | None = None,
) -> Array:
    """Teacher-forced pass over ``tokens`` int32 [B, T] with the packed cache: hidden states [B, T, E].

    By default a page of tokens at a time: between two page boundaries nothing is quantized, so every query sees what a
    token-by-token run shows it.

    Args:
        by_token: decode steps, one token at a time.
        inputs: per layer queries, keys and values [B, T, heads, D] to use in place of the model's own. With those of
            another run the two differ by nothing but their caches: a run of its own has other last bits, with them here
            and there another float16 scale, and from there on other keys and values. Not with ``by_token``.

    Raises:
        ValueError: a page at a time is not exact because a window is no multiple of the page.
    """
    fm = functional(model)
    configs = layer_configs(cache, fm.config.num_layers)
    quantized = [c for c in configs if c.quantized]
    uneven = sorted({c.window for c in quantized if c.window % c.page})
    if uneven and not by_token:
        raise ValueError(f"windows {uneven} are no multiples of the page: values age within a page; use by_token=True")
    if inputs is not None and by_token:
        raise ValueError("inputs are for a page at a time, not for by_token=True")
    tokens = jnp.asarray(tokens, jnp.int32)
    length = tokens.shape[1]
    state = init_state(configs, fm.config, batch=tokens.shape[0], capacity=length)
    sink, page = (quantized[0].sink, quantized[0].page) if quantized else (0, 128)
    ends = range(1, length + 1) if by_token else [*range(sink, length, page), length]
    hidden, start = [], 0
    for end in ends:
        if end > start:
            if by_token:
                out, state = _decode(fm, state, tokens[:, start:end])
            else:
                given = None if inputs is None else [[x[:, start:end] for x in layer] for layer in inputs]
                out, state = _append(fm, state, tokens[:, start:end], given)
            hidden.append(out)
            start = end
    return jnp.concatenate(hidden, axis=1)


@functools.partial(jax.jit, donate_argnums=1)
def _decode(fm: FunctionalModel, state: KVState, tokens: Array) -> tuple[Array, KVState]:
    before = state.lengths
    state, hidden = _forward(fm.merge(), state, tokens, attend_token)
    return hidden, flush(state, before)


def _append(fm: FunctionalModel, state: KVState, tokens: Array, inputs: list | None) -> tuple[Array, KVState]:
    """Not jitted as a whole: one compilation of a layer's attention serves all layers."""
    given = iter(inputs or ())

    def attend(step: Step, layer: Layer, q: Array, k: Array, v: Array) -> tuple[Array, Layer]:
        q, k, v = next(given, (q, k, v))
        facts = (step.lengths, step.num_new, step.page_table)
        return _attend_chunk(layer, *facts, q, k, v)

    state, hidden = _forward(fm.merge(), state, tokens, attend)
    return hidden, state


@functools.partial(jax.jit, donate_argnums=0)
def _attend_chunk(layer: Layer, lengths: Array, new: Array, table: Array, q: Array, k: Array, v: Array):
    return attend_chunk(Step(lengths, new, table), layer, q, k, v)


def _forward(model, state: KVState, tokens: Array, attend) -> tuple[KVState, Array]:
    before = state.lengths
    state, new = reserve(state, jnp.full_like(before, tokens.shape[1]))
    positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    step = Step(before, new, state.page_table)
    hidden, layers = model(tokens, positions, state.layers, functools.partial(attend, step))
    return dataclasses.replace(state, layers=tuple(layers), lengths=before + new), hidden
