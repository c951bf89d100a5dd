"""The steps of inference as pure functions: prefill a prompt, decode a token. Jit them with the state donated.

fm = functional(model)
state = init_state("kitty_pro", fm.config, batch=2, capacity=1024)
start = jax.jit(prefill, static_argnames=("fresh",), donate_argnums=1)
logits, state = start(fm, state, tokens, lengths, fresh=True)
logits, state = jax.jit(decode_step, donate_argnums=1)(fm, state, next_tokens)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kitty_jax.cache.attention import Step, attend_chunk, attend_fresh, attend_token
from kitty_jax.cache.flush import flush
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.state import KVState, constrain
from kitty_jax.pallas_kernels.implementation import Implementation


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
    rows: Array | None = None,
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
        rows: int32 [X], where ``tokens`` [X, T] and ``lengths`` [X] are of some sequences only: which ones, each once.
            A number from B on marks a padding row. On a mesh with several places on "data", X is a multiple of them,
            each place has its equal share of the rows in turn, and sequences are counted within the place's own.
        fresh: promise that every sequence with tokens here is empty; attention is then plain causal (flash) attention.
            Static.
        implementation: for the operations on pages. Static.

    Returns:
        (logits float32 [B, V] of each row's last real token, state). A sequence that the pool or the capacity cannot
        hold is left as it was and marked in ``state.exhausted``; its logits mean nothing, as do those of rows of
        length 0.
    """
    if rows is None:
        before, table = state.lengths, None
        state, num_new = reserve(state, lengths)
    else:
        before = of_rows(state, state.lengths, rows)
        state, granted = reserve(state, _to_sequences(state, lengths, rows))
        num_new, table = of_rows(state, granted, rows), of_rows(state, state.page_table, rows)
    attend = attend_fresh if fresh else attend_chunk
    hidden, state = _forward(model, state, tokens, before, num_new, attend, implementation, rows, table)
    last = jnp.clip(lengths - 1, 0, tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.merge().logits(hidden), state


def of_rows(state: KVState, x: Array, rows: Array) -> Array:
    """Entries of x [B, ...] for rows int32 [X]; zeros for padding rows."""
    x = x.reshape(state.groups, state.batch // state.groups, *x.shape[1:])
    out = jax.vmap(lambda x, r: x.at[r].get(mode="fill", fill_value=0))(x, rows.reshape(state.groups, -1))
    return out.reshape(rows.shape[0], *x.shape[2:])


def _to_sequences(state: KVState, x: Array, rows: Array) -> Array:
    """x [X] of rows int32 [X] as [B]; zero for the sequences that no row is of."""
    groups = state.groups
    zeros = jnp.zeros((groups, state.batch // groups), x.dtype)
    out = jax.vmap(lambda z, x, r: z.at[r].set(x, mode="drop"))(zeros, x.reshape(groups, -1), rows.reshape(groups, -1))
    return out.reshape(-1)


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


def _forward(
    model, state: KVState, tokens, before, num_new, attend, implementation, rows=None, table=None
) -> tuple[Array, KVState]:
    table = state.page_table if table is None else table
    step = Step(before, num_new, table, implementation, rows, state.mesh)
    positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # A pytree, so that the model can pass it into a jit of its own.
    hidden, layers = model.merge()(tokens, positions, state.layers, jax.tree_util.Partial(attend, step))
    added = num_new if rows is None else _to_sequences(state, num_new, rows)
    return hidden, constrain(dataclasses.replace(state, layers=tuple(layers), lengths=state.lengths + added))
