"""The steps of inference as pure functions: prefill a prompt, decode a token. Jit them with the state donated.

fm = functional(model)
state = init_state("kitty_pro", fm.config, batch=2, capacity=1024)
start = jax.jit(prefill, static_argnames=("fresh",), donate_argnums=1)
logits, state = start(fm, state, tokens, lengths, fresh=True)
logits, state = jax.jit(decode_step, donate_argnums=1)(fm, state, next_tokens)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kitty_jax.attention import Step, attend_chunk, attend_fresh, attend_token
from kitty_jax.pallas_kernels.implementation import Implementation
from kitty_jax.state import KVState
from kitty_jax.update import flush, reserve


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model split into structure (static) and parameters (leaves): an ordinary argument of a jitted function."""

    params: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    config: Any = dataclasses.field(metadata={"static": True})

    def merge(self):
        """The NNX module."""
        return nnx.merge(self.graphdef, self.params)


def functional(model) -> FunctionalModel:
    """Splits an NNX model; a :class:`FunctionalModel` is returned as it is. The parameters are shared, not copied."""
    if isinstance(model, FunctionalModel):
        return model
    graphdef, params = nnx.split(model)
    return FunctionalModel(params, graphdef, model.config)


def prefill(
    model: FunctionalModel,
    state: KVState,
    tokens: Array,
    lengths: Array,
    *,
    fresh: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Array, KVState]:
    """Runs a chunk of prompt tokens and caches them.

    Args:
        model: from :func:`functional`.
        state: empty or not: with tokens cached already, the chunk is appended to them (multi-turn chat, chunked
            prefill).
        tokens: int32 [B, T], right-padded.
        lengths: int32 [B], real tokens of each row, 0 to T; rows with 0 leave their sequence as it is.
        fresh: promise that every sequence with tokens here is empty; attention is then plain causal (flash) attention.
            Static.
        implementation: for the operations on pages. Static.

    Returns:
        (logits float32 [B, V] of each row's last real token, state). A sequence that the pool or the capacity cannot
        hold is left as it was and marked in ``state.exhausted``; its logits mean nothing, as do those of rows of
        length 0.
    """
    before = state.lengths
    state, num_new = reserve(state, lengths)
    attend = attend_fresh if fresh else attend_chunk
    hidden, state = _forward(model, state, tokens, before, num_new, attend, implementation)
    last = jnp.clip(lengths - 1, 0, tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.merge().logits(hidden), state


def decode_step(
    model: FunctionalModel,
    state: KVState,
    tokens: Array,
    active: Array | None = None,
    *,
    implementation: Implementation = "auto",
) -> tuple[Array, KVState]:
    """Runs one token per sequence: caches it, attends, and quantizes the pages it fills.

    Args:
        model: from :func:`functional`.
        state: the cache so far.
        tokens: int32 [B].
        active: bool [B], sequences to advance; all by default. The others keep their cache, and their logits mean
            nothing.
        implementation: for the operations on pages. Static.

    Returns:
        (logits float32 [B, V], state); see :func:`prefill` for ``state.exhausted``.
    """
    before = state.lengths
    num_new = jnp.ones_like(before) if active is None else active.astype(jnp.int32)
    state, num_new = reserve(state, num_new)
    hidden, state = _forward(model, state, tokens[:, None], before, num_new, attend_token, implementation)
    state = flush(state, before, implementation, after=hidden)
    return model.merge().logits(hidden[:, 0]), state


def _forward(model, state: KVState, tokens, before, num_new, attend, implementation) -> tuple[Array, KVState]:
    step = Step(before, num_new, state.page_table, implementation)
    positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, layers = model.merge()(tokens, positions, state.layers, functools.partial(attend, step))
    return hidden, dataclasses.replace(state, layers=tuple(layers), lengths=before + num_new)
