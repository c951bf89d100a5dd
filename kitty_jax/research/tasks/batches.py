"""Generation of many prompts in batches of one shape, with texts that end a sequence.

All prompts are padded to the widest, run some at a time, and share a capacity, so that everything compiles once.
Sequences of a batch are decoded some tokens at a time; in between, those whose text holds a stop string are ended, and
finished ones are handed out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kitty_jax.cache.steps import functional
from kitty_jax.inference.decode_loop import jit_progress
from kitty_jax.inference.detokenize import TextStream
from kitty_jax.inference.generate import Generation, prepare
from kitty_jax.inference.prompt_steps import PREFILL_TOKENS, PromptSlice
from kitty_jax.inference.prompts import Prompts, bucket, check_prompts, check_whole

CHUNK = 64  # tokens decoded between two looks at the texts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What to continue: token ids, and the seed of its own random numbers."""

    ids: Sequence[int]
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came of a prompt.

    Attributes:
        index: position of the prompt in the list.
        text: new text, without stop string and special tokens.
        tokens: new tokens, the eos included; after a stop string, those up to the next look at the text.
        ended: "eos", "stop" or "length".
    """

    index: int
    text: str
    tokens: int
    ended: str


def shape_of(prompts: Sequence[Prompt], max_new_tokens: int, most: int | None = None) -> tuple[int, int]:
    """(padded prompt length, capacity) that all of the prompts fit.

    Raises:
        ValueError: the longest prompt and its new tokens are more than ``most``, the positions of the model.
    """
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    length = len(prompts[longest].ids)
    if most is not None and length + max_new_tokens > most:
        raise ValueError(
            f"prompt {longest} has {length} tokens, and with max_new_tokens {max_new_tokens} needs "
            f"{length + max_new_tokens} positions; the model was made for {most}. Lower max_new_tokens"
        )
    return bucket(length), bucket(length + max_new_tokens)


def complete(
    model: Any,
    decode: Callable[[list[int]], str],
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_new_tokens: int,
    shape: tuple[int, int] | None = None,
    stops: Sequence[str] = (),
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] = lambda done, count: None,
    **options: Any,
) -> Iterator[Completion]:
    """Continues prompts, ``batch`` at a time, and yields each when its sequence has ended.

    Args:
        model: as in :func:`kitty_jax.generate`.
        decode: ids to text, special tokens left out.
        prompts: any number.
        batch: B. The last batch is filled up with copies, which cost a row of the prompt step alone.
        max_new_tokens: most new tokens of a prompt.
        shape: from :func:`shape_of`; give that of all prompts of a run that is taken up again, and it compiles the
            same shapes.
        stops: texts that end a sequence; the text is cut before the first of them.
        chunk: tokens between two looks at the texts.
        progress: called with the number of prompts done, and all, after each look.
        options: ``cache``, ``sampler``, ``eos``, ``implementation`` of :func:`kitty_jax.generate`.

    Raises:
        ValueError: as :func:`kitty_jax.generate`; before anything runs.
    """
    check_whole("batch", batch, 1)
    check_whole("chunk", chunk, 1)
    if isinstance(stops, str) or any(not isinstance(s, str) or not s for s in stops):
        raise ValueError(f"stops must be a list of non-empty texts, got {stops!r}")
    if not prompts:
        return iter(())
    shape = shape_of(prompts, max_new_tokens) if shape is None else shape
    check_prompts([p.ids for p in prompts], vocab_size=model.config.vocab_size)
    model = functional(model)  # split once, not once a batch
    return _complete(model, decode, prompts, batch, max_new_tokens, shape, tuple(stops), chunk, progress, options)


def _complete(model, decode, prompts, batch, max_new_tokens, shape, stops, chunk, progress, options):
    width, capacity = shape
    done = 0
    for first in range(0, len(prompts), batch):
        indices = list(range(first, min(first + batch, len(prompts))))
        rows = [prompts[i] for i in indices]
        rows += [rows[0]] * (batch - len(rows))
        generation = prepare(
            model,
            [row.ids for row in rows],
            max_new_tokens=max_new_tokens,
            capacity=capacity,
            seed=np.array([row.seed for row in rows], np.int64),
            **options,
        )
        if width <= PREFILL_TOKENS:  # else the prompts are cut into pieces of the budget, of one shape anyway
            generation = dataclasses.replace(generation, slices=_prompt_steps(generation.prompts, width))
        for row, text, tokens, ended in _run(generation, decode, len(indices), stops, chunk):
            done += 1
            yield Completion(indices[row], text, tokens, ended)
            progress(done, len(prompts))


def _prompt_steps(prompts: Prompts, width: int) -> list[PromptSlice]:
    """Prompt steps of one shape whatever the prompts are: as many rows of ``width`` tokens as the budget takes."""
    batch = prompts.batch
    count = min(batch, PREFILL_TOKENS // width)
    steps = []
    for first in range(0, batch, count):
        rows = np.arange(first, first + count, dtype=np.int32)
        real = rows < batch
        own = np.where(real, rows, 0)
        tokens = np.zeros((count, width), np.int32)
        tokens[:, : prompts.tokens.shape[1]] = prompts.tokens[own]
        lengths = np.where(real, prompts.lengths[own], 0).astype(np.int32)
        steps.append(PromptSlice(tokens, lengths, np.where(real, rows, batch).astype(np.int32), real, True))
    return steps


def _run(generation: Generation, decode, count: int, stops: tuple[str, ...], chunk: int):
    """(row, text, tokens, ended) of the first ``count`` rows, each as soon as it has ended."""
    batch, eos = generation.prompts.batch, set(generation.eos.tolist()) - {-1}
    watched = [_Watched(decode, stops) for _ in range(count)]
    waiting = set(range(count))
    stopped = np.arange(batch) >= count
    run = generation.start()
    first = 0
    while waiting and first < generation.max_new_tokens:
        run = dataclasses.replace(run, finished=run.finished | jax.numpy.asarray(stopped))
        size = min(chunk, generation.max_new_tokens - first)
        run = generation.advance(run, first + size)
        tokens, _ = jax.device_get(jit_progress(run, np.int32(first), size=size))
        first += size
        for row in sorted(waiting):
            new = tokens[row][tokens[row] >= 0].tolist()
            ended = watched[row].push(new)
            if not ended and new and new[-1] in eos:
                ended = "eos"
            if not ended and first >= generation.max_new_tokens:
                ended = "length"
            if ended:
                waiting.discard(row)
                stopped[row] = True
                yield row, watched[row].finish(), watched[row].tokens, ended


class _Watched:
    """The growing text of a sequence, and the first stop string in it."""

    def __init__(self, decode, stops: tuple[str, ...]):
        self._stream, self._stops = TextStream(decode), stops
        self._reach = max(map(len, stops), default=1) - 1
        self._text, self._cut = "", None
        self.tokens = 0

    def push(self, ids: list[int]) -> str:
        """ "stop" where the ids complete a stop string."""
        self.tokens += len(ids)
        return self._add(self._stream.push(ids))

    def _add(self, piece: str) -> str:
        start = max(len(self._text) - self._reach, 0)
        self._text += piece
        found = [at for at in (self._text.find(stop, start) for stop in self._stops) if at >= 0]
        self._cut = min(found) if found else None
        return "stop" if found else ""

    def finish(self) -> str:
        """All of the text, up to the stop string."""
        if self._cut is None:
            self._add(self._stream.finish())
        return self._text if self._cut is None else self._text[: self._cut]
