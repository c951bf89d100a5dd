"""Continuous batching: a queue of requests over a fixed number of sequences.

    engine = Engine(model, cache="kitty_pro", slots=64, capacity=4096, eos=tokenizer.eos_token_id)
    for result in engine.run([Request(ids, max_new_tokens=512) for ids in prompts]):
        print(result.tokens)

A finished sequence gives its pages back and the next prompt takes its slot. All of it is the compiled programs of
:mod:`.decode_loop`, so each request gets the tokens that ``generate`` gives it alone, and other requests compile
nothing but prompt steps of a size not met before (:mod:`.prompt_steps`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kitty_jax.cache.mesh import to_host
from kitty_jax.cache.state import KVState
from kitty_jax.inference.decode_loop import SamplingState, jit_progress, jit_reset
from kitty_jax.inference.programs import Programs
from kitty_jax.inference.prompt_steps import PromptStep
from kitty_jax.inference.prompts import check_capacity, check_prompts, check_seeds, check_whole
from kitty_jax.inference.scheduler import Piece, Request, Scheduler


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """What came of a request.

    Attributes:
        tokens: new tokens, the eos included; after a stop string, those up to the next look at the sequence.
        ended: "eos", "stop" or "length" for ``max_new_tokens``.
        text: new text without stop string, where the engine has ``decode``.
    """

    tokens: list[int]
    ended: str
    text: str | None = None


class Engine:
    """Continues any number of prompts, ``slots`` at a time.

    Args:
        model: as in :func:`kitty_jax.generate`.
        slots: B, sequences at a time; a multiple of the mesh's "data" places, each of which keeps its own.
        capacity: most tokens of a sequence, prompt and new ones.
        overcommit: reserve for a request the pages of its prompt and one more instead of all. More requests run
            together; where the pool runs out, the youngest is preempted: it goes back to the front of the queue and is
            recomputed. It draws the same tokens again, and those that were handed out are not handed out twice.
        chunk: steps between two looks at the sequences. While requests wait, the loop also returns when one ends.
        decode: ids to text, special tokens left out, for the texts of results and ``stop`` of requests.
        options: cache, pool_pages, sampler, eos, prefill_tokens, mesh, implementation as in :func:`kitty_jax.generate`.
            ``pool_pages`` are those of all slots together. With fewer than the default a request waits until the pages
            that it can fill at most are free and reserved for no other.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        capacity: int,
        overcommit: bool = False,
        chunk: int = 16,
        decode: Callable[[list[int]], str] | None = None,
        **options,
    ):
        check_whole("slots", slots, 1)
        check_whole("capacity", capacity, 2)
        check_whole("chunk", chunk, 1)
        if "samples" in options:
            raise TypeError("an Engine takes no samples: give a Request with a seed of its own for each")
        self._programs = Programs.check(model, sequences=slots, capacity=capacity, **options)
        if self._programs.batch != slots:
            places = self._programs.groups
            raise ValueError(f"slots must be a multiple of the mesh's {places} 'data' places, got {slots}")
        if overcommit and self._programs.pool_pages is None:
            raise ValueError("overcommit is about a page pool: give pool_pages, or leave it out")
        self.slots, self.capacity, self.chunk = int(slots), int(capacity), int(chunk)
        self._overcommit, self._decode = bool(overcommit), decode
        pages = self._programs.pool_pages
        self._pool = None if pages is None else pages // self._programs.groups  # of each group
        self._run: SamplingState | None = None
        self._busy = False

    @property
    def state(self) -> KVState | None:
        """The cache between two runs, all slots empty; None before the first one and after one that broke off."""
        return self._run.cache if self._run is not None else None

    def run(
        self, requests: Iterable[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> list[EngineResult]:
        """The results of all requests, in their order. Arguments and errors as in :meth:`stream`."""
        ended = dict(self.as_completed(requests, max_new_tokens=max_new_tokens, seed=seed))
        return [ended[index] for index in sorted(ended)]

    def as_completed(
        self, requests: Iterable[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> Iterator[tuple[int, EngineResult]]:
        """(index, result) of each request when it has ended. Arguments and errors as in :meth:`stream`."""
        return _results(self.stream(requests, max_new_tokens=max_new_tokens, seed=seed))

    def stream(
        self, requests: Iterable[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
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
        self, requests: Iterable[Request | Sequence[int]], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> float:
        """Compiles what the first prompts of these requests and all later decoding need; returns the seconds it took.

        Prompt steps of a size that comes only later are compiled when they come.
        """
        scheduler = self._schedule(requests, max_new_tokens, seed)
        run, flags, numbers = self._programs.state_shape, np.zeros(self.slots, bool), np.zeros(self.slots, np.int32)
        return self._programs.compile(
            self._prompt_steps(scheduler, scheduler.admit()),
            functools.partial(jit_reset, run, flags, flags, numbers.astype(np.uint32)),
            functools.partial(jit_progress, run, numbers, size=self.chunk + 1),
        )

    def _schedule(self, requests, max_new_tokens: int | None, seed: int) -> Scheduler:
        checked = []
        for index, request in enumerate(requests):
            try:
                if not isinstance(request, Request):
                    if max_new_tokens is None:
                        raise ValueError("plain token ids need max_new_tokens; give it, or a Request")
                    request = Request(request, max_new_tokens, seed + index)
                checked.append(self._check(request))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        return Scheduler(
            checked,
            self._programs.pages,
            slots=self.slots,
            groups=self._programs.groups,
            pool=self._pool,
            overcommit=self._overcommit,
            eos=self._programs.eos_ids,
            decode=self._decode,
        )

    def _check(self, request: Request) -> Request:
        (prompt,) = check_prompts([request.prompt], vocab_size=self._programs.model.config.vocab_size)
        (seed,) = check_seeds(request.seed, 1).tolist()
        check_capacity([len(prompt)], request.max_new_tokens, self.capacity)
        pages = self._programs.pages(len(prompt) + request.max_new_tokens - 1)  # the last new token is not cached
        if self._pool is not None and pages > self._pool:
            groups = self._programs.groups
            place = "" if groups == 1 else f" at each of the mesh's {groups} 'data' places"
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_new_tokens {request.max_new_tokens} fill {pages} pages, but the "
                f"pool has {self._pool}{place}; raise pool_pages to {pages * groups} or more, shorten the prompt or "
                "lower max_new_tokens"
            )
        if isinstance(request.stop, str) or any(not isinstance(s, str) or not s for s in request.stop):
            raise ValueError(f"stop must be a list of non-empty texts, got {request.stop!r}")
        if request.stop and self._decode is None:
            raise ValueError(f"stop {request.stop!r} needs an engine with decode=, which turns ids into text")
        return Request(prompt, int(request.max_new_tokens), seed, tuple(request.stop))

    def _stream(self, scheduler: Scheduler) -> Iterator[Piece]:
        if self._busy:
            raise RuntimeError("another iterator of this engine is at work; run it to its end or close it first")
        self._busy = True
        # Where this breaks off, by an error or a closed iterator, the state is dropped: the next run makes a new one.
        run, self._run = self._run, None
        try:
            seeds, done, retry = np.zeros(self.slots, np.uint32), np.zeros(self.slots, bool), np.zeros(self.slots, bool)
            run = self._programs.empty(seeds.copy())() if run is None else run
            while scheduler.unfinished:
                rows = scheduler.admit()
                done[rows] = True
                seeds[rows] = [scheduler.request(row).seed for row in rows]
                if done.any() or retry.any():
                    run = jit_reset(run, done, retry, seeds.copy())  # a call may still read an array after it returned
                for step in self._prompt_steps(scheduler, rows):
                    run = self._programs.start(run, step)()
                run = self._programs.advance(run, scheduler.until(self.chunk), scheduler.waiting)()
                tokens, active = to_host(jit_progress(run, scheduler.seen(), size=self.chunk + 1))
                pieces, done, retry = scheduler.read(tokens, active)
                yield from pieces
            self._run = jit_reset(run, done, retry, seeds) if done.any() else run
        finally:
            self._busy = False

    def _prompt_steps(self, scheduler: Scheduler, rows: list[int]) -> list[PromptStep]:
        return self._programs.prompt_steps([scheduler.request(row).prompt for row in rows], rows)


def _results(pieces: Iterator[Piece]) -> Iterator[tuple[int, EngineResult]]:
    tokens: dict[int, list[int]] = {}
    for piece in pieces:
        tokens.setdefault(piece.index, []).extend(piece.tokens)
        if piece.ended:
            yield piece.index, EngineResult(tokens.pop(piece.index), piece.ended, piece.text)
