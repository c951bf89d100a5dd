"""The device side of generation: a prompt step and one decode loop, pure functions of a typed state.

:func:`start` runs the prompts and samples the first token; :func:`advance` decodes until every sequence has ended or a
step limit is reached. The limit is a run-time value, so ``generate`` and ``stream`` are the same compiled loop, called
once or many times.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.implementation import Implementation
from kitty_jax.sampling import Sampler, row_keys, step_keys
from kitty_jax.state import KVShape, KVState, init_state
from kitty_jax.steps import FunctionalModel, decode_step, prefill

NO_TOKEN = -1  # fills the places of ``tokens`` after a sequence's end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """A batch in generation.

    Attributes:
        cache: the KV state; it holds every token but each sequence's last.
        last: int32 [B], the last token of each sequence, which the next step feeds.
        tokens: int32 [B, X], the new tokens; -1 where there is none.
        num_new: int32 [B], new tokens of each sequence.
        finished: bool [B], an eos was sampled.
        step: int32 [], new tokens of the sequences that are still going.
        keys: typed PRNG keys [B], one per sequence.
    """

    cache: KVState
    last: Array
    tokens: Array
    num_new: Array
    finished: Array
    step: Array
    keys: Array

    @property
    def going(self) -> Array:
        """bool [B], sequences that have neither ended nor run out of cache."""
        return ~(self.finished | self.cache.exhausted)


def init_sampling(
    cache: tuple, shape: KVShape, seeds: Array, *, batch: int, capacity: int, room: int, pool_pages: int | None = None
) -> SamplingState:
    """A batch before its prompts: an empty cache and ``room`` places for new tokens. ``seeds``: uint32 [B]."""
    return SamplingState(
        cache=init_state(cache, shape, batch=batch, capacity=capacity, pool_pages=pool_pages),
        last=jnp.zeros(batch, jnp.int32),
        tokens=jnp.full((batch, room), NO_TOKEN, jnp.int32),
        num_new=jnp.zeros(batch, jnp.int32),
        finished=jnp.zeros(batch, bool),
        step=jnp.zeros((), jnp.int32),
        keys=row_keys(seeds),
    )


def start(
    model: FunctionalModel,
    run: SamplingState,
    tokens: Array,
    lengths: Array,
    sampler: Sampler,
    eos: Array,
    *,
    implementation: Implementation = "auto",
) -> SamplingState:
    """Caches the prompts int32 [B, T] of ``lengths`` int32 [B] and samples the first new token.

    ``eos``: int32 [E] ids that end a sequence, padded with -1.
    """
    logits, cache = prefill(model, run.cache, tokens, lengths, fresh=True, implementation=implementation)
    return _sample(run, cache, logits, run.going, sampler, eos)


def advance(
    model: FunctionalModel,
    run: SamplingState,
    limit: Array,
    sampler: Sampler,
    eos: Array,
    *,
    implementation: Implementation = "auto",
) -> SamplingState:
    """Decodes until the sequences have ``limit`` int32 [] new tokens or have all ended."""

    def unfinished(run: SamplingState) -> Array:
        return (run.step < limit) & jnp.any(run.going)

    def body(run: SamplingState) -> SamplingState:
        logits, cache = decode_step(model, run.cache, run.last, run.going, implementation=implementation)
        return _sample(run, cache, logits, run.going, sampler, eos)

    return jax.lax.while_loop(unfinished, body, run)


def _sample(run: SamplingState, cache: KVState, logits: Array, active: Array, sampler: Sampler, eos: Array):
    """Adds one token to the sequences that were ``active`` and whose last token went into the cache."""
    active = active & ~cache.exhausted
    token = jnp.where(active, sampler(logits, step_keys(run.keys, run.step)), run.last)
    column = jnp.where(active, token, NO_TOKEN)[:, None]
    return SamplingState(
        cache=cache,
        last=token,
        tokens=jax.lax.dynamic_update_slice_in_dim(run.tokens, column, run.step, axis=1),
        num_new=run.num_new + active.astype(jnp.int32),
        finished=run.finished | (active & jnp.any(token[:, None] == eos, axis=1)),
        step=run.step + 1,
        keys=run.keys,
    )


def progress(run: SamplingState, first: Array, *, size: int) -> tuple[Array, Array]:
    """What the host reads of a running batch: tokens int32 [B, size] from step ``first`` on; whether any is going."""
    return jax.lax.dynamic_slice_in_dim(run.tokens, first, size, axis=1), jnp.any(run.going)


# One jit of each for the whole process: calls with equal shapes share what was compiled.
jit_init = jax.jit(init_sampling, static_argnames=("cache", "shape", "batch", "capacity", "room", "pool_pages"))
jit_start = jax.jit(start, static_argnames="implementation", donate_argnames="run")
jit_advance = jax.jit(advance, static_argnames="implementation", donate_argnames="run")
jit_progress = jax.jit(progress, static_argnames="size")
