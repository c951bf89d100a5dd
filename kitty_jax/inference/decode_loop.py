"""The device side of generation: prompt steps and one decode loop, pure functions of a typed state.

:func:`start` runs some prompts, or a part of them, and samples the first token of those that end in it.
:func:`advance` decodes until every sequence has ended or has as many new tokens as asked for. That number is a run-time
value for each sequence, so ``generate``, ``stream`` and the engine are the same compiled loop, called once or often.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from kitty_jax.cache.mesh import constrain_to, partition_specs
from kitty_jax.cache.pool import fork, release
from kitty_jax.cache.state import KVShape, KVState, constrain, init_state
from kitty_jax.cache.steps import FunctionalModel, decode_step, of_rows, prefill
from kitty_jax.inference.sampling import Sampler, row_keys, step_keys
from kitty_jax.pallas_kernels.implementation import Implementation

NO_TOKEN = -1  # fills the places of ``tokens`` after a sequence's end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """A batch in generation.

    Attributes:
        cache: the KV state; it holds every token but each sequence's last.
        last: int32 [B], the last token of each sequence, which the next step feeds.
        tokens: int32 [B, X], the new tokens; -1 where there is none.
        num_new: int32 [B], new tokens of each sequence; 0 until its whole prompt is cached.
        finished: bool [B], an eos was sampled.
        keys: typed PRNG keys [B], one per sequence.
    """

    cache: KVState
    last: Array
    tokens: Array
    num_new: Array
    finished: Array
    keys: Array

    @property
    def active(self) -> Array:
        """bool [B], sequences that have begun and have neither ended nor run out of cache."""
        return (self.num_new > 0) & ~(self.finished | self.cache.exhausted)


def init_sampling(
    cache: tuple,
    shape: KVShape,
    seeds: Array,
    *,
    batch: int,
    capacity: int,
    room: int,
    pool_pages: int | None = None,
    mesh: Mesh | None = None,
) -> SamplingState:
    """A batch before its prompts: an empty cache and ``room`` places for new tokens. ``seeds``: uint32 [B]."""
    return _constrain(
        SamplingState(
            cache=init_state(cache, shape, batch=batch, capacity=capacity, pool_pages=pool_pages, mesh=mesh),
            last=jnp.zeros(batch, jnp.int32),
            tokens=jnp.full((batch, room), NO_TOKEN, jnp.int32),
            num_new=jnp.zeros(batch, jnp.int32),
            finished=jnp.zeros(batch, bool),
            keys=row_keys(seeds),
        )
    )


def _constrain(run: SamplingState) -> SamplingState:
    """On a mesh every array is split over "data" like the cache."""
    if run.cache.mesh is None:
        return run
    arrays = {name: getattr(run, name) for name in ("last", "tokens", "num_new", "finished", "keys")}
    return dataclasses.replace(run, **constrain_to(run.cache.mesh, arrays, partition_specs(arrays)))


def reset(run: SamplingState, done: Array, retry: Array, seeds: Array) -> SamplingState:
    """Empties the sequences where ``done`` bool [B] for new prompts, which draw from ``seeds`` uint32 [B]. Those where
    ``retry`` bool [B] were refused a page and try again; their token of that step was kept."""
    keys = jax.random.wrap_key_data(
        jnp.where(done[:, None], jax.random.key_data(row_keys(seeds)), jax.random.key_data(run.keys)),
        impl="threefry2x32",
    )
    cache = release(run.cache, done)
    return _constrain(
        dataclasses.replace(
            run,
            cache=constrain(dataclasses.replace(cache, exhausted=cache.exhausted & ~retry)),
            tokens=jnp.where(done[:, None], NO_TOKEN, run.tokens),
            num_new=jnp.where(done, 0, run.num_new),
            finished=run.finished & ~done,
            keys=keys,
        )
    )


def start(
    model: FunctionalModel,
    run: SamplingState,
    tokens: Array,
    lengths: Array,
    rows: Array | None,
    ends: Array,
    sampler: Sampler,
    eos: Array,
    *,
    fresh: bool = True,
    copies: int = 1,
    implementation: Implementation = "auto",
) -> SamplingState:
    """Caches tokens int32 [X, T] of prompts and samples the first new token of the prompts that end with them.

    Args:
        model: from :func:`.steps.functional`.
        run: the batch; donate it.
        tokens, lengths, rows: see :func:`.steps.prefill`.
        ends: bool [X], rows whose prompt ends here.
        sampler: see :mod:`.sampling`.
        eos: int32 [E] ids that end a sequence, padded with -1.
        fresh: promise that the rows' sequences are empty. Static.
        copies: samples of each prompt. A prompt's sequence is copied to the ``copies - 1`` after it, and each draws its
            own first token. Static.
        implementation: for the operations on pages. Static.
    """
    # The rest of a prompt of which a piece found no page would stand in its place.
    refused = run.cache.exhausted if rows is None else of_rows(run.cache, run.cache.exhausted, rows)
    lengths = jnp.where(refused, 0, lengths)
    logits, cache = prefill(model, run.cache, tokens, lengths, rows=rows, fresh=fresh, implementation=implementation)
    batch, groups = cache.batch, cache.groups
    own = batch // groups
    rows = jnp.arange(batch, dtype=jnp.int32) % own if rows is None else rows
    group = jnp.arange(rows.shape[0], dtype=jnp.int32) // (rows.shape[0] // groups)
    rows = jnp.where(ends & (rows < own), rows + group * own, batch)  # counted over all groups now
    if copies > 1:
        copy = jnp.tile(jnp.arange(copies, dtype=jnp.int32), rows.shape[0])
        source = jnp.repeat(rows, copies)
        rows = jnp.where(source < batch, source + copy, batch)
        cache = fork(cache, source, jnp.where(copy > 0, rows, batch))
        logits = jnp.repeat(logits, copies, axis=0)
    has_room = ~cache.exhausted.at[rows].get(mode="fill", fill_value=True)
    rows = jnp.where(has_room, rows, batch)
    token = sampler(logits, step_keys(run.keys[jnp.minimum(rows, batch - 1)], jnp.int32(0)))
    ended = jnp.any(token[:, None] == eos, axis=1)
    return _constrain(
        dataclasses.replace(
            run,
            cache=cache,
            last=run.last.at[rows].set(token, mode="drop"),
            tokens=run.tokens.at[rows, 0].set(token, mode="drop"),
            num_new=run.num_new.at[rows].set(1, mode="drop"),
            finished=run.finished.at[rows].set(ended, mode="drop"),
        )
    )


def advance(
    model: FunctionalModel,
    run: SamplingState,
    until: Array,
    stop_on_end: Array,
    sampler: Sampler,
    eos: Array,
    *,
    implementation: Implementation = "auto",
) -> SamplingState:
    """Decodes until each sequence has ``until`` int32 [B] new tokens or has ended.

    ``stop_on_end``: bool [], return as soon as any sequence is done, so that another can take its place.
    """

    def behind(run: SamplingState) -> Array:
        return run.active & (run.num_new < until)

    at_first = jnp.sum(behind(run), dtype=jnp.int32)

    def unfinished(run: SamplingState) -> Array:
        left = jnp.sum(behind(run), dtype=jnp.int32)
        return (left > 0) & ~(stop_on_end & (left < at_first))

    def add_token(run: SamplingState) -> SamplingState:
        logits, cache = decode_step(model, run.cache, run.last, behind(run), implementation=implementation)
        added = behind(run) & ~cache.exhausted
        token = jnp.where(added, sampler(logits, step_keys(run.keys, run.num_new)), run.last)
        place = jnp.where(added, run.num_new, run.tokens.shape[1])
        return _constrain(
            dataclasses.replace(
                run,
                cache=cache,
                last=token,
                tokens=run.tokens.at[jnp.arange(token.shape[0]), place].set(token, mode="drop"),
                num_new=run.num_new + added.astype(jnp.int32),
                finished=run.finished | (added & jnp.any(token[:, None] == eos, axis=1)),
            )
        )

    return jax.lax.while_loop(unfinished, add_token, run)


def progress(run: SamplingState, first: Array, *, size: int) -> tuple[Array, Array]:
    """What the host reads of a running batch: tokens int32 [B, size] from place ``first`` int32 [] or [B] on; bool [B],
    which sequences are active."""
    places = jnp.broadcast_to(first, run.num_new.shape)[:, None] + jnp.arange(size, dtype=jnp.int32)
    rows = jnp.arange(places.shape[0])[:, None]
    return run.tokens.at[rows, places].get(mode="fill", fill_value=NO_TOKEN), run.active


# One jit of each for the whole process: calls with equal shapes share what was compiled.
jit_init = jax.jit(init_sampling, static_argnames=("cache", "shape", "batch", "capacity", "room", "pool_pages", "mesh"))
jit_reset = jax.jit(reset, donate_argnames="run")
jit_start = jax.jit(start, static_argnames=("fresh", "copies", "implementation"), donate_argnames="run")
jit_advance = jax.jit(advance, static_argnames="implementation", donate_argnames="run")
jit_progress = jax.jit(progress, static_argnames="size")
