"""Our side of bench_generate.py: one cache in a process of its own. Prints rows; see bench_generate_common.py.

States of a given length are made on the device and not by running text: pages are quantized random numbers, buffers are
random, and the lengths are set. One compiled loop of decode steps, its number of steps a run-time value, serves all
lengths of a capacity, as the loop of ``generate`` does.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.state import KVState, init_state
from kitty_jax.cache.steps import FunctionalModel, decode_step, functional, prefill
from kitty_jax.inference.memory_plan import Cache, KVPlan
from kitty_jax.inference.prompt_steps import plan_prefill
from kitty_jax.models.registry import config_from_hf, random_model
from scripts.bench_generate_common import Request, in_order, run_child, spread
from scripts.bench_state import random_state


def measure(request: Request) -> Iterator[dict[str, Any]]:
    """All phases of a request, as rows."""
    config = config_from_hf(request.model)
    device = jax.devices()[0]
    yield {"kind": "start", "device": device.device_kind, "jax": jax.__version__}
    model = None
    for phase in request.phases:
        layers = (request.equal_layers if phase == "equal" else None) or config.num_layers
        if model is None or model.config.num_layers != layers:
            model = None  # its memory is needed
            model = functional(random_model(dataclasses.replace(config, num_layers=layers)))
            jax.block_until_ready(model.params)
        rows = (_generate if phase == "generate" else _equal)(request, model)
        for row in rows:
            yield {"phase": phase, "layers": layers, **row}
            if row.get("fits") is False:
                return  # the peak of a process never falls: a smaller batch needs a new one


def _generate(request: Request, model: FunctionalModel) -> Iterator[dict[str, Any]]:
    """The whole generation at its largest batch, or at a given one."""
    cache, capacity = caches_from_spec(request.method), request.capacity
    memory = {"budget": request.budget, "weights": model.params, "reserve": request.reserve}
    if request.batch is None:
        plan = KVPlan.for_budget(model.config, cache, length=capacity, **memory)
    else:
        plan = KVPlan.for_batch(model.config, cache, batch=request.batch, length=capacity, **memory)
    yield {
        "kind": "plan",
        "batch": plan.batch,
        "weights_bytes": plan.weights,
        "cache_bytes": plan.parts["total"],
        "sequence_bytes": plan.per_sequence["total"],
        "budget_bytes": plan.budget,
    }
    loop = Loop(model, cache, plan.batch, capacity)
    yield {**loop.compile(), "batch": plan.batch}
    prompts = Prompts(loop, request.prompt, request.prefill_tokens) if request.prefill else None
    if prompts:
        yield {**prompts.compile(), "batch": plan.batch}
    loop.fill()
    if prompts:
        yield {**prompts.run(min(request.repeats, 3)), "batch": plan.batch, **_peak("peak_bytes")}
    for turn, length in enumerate(in_order(request.lengths, capacity - request.steps)):
        row = loop.sample(length, request.steps, request.repeats)
        if turn == 0:
            yield _memory_row(plan)
        yield row


def _equal(request: Request, model: FunctionalModel) -> Iterator[dict[str, Any]]:
    """Steps at a batch that all methods share."""
    cache, batch = caches_from_spec(request.method), request.equal_batch
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    fitting = []  # the budget is not asked here: what fits the device is compared
    for length in sorted(request.equal_lengths):
        capacity = length + request.steps
        plan = KVPlan.for_batch(
            model.config, cache, batch=batch, length=capacity, budget=limit, weights=model.params, reserve=0.04
        )
        if plan.fits:
            fitting.append(length)
        else:
            yield {"kind": "skipped", "batch": batch, "length": length, "why": f"does not fit: {-plan.free} bytes more"}
    groups = [[n] for n in fitting] if request.equal_exact else [fitting][: len(fitting)]
    for lengths in groups:
        loop = Loop(model, cache, batch, max(lengths) + request.steps)
        yield {**loop.compile(), "batch": batch}
        loop.fill()
        for length in lengths:
            yield loop.sample(length, request.steps, request.repeats)


def _peak(name: str) -> dict[str, int]:
    """The most memory that this process has ever held; nothing where the device does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return {name: stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


def _memory_row(plan: KVPlan) -> dict[str, Any]:
    row = {"kind": "memory", "batch": plan.batch, "budget_bytes": plan.budget, **_peak("peak_bytes")}
    if "peak_bytes" in row:
        row["beyond_bytes"] = row["peak_bytes"] - plan.weights - plan.parts["total"]
        row["fits"] = row["peak_bytes"] <= plan.budget
    return row


@functools.partial(jax.jit, donate_argnums=1)
def _steps(model: FunctionalModel, state: KVState, tokens: jax.Array, steps: jax.Array):
    """``steps`` greedy decode steps of all sequences: (state, tokens int32 [B], their logits float32 [B])."""

    def body(_, carry):
        state, tokens, _ = carry
        logits, state = decode_step(model, state, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return state, tokens, jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]

    return jax.lax.fori_loop(0, steps, body, (state, tokens, jnp.zeros(tokens.shape, jnp.float32)))


class Loop:
    """Compiled decode steps over one state of ``batch`` sequences of up to ``capacity`` tokens."""

    def __init__(self, model: FunctionalModel, cache: Cache, batch: int, capacity: int):
        self.model, self.batch, self.capacity = model, batch, capacity
        self.configs = layer_configs(cache, model.config.num_layers)
        self.make = functools.partial(init_state, cache, model.config, batch=batch, capacity=capacity)
        self.tokens = jax.random.randint(jax.random.key(1), (batch,), 0, model.config.vocab_size, jnp.int32)
        self.state = jax.eval_shape(self.make)

    def compile(self) -> dict[str, Any]:
        """Compiles the loop; the row says how long each stage took and what XLA wants as workspace."""
        row, self.run = compile_row("decode loop", _steps, self.model, self.state, self.tokens, np.int32(0))
        return row

    def fill(self) -> None:
        """Makes the state, every page and every buffer random."""
        self.state = random_state(self.make)
        self.window(self.capacity - 1, 1)
        self.overhead = spread(self.window(0, 0) for _ in range(5))[0]

    def window(self, start: int, steps: int) -> float:
        """Seconds of ``steps`` steps from ``start`` cached tokens on."""
        self.state = dataclasses.replace(self.state, lengths=jnp.full((self.batch,), start, jnp.int32))
        jax.block_until_ready((self.state, self.tokens))
        begin = time.perf_counter()
        self.state, self.tokens, logits = self.run(self.model, self.state, self.tokens, np.int32(steps))
        jax.block_until_ready(logits)
        seconds = time.perf_counter() - begin
        if not np.isfinite(logits).all() or np.asarray(self.state.exhausted).any():
            raise RuntimeError("a step gave logits that are not finite, or ran out of cache: nothing was measured")
        return seconds

    def sample(self, length: int, steps: int, repeats: int) -> dict[str, Any]:
        """A step near ``length`` cached tokens. Steps that quantize a page come once in a page's worth of steps; they
        are timed by themselves and spread over the others."""
        start = self.quiet_start(min(length, self.capacity - steps), steps)
        median, low, high = spread(self._windows(start, steps, repeats))
        row = {"kind": "sample", "batch": self.batch, "wanted": length, "length": start + steps / 2}
        row |= {"steps": steps, "repeats": repeats}
        row |= {"base_s": median / steps, "low_s": low / steps, "high_s": high / steps, "flush_s": 0.0}
        due = self.flush_start(start, steps)
        if due is not None:
            row["flush_s"] = max(0.0, spread(self._windows(due, steps, min(repeats, 3)))[0] - median)
        page = max([c.page for c in self.configs if c.quantized], default=1)
        return row | {"step_s": row["base_s"] + row["flush_s"] * len(self._residues()) / page}

    def _windows(self, start: int, steps: int, repeats: int) -> list[float]:
        self.window(start, steps)
        return [self.window(start, steps) - self.overhead for _ in range(repeats)]

    def _residues(self) -> set[int]:
        """Lengths, modulo the page, at which a step quantizes pages of keys or of values."""
        quantized = [c for c in self.configs if c.quantized]
        return {(c.sink + more) % c.page for c in quantized for more in (0, c.window)}

    def flushes(self, start: int, steps: int) -> int:
        """How many of the steps from ``start`` on quantize pages."""
        config = next((c for c in self.configs if c.quantized), CacheConfig.kitty())
        residues = self._residues()
        first = config.sink + config.page
        return sum(n >= first and n % config.page in residues for n in range(start + 1, start + steps + 1))

    def quiet_start(self, start: int, steps: int) -> int:
        """The last start up to ``start`` of a window that quantizes nothing; ``start`` if there is none near."""
        near = range(start, max(start - 256, -1), -1)
        return next((s for s in near if not self.flushes(s, steps)), start)

    def flush_start(self, start: int, steps: int) -> int | None:
        """The start nearest to ``start`` of a window with one step that quantizes; None if the capacity has none."""
        near = sorted(range(max(0, start - 256), self.capacity - steps + 1), key=lambda s: abs(s - start))
        return next((s for s in near if self.flushes(s, steps) == 1), None)


class Prompts:
    """Prompt steps of all sequences of a loop's state, as ``generate`` cuts them."""

    def __init__(self, loop: Loop, length: int, budget: int):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, loop.model.config.vocab_size, (loop.batch, length)).astype(np.int32)
        self.loop, self.length = loop, length
        self.slices = plan_prefill(list(ids), range(loop.batch), batch=loop.batch, budget=budget)
        self.run_slice = {}

    def compile(self) -> dict[str, Any]:
        """Compiles a program for each shape of step (one, mostly)."""
        step = jax.jit(prefill, static_argnames=("fresh",), donate_argnums=1)
        total: dict[str, Any] = {}
        for piece in self.slices:
            if self._key(piece) not in self.run_slice:
                arguments = (self.loop.model, self.loop.state, piece.tokens, piece.lengths)
                row, program = compile_row("prompt step", step, *arguments, rows=piece.rows, fresh=piece.fresh)
                self.run_slice[self._key(piece)] = program
                numbers = {k: v for k, v in row.items() if not isinstance(v, str)}
                total = row | {k: v + total.get(k, 0) for k, v in numbers.items()}
        return total

    @staticmethod
    def _key(piece) -> tuple:
        return piece.tokens.shape, piece.rows is None, piece.fresh

    def run(self, repeats: int) -> dict[str, Any]:
        """Times the prompts of the whole batch."""
        median, low, high = spread([self._once() for _ in range(repeats + 1)][1:])
        tokens = self.loop.batch * self.length
        return {"kind": "prefill", "seconds": median, "low_s": low, "high_s": high, "tokens": tokens}

    def _once(self) -> float:
        loop = self.loop
        state = dataclasses.replace(loop.state, lengths=jnp.zeros((loop.batch,), jnp.int32))
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for piece in self.slices:
            run = self.run_slice[self._key(piece)]
            logits, state = run(loop.model, state, piece.tokens, piece.lengths, rows=piece.rows)
        jax.block_until_ready(logits)
        loop.state = state
        return time.perf_counter() - begin


def compile_row(what: str, function, *arguments, **keywords) -> tuple[dict[str, Any], Any]:
    """(row, executable): the stages of compiling a jitted function, in seconds."""
    times = [time.perf_counter()]
    traced = function.trace(*arguments, **keywords)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    names = ("trace_s", "lower_s", "compile_s")
    row = {"kind": "compile", "what": what, **dict(zip(names, np.diff(times).tolist(), strict=True))}
    analysis = compiled.memory_analysis()
    return row | ({"temp_bytes": analysis.temp_size_in_bytes} if analysis else {}), compiled


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # a cold start is one
    sys.exit(run_child(measure, out_of_memory))
