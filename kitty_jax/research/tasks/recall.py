"""Recall over length and depth: a fact in a long text, asked for at its end, exact match.

Two tasks. "passkey": a five-digit number among the same few sentences over and over. "needle": the code word of a city
in a text of one's own.

The text is cached before the question comes: the question's tokens attend the cache as decoding does, so even the first
token of the answer is read from quantized pages. In one prompt with the text, they would attend in full precision
(prefill does), and nothing of the cache would be tested but the later tokens of the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.state import init_state
from kitty_jax.cache.steps import decode_step, functional, prefill
from kitty_jax.inference.prompts import bucket
from kitty_jax.pallas_kernels.implementation import Implementation

TASKS = ("passkey", "needle")
FILLER = (
    "The river runs past the mill.",
    "Boats come down with the morning wind.",
    "The road follows the bank as far as the bridge.",
    "In the evening the lamps are lit.",
)
CITIES = ("Lisbon", "Oslo", "Quito", "Cairo", "Hanoi", "Turin", "Lagos", "Perth", "Dakar", "Minsk")
WORDS = ("amber", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence to hide, the question for it with the beginning of the answer, and the rest of the answer."""

    sentence: str
    question: str
    opening: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A text with its fact, and the question, as token ids.

    Attributes:
        length: tokens that the two may have together.
        depth: where the fact stands, from 0 (start) to 1 (end).
        context: ids of the text.
        question: ids of the question and the beginning of the answer.
        answer: what has to come next.
    """

    length: int
    depth: float
    context: list[int]
    question: list[int]
    answer: str


def fact_of(task: str, seed: int) -> Fact:
    """A fact, another one for every seed."""
    rng = random.Random(seed)
    if task == "passkey":
        number = str(rng.randrange(10_000, 100_000))
        return Fact(f"The pass key is {number}. Remember it.", "What is the pass key?", "The pass key is", number)
    if task == "needle":
        city, word = rng.choice(CITIES), rng.choice(WORDS)
        what = f"he code word of the office in {city} is"
        return Fact(f"T{what} {word}.", f"What is t{what[: -len(' is')]}?", f"T{what}", word)
    raise ValueError(f"unknown recall task {task!r}; known ones: {', '.join(TASKS)}")


def sentences_of(text: str | None) -> list[str]:
    """The sentences of a text, or the passkey task's own."""
    if text is None:
        return list(FILLER)
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text)]
    return [s for s in sentences if s]


@dataclasses.dataclass(frozen=True)
class Cases:
    """Makes cases for a tokenizer.

    Attributes:
        encode: text to ids, no special token added.
        sentences: what to hide facts in, repeated where it is too short.
        start: ids before everything, such as a beginning-of-sequence token or the head of a chat.
        reply: ids between question and answer, such as the end of the user's message and the head of the reply.
    """

    encode: Callable[[str], Sequence[int]]
    sentences: Sequence[str]
    start: Sequence[int] = ()
    reply: Sequence[int] = ()

    def __post_init__(self):
        if not self.sentences:
            raise ValueError("the text to hide facts in holds no sentence")

    def make(self, task: str, length: int, depth: float, seed: int) -> Case:
        """A case of up to ``length`` tokens (less than a sentence below it).

        Raises:
            ValueError: the length has no room for the fact and one sentence, or the depth is not from 0 to 1.
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"depths are from 0 (start of the text) to 1 (end), got {depth}")
        fact = fact_of(task, seed)
        hidden = self.encode(" " + fact.sentence)
        opening = fact.opening if self.reply else "\n" + fact.opening
        question = [*self.encode("\n\n" + fact.question), *self.reply, *self.encode(opening)]
        room = length - len(self.start) - len(hidden) - len(question)
        at = random.Random(seed).randrange(len(self.sentences))  # other text for every seed
        pieces: list[Sequence[int]] = []
        for sentence in itertools.islice(itertools.cycle(self.sentences), at, None):
            piece = self.encode(" " + sentence)
            if len(piece) > room:
                break
            pieces.append(piece)
            room -= len(piece)
        if not pieces:
            raise ValueError(f"length {length} has no room for the fact, the question and a sentence; raise it")
        pieces.insert(round(depth * len(pieces)), hidden)
        return Case(length, depth, [*self.start, *itertools.chain.from_iterable(pieces)], question, fact.answer)


def matches(text: str, answer: str) -> bool:
    """Whether a continuation begins with the answer, as a word of its own; case and quotation marks do not count."""
    found = re.match(r"[\s\"'*`:]*(\w+)", text)
    return bool(found) and found.group(1).lower() == answer.lower()


def ask(
    model: Any,
    cases: Sequence[Case],
    cache: Any,
    *,
    new_tokens: int,
    batch: int,
    shape: tuple[int, int],
    one_prompt: bool = False,
    implementation: Implementation = "auto",
) -> list[list[int]]:
    """Greedy answers, ids of ``new_tokens`` tokens each.

    Args:
        model: as in :func:`kitty_jax.generate`.
        cases: any number.
        cache: config, name, or one config per layer.
        new_tokens: how many to generate.
        batch: sequences at a time; the last batch is filled up with copies.
        shape: padded lengths of context and question, from :func:`shape_of`.
        one_prompt: put the question into one prompt with the text (see the module).
        implementation: of the operations on pages.
    """
    fm = functional(model)
    prompt = _jitted(prefill, ("fresh", "implementation"))
    decode = _jitted(decode_step, ("implementation",))
    out = []
    for first in range(0, len(cases), batch):
        rows = list(cases[first : first + batch])
        count = len(rows)
        rows += [rows[0]] * (batch - count)
        state = init_state(cache, fm.config, batch=batch, capacity=bucket(sum(shape) + new_tokens))
        if one_prompt:
            parts = [([r.context + r.question for r in rows], sum(shape))]
        else:
            parts = [([r.context for r in rows], shape[0]), ([r.question for r in rows], shape[1])]
        for number, (ids, width) in enumerate(parts):
            tokens = np.zeros((batch, width), np.int32)
            for i, row in enumerate(ids):
                tokens[i, : len(row)] = row
            lengths = np.array([len(row) for row in ids], np.int32)
            token, state = prompt(fm, state, tokens, lengths, fresh=number == 0, implementation=implementation)
        new = [token]
        for _ in range(new_tokens - 1):
            token, state = decode(fm, state, token, implementation=implementation)
            new.append(token)
        out += np.stack(jax.device_get(new), axis=1)[:count].tolist()
    return out


@functools.cache
def _jitted(step: Callable, static: tuple[str, ...]) -> Callable:
    """``prefill`` or ``decode_step``, giving the most likely token in place of the logits."""

    def greedy(fm, state, *inputs, **options):
        logits, state = step(fm, state, *inputs, **options)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    return jax.jit(greedy, static_argnames=static, donate_argnums=1)


def shape_of(cases: Sequence[Case], most: int | None = None, new_tokens: int = 0) -> tuple[int, int]:
    """Padded lengths of context and question that fit all cases.

    Raises:
        ValueError: a case with its answer has more than ``most`` tokens, the positions of the model.
    """
    longest = max(len(c.context) + len(c.question) for c in cases) + new_tokens
    if most is not None and longest > most:
        raise ValueError(
            f"a case and its answer have {longest} tokens; the model was made for {most}. Lower the lengths"
        )
    return bucket(max(len(c.context) for c in cases)), bucket(max(len(c.question) for c in cases))
