"""Continuous batching: a queue of requests over a fixed number of sequences.

    engine = Engine(model, cache="kitty_pro", slots=64, capacity=4096, eos=tokenizer.eos_token_id)
    for result in engine.run([Request(ids, max_new_tokens=512) for ids in prompts]):
        print(result.tokens)

A finished sequence gives its pages back and the next prompt takes its slot. All of it is the compiled programs of
:mod:`.generate_loop`, so each request gets the tokens that ``generate`` gives it alone, and other requests compile
nothing but prompt steps of a size not met before (:mod:`.prefill_plan`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.mesh import to_host
from kitty_jax.cache.state import KVState, constrain, pages_per_sequence
from kitty_jax.inference.decode_loop import SamplingState, jit_advance, jit_init, jit_progress, jit_start, jit_vacate
from kitty_jax.inference.generate import prepare
from kitty_jax.inference.prompt_steps import PREFILL_TOKENS, PromptSlice, plan_prefill
from kitty_jax.inference.prompts import BUCKET, check_prompts, check_seeds, check_whole
from kitty_jax.inference.sampling import Sampler
from kitty_jax.inference.scheduler import Piece, Request, Schedule
from kitty_jax.pallas_kernels.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """New tokens of a request, the eos included, and why they end: "eos", or "length" for ``max_new_tokens``."""

    tokens: list[int]
    ended: str


def resume(run: SamplingState, rows: Array) -> SamplingState:
    """Lets sequences ``rows`` bool [B] that were refused a page try again; their token of that step was kept."""
    cache = dataclasses.replace(run.cache, exhausted=run.cache.exhausted & ~rows)
    return dataclasses.replace(run, cache=constrain(cache))


jit_resume = jax.jit(resume, donate_argnames="run")


class Engine:
    """Continues any number of prompts, ``slots`` at a time.

    Args:
        model, cache, sampler, eos, mesh, implementation: as in :func:`kitty_jax.generate`.
        slots: B, sequences at a time; a multiple of the mesh's "data" places, each of which keeps its own.
        capacity: most tokens of a sequence, prompt and new ones.
        pool_pages: pages of all slots together; by default each slot owns those of its capacity. With a smaller pool a
            request waits until the pages that it can fill at most are free and promised to no other.
        overcommit: promise a request the pages of its prompt and one more instead. More requests run together; where
            the pool runs out, the youngest goes back to the front of the queue and is run anew. It draws the same
            tokens again, and those that were handed out are not handed out twice.
        prefill_tokens: most prompt tokens in a step, padding included; see :func:`kitty_jax.generate`.
        chunk: steps between two looks at the sequences. While requests wait, the loop also returns when one ends.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: CacheConfig | str | Sequence[CacheConfig] = "kitty_pro",
        slots: int,
        capacity: int,
        pool_pages: int | None = None,
        overcommit: bool = False,
        sampler: Sampler | None = None,
        eos: int | Sequence[int] | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        chunk: int = 16,
        mesh: Mesh | None = None,
        implementation: Implementation = "auto",
    ):
        check_whole("slots", slots, 1)
        check_whole("capacity", capacity, 2)
        check_whole("chunk", chunk, 1)
        check_whole("prefill_tokens", prefill_tokens, BUCKET)
        if overcommit and pool_pages is None:
            raise ValueError("overcommit is about a page pool: give pool_pages, or leave it out")
        # Everything else is checked as for a batch of `slots` prompts.
        self._options = prepare(
            model,
            [[0]] * slots,
            cache=cache,
            max_new_tokens=1,
            sampler=sampler,
            eos=eos,
            capacity=capacity,
            pool_pages=pool_pages,
            prefill_tokens=prefill_tokens,
            mesh=mesh,
            implementation=implementation,
        )
        self._groups = mesh.shape["data"] if mesh else 1
        if slots % self._groups:
            raise ValueError(f"slots must be a multiple of the mesh's {self._groups} 'data' places, got {slots}")
        self.slots, self.chunk, self._prefill_tokens = int(slots), int(chunk), int(prefill_tokens)
        self._overcommit = bool(overcommit)
        self._pool = None if pool_pages is None else pool_pages // self._groups  # pages of each group
        self._run: SamplingState | None = None
        self._busy = False

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence, prompt and new ones."""
        return self._options.capacity

    @property
    def state(self) -> KVState | None:
        """The cache between two runs, all slots empty; None before the first one and after one that broke off."""
        return self._run.cache if self._run is not None else None

    def run(
        self, requests: Sequence[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> list[EngineResult]:
        """The results of all requests, in their order. Arguments and errors as in :meth:`stream`."""
        tokens: list[list[int]] = [[] for _ in requests]
        ended = [""] * len(tokens)
        for piece in self.stream(requests, max_new_tokens=max_new_tokens, seed=seed):
            tokens[piece.index] += piece.tokens
            ended[piece.index] = piece.ended
        return [EngineResult(*both) for both in zip(tokens, ended, strict=True)]

    def stream(
        self, requests: Sequence[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> Iterator[Piece]:
        """New tokens as they come, of whatever requests are running. Close the iterator to stop early.

        Args:
            requests: any number; plain token ids stand for ``Request(ids, max_new_tokens, seed + index)``.
            max_new_tokens, seed: for the requests that are plain token ids.

        Raises:
            ValueError: a request that is wrong in itself, or can never fit capacity or pool: here and now, before
                anything runs.
            RuntimeError: at the first ``next``, while another iterator of this engine has begun and not ended.
        """
        return self._stream(self._schedule(requests, max_new_tokens, seed))

    def compile(
        self, requests: Sequence[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> float:
        """Compiles what the first prompts of these requests and all later decoding need; returns the seconds it took.

        Prompt steps of a size that comes only later are compiled when they come.
        """
        begin = time.perf_counter()
        schedule = self._schedule(requests, max_new_tokens, seed)
        flags = np.zeros(self.slots, bool)
        run = jax.eval_shape(self._empty)
        jit_init.lower(*self._init_arguments()[0], **self._init_arguments()[1]).compile()
        jit_vacate.lower(run, flags, np.zeros(self.slots, np.uint32)).compile()
        pieces = self._prompt_steps(schedule, schedule.admit())
        for piece in {(x.tokens.shape, x.rows is None, x.fresh): x for x in pieces}.values():
            jit_start.lower(*self._start_arguments(run, piece), **self._start_options(piece)).compile()
        until = np.zeros(self.slots, np.int32)
        jit_advance.lower(*self._advance_arguments(run, until, False), **self._kernels()).compile()
        jit_progress.lower(run, until, size=self.chunk + 1).compile()
        return time.perf_counter() - begin

    def _schedule(self, requests, max_new_tokens: int | None, seed: int) -> Schedule:
        checked = [self._check(i, r, max_new_tokens, seed) for i, r in enumerate(requests)]
        eos = set(self._options.eos.tolist()) - {-1}
        return Schedule(checked, self._pages, self.slots, self._groups, self._pool, self._overcommit, eos)

    def _pages(self, tokens: int) -> int:
        """Pages that so many cached tokens fill."""
        quantized = next((c for c in self._options.caches if c.quantized), None)
        return pages_per_sequence(tokens, quantized) if quantized else 0

    def _check(self, index: int, request: Request | Sequence[int], max_new_tokens: int | None, seed: int) -> Request:
        try:
            if not isinstance(request, Request):
                if max_new_tokens is None:
                    raise ValueError("plain token ids need max_new_tokens; give it, or a Request")
                request = Request(request, max_new_tokens, seed + index)
            prompt = check_prompts([request.prompt], vocab_size=self._options.model.config.vocab_size)
            check_whole("max_new_tokens", request.max_new_tokens, 1)
            check_whole("seed", request.seed, 0)
            check_seeds(request.seed, 1)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from error
        length = int(prompt.lengths[0])
        new, size = int(request.max_new_tokens), length + int(request.max_new_tokens)
        asks = f"request {index}: {length} prompt tokens and max_new_tokens {new}"
        if size > self.capacity:
            raise ValueError(
                f"{asks} need a capacity of {size}, but it is {self.capacity}; raise capacity, shorten the prompt or "
                "lower max_new_tokens"
            )
        pages = self._pages(size - 1)  # the last new token is not cached
        if self._pool is not None and pages > self._pool:
            place = "" if self._groups == 1 else f" at each of the mesh's {self._groups} 'data' places"
            raise ValueError(
                f"{asks} fill {pages} pages, but the pool has {self._pool}{place}; raise pool_pages to "
                f"{pages * self._groups} or more, shorten the prompt or lower max_new_tokens"
            )
        return Request(prompt.tokens[0, :length], new, int(request.seed))

    def _stream(self, schedule: Schedule) -> Iterator[Piece]:
        if self._busy:
            raise RuntimeError("another iterator of this engine is at work; run it to its end or close it first")
        self._busy = True
        # Where this breaks off, by an error or a closed iterator, the state is dropped: the next run makes a new one.
        run, self._run = self._run, None
        try:
            run = self._empty() if run is None else run
            vacant, seeds = np.zeros(self.slots, bool), np.zeros(self.slots, np.uint32)
            while schedule.unfinished:
                rows = schedule.admit()
                vacant[rows] = True
                seeds[rows] = [schedule.request(row).seed for row in rows]
                if vacant.any():
                    # Copies: a call may still read these arrays after it has returned.
                    run = jit_vacate(run, vacant.copy(), seeds.copy())
                for piece in self._prompt_steps(schedule, rows):
                    run = jit_start(*self._start_arguments(run, piece), **self._start_options(piece))
                until = schedule.until(self.chunk)
                run = jit_advance(*self._advance_arguments(run, until, schedule.waiting), **self._kernels())
                tokens, going = to_host(jit_progress(run, schedule.seen(), size=self.chunk + 1))
                pieces, vacant, refused = schedule.read(tokens, going)
                if refused.any():
                    run = jit_resume(run, refused)
                yield from pieces
            self._run = jit_vacate(run, vacant, seeds) if vacant.any() else run
        finally:
            self._busy = False

    def _prompt_steps(self, schedule: Schedule, rows: list[int]) -> list[PromptSlice]:
        if not rows:
            return []
        prompts = [schedule.request(row).prompt for row in rows]
        return plan_prefill(prompts, rows, batch=self.slots, groups=self._groups, budget=self._prefill_tokens)

    def _empty(self) -> SamplingState:
        arguments, options = self._init_arguments()
        return jit_init(*arguments, **options)

    def _init_arguments(self) -> tuple[tuple, dict]:
        o = self._options
        sizes = {"batch": self.slots, "capacity": o.capacity, "room": o.capacity, "pool_pages": o.pool_pages}
        return (o.caches, o.shape, np.zeros(self.slots, np.uint32)), {**sizes, "mesh": o.mesh}

    def _start_arguments(self, run, piece: PromptSlice) -> tuple:
        o = self._options
        return o.model, run, piece.tokens, piece.lengths, piece.rows, piece.ends, o.sampler, o.eos

    def _start_options(self, piece: PromptSlice) -> dict:
        return {"fresh": piece.fresh, "copies": 1, **self._kernels()}

    def _advance_arguments(self, run, until: np.ndarray, stop_on_end: bool) -> tuple:
        o = self._options
        return o.model, run, until, np.bool_(stop_on_end), o.sampler, o.eos

    def _kernels(self) -> dict:
        return {"implementation": self._options.implementation}
