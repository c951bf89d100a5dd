"""``generate`` and ``stream``: token ids in, token ids out, from a jitted loop over a 2-bit cache.

    result = generate(model, [[504, 3575], [42]], cache="kitty_pro", max_new_tokens=64, eos=tokenizer.eos_token_id)
    result.tokens[0, : result.lengths[0]]

A batch gives each sequence what it would get alone: prompts are right-padded and never see the padding, and every
sequence draws from its own random keys. Lengths are padded to :func:`.prompts.bucket`, so that other prompts
of a batch shape compile nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kitty_jax.cache.mesh import to_host
from kitty_jax.cache.state import KVState
from kitty_jax.inference.decode_loop import SamplingState, jit_progress
from kitty_jax.inference.programs import Programs
from kitty_jax.inference.prompt_steps import PromptStep, power_of_two
from kitty_jax.inference.prompts import check_capacity, check_prompts, check_seeds, check_whole


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What was generated.

    Attributes:
        tokens: int32 [B, max_new_tokens], new tokens, the eos included; -1 after a sequence's end. With ``samples``, B
            is prompts times samples, and the samples of a prompt follow each other.
        lengths: int32 [B], new tokens of each sequence.
        finished_by_eos: bool [B]; the others ran into ``max_new_tokens``, or ran out of cache.
        state: the cache, where ``keep_state`` was given. It holds each sequence's prompt and all its new tokens but the
            last.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finished_by_eos: np.ndarray
    state: KVState | None = None

    def sequences(self) -> list[list[int]]:
        """The new tokens of each sequence as a list of ids."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


class PoolExhaustedError(RuntimeError):
    """The page pool had no page left for some sequences. They stopped early; nothing of any sequence is lost.

    Attributes:
        result: the :class:`GenerateResult` up to there; sequences that needed no further page are complete.
        rows: the sequences that stopped.
    """

    def __init__(self, result: GenerateResult, rows: Sequence[int], pool_pages: int, pages_for_all: int):
        self.result, self.rows = result, tuple(rows)
        stopped = ", ".join(f"{row} (after {result.lengths[row]} new tokens)" for row in rows)
        super().__init__(
            f"pool_pages={pool_pages} were not enough; sequences that stopped early: {stopped}. Raise pool_pages "
            f"({pages_for_all} hold the whole capacity of all {len(result.lengths)} sequences, None gives each its "
            "own), or generate fewer sequences or tokens at a time. The tokens so far are in this error's `result`."
        )


@dataclasses.dataclass(frozen=True)
class Generation:
    """A checked request, made by :func:`prepare`; :meth:`run` or :meth:`stream` carry it out, as often as wanted.

    Attributes:
        programs: checked options, and the calls of the compiled programs.
        sequences: sequences that were asked for; the state may have more, see :class:`.programs.Programs`.
        seeds: uint32 [B].
        max_new_tokens: most new tokens of a sequence.
        steps: the prompt steps.
    """

    programs: Programs
    sequences: int
    seeds: np.ndarray
    max_new_tokens: int
    steps: list[PromptStep]

    def compile(self) -> float:
        """Compiles everything without running it, and returns the seconds that took."""
        return self.programs.compile(
            self.steps, functools.partial(jit_progress, self.programs.state_shape, np.int32(0), size=1)
        )

    def start(self) -> SamplingState:
        """Runs the prompts and samples the first new token of every sequence."""
        run = self.programs.empty(self.seeds)()
        for step in self.steps:
            run = self.programs.start(run, step)()
        return run

    def advance(self, run: SamplingState, limit: int) -> SamplingState:
        """Decodes up to ``limit`` new tokens per sequence. ``run`` is donated."""
        until = np.full(self.programs.batch, min(limit, self.max_new_tokens), np.int32)
        return self.programs.advance(run, until)()

    def run(self, keep_state: bool = False) -> GenerateResult:
        """All of it at once; see :func:`generate`."""
        return self._result(self.advance(self.start(), self.max_new_tokens), keep_state)

    def stream(self, chunk: int = 1) -> Iterator[np.ndarray]:
        """See :func:`stream`."""
        check_whole("chunk", chunk, 1)
        return self._stream(int(chunk))

    def _stream(self, chunk: int) -> Iterator[np.ndarray]:
        run, first, active = self.start(), 0, True
        while active and first < self.max_new_tokens:
            size = min(chunk, self.max_new_tokens - first)
            run = self.advance(run, first + size)
            tokens, still = to_host(jit_progress(run, np.int32(first), size=size))
            tokens, active = tokens[: self.sequences], still.any()
            width = int((tokens >= 0).any(axis=0).sum())
            if width:
                yield tokens[:, :width]
            first += size
        self._result(run, keep_state=False)

    def _result(self, run: SamplingState, keep_state: bool) -> GenerateResult:
        read = to_host((run.tokens, run.num_new, run.finished, run.cache.exhausted))
        tokens, lengths, finished, exhausted = (x[: self.sequences] for x in read)
        state = run.cache if keep_state or exhausted.any() else None
        result = GenerateResult(tokens[:, : self.max_new_tokens], lengths, finished, state)
        if exhausted.any():
            pages = self.programs.batch * self.programs.pages(self.programs.capacity)
            raise PoolExhaustedError(result, np.flatnonzero(exhausted).tolist(), self.programs.pool_pages, pages)
        return result


def prepare(
    model: Any,
    token_ids: Any,
    lengths: Any = None,
    *,
    max_new_tokens: int,
    seed: Any = 0,
    capacity: int | None = None,
    samples: int = 1,
    **options,
) -> Generation:
    """Checks a request without running or compiling anything. Arguments and errors as in :func:`generate`."""
    prompts = check_prompts(token_ids, lengths, model.config.vocab_size)
    sizes = [len(prompt) for prompt in prompts]
    capacity = check_capacity(sizes, max_new_tokens, capacity)
    check_whole("samples", samples, 1)
    sequences = len(prompts) * int(samples)
    programs = Programs.check(model, sequences=sequences, capacity=capacity, samples=samples, **options)
    if samples > 1 and programs.pool_pages is None and (whole := programs.pages(capacity)):
        # All samples up to the capacity, the pages of the prompts once; rounded up so that the number recurs.
        shared = sum(map(programs.pages, sizes))
        pool_pages = power_of_two(shared + samples * (len(sizes) * whole - shared))
        programs = dataclasses.replace(programs, pool_pages=pool_pages)
    return Generation(
        programs=programs,
        sequences=sequences,
        seeds=check_seeds(seed, sequences, programs.batch),
        max_new_tokens=int(max_new_tokens),
        steps=programs.prompt_steps(prompts, range(0, sequences, samples)),
    )


def generate(model: Any, token_ids: Any, lengths: Any = None, *, keep_state: bool = False, **options) -> GenerateResult:
    """Continues prompts.

    Args:
        model: a model of ``kitty_jax.models``, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        token_ids: integers [B, T], right-padded, or a list of B lists of integers.
        lengths: integers [B], real tokens of each row; by default all of them.
        keep_state: put the cache into the result.

    Keyword arguments, which :func:`prepare` and :func:`stream` take as well:
        cache: a name, a :class:`CacheConfig`, or one of them per layer. Default ``"kitty_pro"``.
        max_new_tokens: most new tokens of a sequence, 1 or more. Required.
        sampler: ``Greedy()``, the default, ``Sampling(...)``, or any function (logits [B, V], keys [B]) -> int32 [B].
        seed: an integer, and sequence b draws as one alone with seed + b does; or one integer per sequence.
        eos: id or ids that end a sequence; none by default. The eos is the last token of its sequence.
        capacity: tokens that a sequence's cache holds, at least its prompt and ``max_new_tokens``. By default just
            enough, rounded up to a :func:`.prompts.bucket`. Requests of equal batch, capacity, kind of sampler
            and padded prompt length share one compilation.
        pool_pages: pages for all sequences together; by default each has its own for the whole capacity.
        samples: continuations of each prompt, 1 by default. They share the pages of the prompt, which is run once;
            sample i of prompt b is sequence ``b * samples + i`` of the result, and draws as one alone with its seed.
        prefill_tokens: most prompt tokens, padding included, that run at a time, 8,192 by default. Prompts longer than
            that, rounded down to a power of two, are cut into parts, which attend to the packed pages of those before.
        mesh: devices to use, from :func:`kitty_jax.models.sharding.make_mesh`; load the model with the same mesh.
        implementation: ``"auto"``, ``"mosaic"`` or ``"xla"``, for the operations on pages.

    Raises:
        ValueError: empty or overlong prompt, id outside the vocabulary, lengths that disagree with the array, unknown
            cache, or any other argument out of its range: before anything is compiled.
        PoolExhaustedError: ``pool_pages`` did not suffice; it carries the result up to there.
    """
    return prepare(model, token_ids, lengths, **options).run(keep_state)


def stream(model: Any, token_ids: Any, lengths: Any = None, *, chunk: int = 1, **options) -> Iterator[np.ndarray]:
    """Continues prompts and yields the new tokens as they come. Arguments and errors as in :func:`generate`.

    The request is checked here and now; the first ``next`` compiles and runs. The same compiled loop as
    :func:`generate`'s decodes ``chunk`` tokens between two yields, so the tokens are the same ones. Close the iterator
    to stop early.

    Returns:
        An iterator of int32 [B, n], n up to ``chunk``: the next tokens of each sequence, -1 after its end. It stops
        when all sequences have ended. A pool that ran out raises PoolExhaustedError after the last tokens.
    """
    return prepare(model, token_ids, lengths, **options).stream(chunk)
