"""Decode steps over a random cache, timed at any length, and prompt steps: what the benchmarks of models share.

One compiled loop of decode steps, its number of steps a run-time value, serves all lengths of a capacity, as the loop
of ``generate`` does. A state of a given length is not made by running text: it is random, and its lengths are set.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.state import KVState, init_state
from kitty_jax.cache.steps import FunctionalModel, decode_step, prefill
from kitty_jax.inference.prompt_steps import prompt_steps
from scripts.bench_data import random_state
from scripts.bench_timing import Time

NEAR = 256  # tokens by which a window may be moved; more than any page


@functools.partial(jax.jit, donate_argnums=1)
def _steps(model: FunctionalModel, state: KVState, tokens: jax.Array, steps: jax.Array):
    """``steps`` greedy decode steps of all sequences: (state, tokens int32 [B], their logits float32 [B])."""

    def body(_, carry):
        state, tokens, _ = carry
        logits, state = decode_step(model, state, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return state, tokens, jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]

    return jax.lax.fori_loop(0, steps, body, (state, tokens, jnp.zeros(tokens.shape, jnp.float32)))


class DecodeLoop:
    """Compiled decode steps over one state of ``batch`` sequences of up to ``capacity`` tokens.

    Call :meth:`compile` and :meth:`fill` before anything is timed; on a mesh in the other order, as the state's own
    shardings are compiled for.
    """

    def __init__(
        self,
        model: FunctionalModel,
        cache: CacheConfig | tuple[CacheConfig, ...],
        batch: int,
        capacity: int,
        mesh: Mesh | None = None,
    ):
        self.model, self.batch, self.capacity = model, batch, capacity
        self.configs = layer_configs(cache, model.config.num_layers)
        self._make = functools.partial(init_state, cache, model.config, batch=batch, capacity=capacity, mesh=mesh)
        self.tokens = jax.random.randint(jax.random.key(1), (batch,), 0, model.config.vocab_size, jnp.int32)
        self.state = jax.eval_shape(self._make)

    def compile(self) -> dict[str, Any]:
        """Compiles the loop; the row says how long each stage took and what XLA wants as workspace."""
        row, self._run = compile_row("decode loop", _steps, self.model, self.state, self.tokens, np.int32(0))
        return row

    def fill(self) -> None:
        """Makes the state, every page and every buffer random."""
        self.state = random_state(self._make)

    @functools.cached_property
    def overhead(self) -> float:
        """Seconds of a window without steps."""
        self.window(self.capacity - 1, 1)
        return Time.of(self.window(0, 0) for _ in range(5)).median

    def window(self, start: int, steps: int) -> float:
        """Seconds of ``steps`` steps from ``start`` cached tokens on.

        Raises:
            RuntimeError: logits are not finite, or a sequence ran out of cache.
        """
        lengths = jax.device_put(np.full(self.batch, start, np.int32), self.state.lengths.sharding)
        self.state = dataclasses.replace(self.state, lengths=lengths)
        jax.block_until_ready((self.state, self.tokens))
        begin = time.perf_counter()
        self.state, self.tokens, logits = self._run(self.model, self.state, self.tokens, np.int32(steps))
        jax.block_until_ready(logits)
        seconds = time.perf_counter() - begin
        if not np.isfinite(logits).all() or np.asarray(self.state.exhausted).any():
            raise RuntimeError("a step gave logits that are not finite, or ran out of cache: nothing was measured")
        return seconds

    def windows(self, start: int, steps: int, repeats: int) -> Time:
        """Seconds of windows, after one that is not counted."""
        overhead = self.overhead
        self.window(start, steps)
        return Time.of(self.window(start, steps) - overhead for _ in range(repeats))

    def sample(self, length: int, steps: int, repeats: int) -> dict[str, Any]:
        """A step near ``length`` cached tokens, as a row. Steps that quantize a page come once in a page's worth of
        steps; they are timed by themselves and spread over the others."""
        start = self.quiet_start(min(length, self.capacity - steps), steps)
        quiet = self.windows(start, steps, repeats)
        due = self.flush_start(start, steps)
        flush = 0.0 if due is None else max(0.0, self.windows(due, steps, min(repeats, 3)).median - quiet.median)
        page = max([c.page for c in self.configs if c.quantized], default=1)
        base, low, high = (seconds / steps for seconds in quiet)
        row = {"kind": "sample", "batch": self.batch, "wanted": length, "length": start + steps / 2, "base_s": base}
        step = base + flush * len(self._residues) / page
        return row | {"low_s": low, "high_s": high, "flush_s": flush, "step_s": step}

    @functools.cached_property
    def _residues(self) -> set[int]:
        """Lengths, modulo the page, at which a step quantizes pages of keys or of values."""
        quantized = [c for c in self.configs if c.quantized]
        return {(c.sink + more) % c.page for c in quantized for more in (0, c.window)}

    def flushes(self, start: int, steps: int) -> int:
        """How many of the steps from ``start`` on quantize pages."""
        config = next((c for c in self.configs if c.quantized), None)
        if config is None:
            return 0
        ends = range(max(start + 1, config.sink + config.page), start + steps + 1)
        return sum(n % config.page in self._residues for n in ends)

    def quiet_start(self, start: int, steps: int) -> int:
        """The last start up to ``start`` of a window that quantizes nothing; ``start`` if there is none near."""
        near = range(start, max(start - NEAR, -1), -1)
        return next((s for s in near if not self.flushes(s, steps)), start)

    def flush_start(self, start: int, steps: int) -> int | None:
        """The start nearest to ``start`` of a window with one step that quantizes; None if the capacity has none."""
        near = sorted(range(max(0, start - NEAR), self.capacity - steps + 1), key=lambda s: abs(s - start))
        return next((s for s in near if self.flushes(s, steps) == 1), None)


class Prompts:
    """Prompt steps of all sequences of a loop's state, as ``generate`` cuts them."""

    def __init__(self, loop: DecodeLoop, length: int, budget: int):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, loop.model.config.vocab_size, (loop.batch, length)).astype(np.int32)
        self.loop, self.tokens = loop, ids.size
        self.steps = prompt_steps(list(ids), range(loop.batch), batch=loop.batch, budget=budget)
        self._programs = {}

    def compile(self) -> Iterator[dict[str, Any]]:
        """Compiles a program for each shape of step (one, mostly); a row for each."""
        jitted = jax.jit(prefill, static_argnames=("fresh",), donate_argnums=1)
        for step in self.steps:
            if (key := _shape_key(step)) not in self._programs:
                arguments = (self.loop.model, self.loop.state, step.tokens, step.lengths)
                options = {"rows": step.rows, "fresh": step.fresh}
                row, self._programs[key] = compile_row("prompt step", jitted, *arguments, **options)
                yield row

    def sample(self, repeats: int) -> dict[str, Any]:
        """Times the prompts of the whole batch."""
        self._once()
        median, low, high = Time.of(self._once() for _ in range(repeats))
        return {"kind": "prefill", "seconds": median, "low_s": low, "high_s": high, "tokens": self.tokens}

    def _once(self) -> float:
        loop = self.loop
        state = dataclasses.replace(loop.state, lengths=jnp.zeros((loop.batch,), jnp.int32))
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for step in self.steps:
            program = self._programs[_shape_key(step)]
            logits, state = program(loop.model, state, step.tokens, step.lengths, rows=step.rows)
        jax.block_until_ready(logits)
        loop.state = state
        return time.perf_counter() - begin


def _shape_key(step) -> tuple:
    return step.tokens.shape, step.rows is None, step.fresh


def compile_row(what: str, function, *arguments, **keywords) -> tuple[dict[str, Any], Any]:
    """(row, executable): the stages of compiling a jitted function, in seconds, and its workspace in bytes."""
    times = [time.perf_counter()]
    traced = function.trace(*arguments, **keywords)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    row = {"kind": "compile", "what": what}
    row |= dict(zip(("trace_s", "lower_s", "compile_s"), np.diff(times).tolist(), strict=True))
    analysis = compiled.memory_analysis()
    return row | ({"temp_bytes": analysis.temp_size_in_bytes} if analysis else {}), compiled
