"""A synthetic recall task: many key-value pairs in a context, and then every key again, to be answered with its value.

    <bos>  a b v  a b v  ...  a b v     a b [v]  a b [v]  ...  a b [v]
           pairs, in random order       the same keys in another order; the values in brackets are the answers

A key is two tokens, one of each alphabet, and other pairs share one or the other of them, so an answer needs both; a
value is one token of a third alphabet. Every answer is one token, so teacher-forced argmax is exact match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.steps import functional
from kitty_jax.research.tasks.intervals import accuracy_interval
from kitty_jax.research.tasks.scoring import score

BOS = 0  # the first token of every sequence, and of the vocabulary


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The task at one length.

    Attributes:
        pairs: P, key-value pairs of a sequence; each is asked for once. Keys of a sequence are distinct.
        firsts, lasts: sizes of the two alphabets of a key.
        values: size of the alphabet of values.
    """

    pairs: int
    firsts: int = 64
    lasts: int = 64
    values: int = 1024

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{field.name} must be a whole number, 1 or more, got {size!r}")
        if self.pairs > self.firsts * self.lasts:
            raise ValueError(
                f"{self.pairs} pairs need as many keys, and {self.firsts} x {self.lasts} tokens make only "
                f"{self.firsts * self.lasts}: raise firsts or lasts"
            )

    @property
    def vocab_size(self) -> int:
        """bos and the three alphabets."""
        return 1 + self.firsts + self.lasts + self.values

    @property
    def length(self) -> int:
        """Tokens that a model is given: all but the last answer."""
        return 6 * self.pairs

    @property
    def asked(self) -> slice:
        """Positions, of the ``length``, whose next token is an answer: those of the second key token."""
        return slice(3 * self.pairs + 2, None, 3)

    def sample(self, key: Array, batch: int) -> Array:
        """Sequences: int32 [batch, length + 1]. Jittable."""
        draw_keys, draw_values, draw_order = jax.random.split(key, 3)
        _, keys = jax.lax.top_k(jax.random.uniform(draw_keys, (batch, self.firsts * self.lasts)), self.pairs)
        values = jax.random.randint(draw_values, (batch, self.pairs), 0, self.values, jnp.int32)
        first, second = BOS + 1 + keys // self.lasts, BOS + 1 + self.firsts + keys % self.lasts
        pairs = jnp.stack([first, second, BOS + 1 + self.firsts + self.lasts + values], axis=-1)
        order = jnp.argsort(jax.random.uniform(draw_order, (batch, self.pairs)), axis=-1)
        asked = jnp.take_along_axis(pairs, order[..., None], axis=1)
        start = jnp.full((batch, 1), BOS, jnp.int32)
        return jnp.concatenate([start, pairs.reshape(batch, -1), asked.reshape(batch, -1)], axis=1)

    def words(self) -> list[str]:
        """The vocabulary as words, for a tokenizer: <bos>, a0 ..., b0 ..., v0 ..."""
        sizes = (("a", self.firsts), ("b", self.lasts), ("v", self.values))
        return ["<bos>", *(f"{letter}{i}" for letter, size in sizes for i in range(size))]


def answers(
    model: Any,
    tokens: np.ndarray,
    task: Lookup,
    cache: CacheConfig | str | Sequence[CacheConfig],
    *,
    scoring: str = "simulation",
    batch: int = 16,
) -> np.ndarray:
    """Which answers are right under a cache.

    Args:
        model: a decoder, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        tokens: int32 [B, length + 1], from :meth:`Lookup.sample`.
        cache: config, name, or one config per layer.
        scoring: "simulation" or "packed"; see :func:`.scoring.score`.
        batch: sequences at a time; the last batch is filled up with copies.

    Returns:
        bool [B, P], in the order of asking.
    """
    if tokens.ndim != 2 or tokens.shape[1] != task.length + 1:
        raise ValueError(f"tokens of {task} are [B, {task.length + 1}], got {list(tokens.shape)}")
    out = []
    for first in range(0, len(tokens), batch):
        rows = tokens[first : first + batch]
        padded = np.concatenate([rows, np.repeat(rows[:1], batch - len(rows), axis=0)])
        # The last answer is asked for but never cached, so it may stay among the tokens.
        out.append(score(model, padded, cache, scoring=scoring)[1][: len(rows), task.asked])
    return np.concatenate(out)


def in_pages(tokens: np.ndarray, task: Lookup, cache: CacheConfig) -> np.ndarray:
    """Whether the pair asked for (its value's token) lies in a quantized page when it is asked for: bool [B, P]."""
    if not cache.quantized:
        return np.zeros((len(tokens), task.pairs), bool)
    pairs = tokens[:, 1 : 1 + 3 * task.pairs].reshape(len(tokens), task.pairs, 3)
    asked = tokens[:, 1 + 3 * task.pairs :].reshape(len(tokens), task.pairs, 3)
    same = (asked[:, :, None, :2] == pairs[:, None, :, :2]).all(-1)
    where = 3 + 3 * same.argmax(-1) - cache.sink  # of its value, past the sink
    when = np.arange(task.length)[task.asked] - cache.sink
    return (where >= 0) & (where // cache.page < np.maximum(when, 0) // cache.page)


def figures(
    right: np.ndarray, full: np.ndarray, tokens: np.ndarray, task: Lookup, caches: Sequence[CacheConfig]
) -> dict[str, Any]:
    """What :func:`answers` amounts to.

    Returns:
        ``answers`` and ``correct`` ones; ``accuracy`` with its 95 % ``interval``, over the sequences' own means, since
        answers of one sequence share its pages; ``same_as_full``, share of answers right or wrong together with
        full precision's; ``in_pages``, share of the pairs asked for that lie in a page then; ``pages_accuracy`` over
        those alone (None where there is none).
    """
    # Quantized layers agree in sink and page.
    inside = in_pages(tokens, task, next((c for c in caches if c.quantized), CacheConfig.full()))
    return {
        "answers": int(right.size),
        "correct": int(right.sum()),
        "accuracy": float(right.mean()),
        "interval": list(accuracy_interval(right.tolist())),
        "same_as_full": float((right == full).mean()),
        "in_pages": float(inside.mean()),
        "pages_accuracy": float(right[inside].mean()) if inside.any() else None,
    }


def evaluate(
    model: Any,
    task: Lookup,
    caches: dict[str, CacheConfig | str | Sequence[CacheConfig]],
    *,
    sequences: int,
    seed: int,
    scoring: str = "simulation",
    batch: int = 16,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """:func:`figures` of "full" and each cache, on the same ``sequences`` sequences drawn with ``seed``.

    ``workers`` caches at a time: on a GPU most of the time is compilation.
    """
    model = functional(model)
    tokens = np.asarray(task.sample(jax.random.key(seed), sequences))
    caches = {"full": CacheConfig.full(), **caches}

    def run(cache) -> np.ndarray:
        return answers(model, tokens, task, cache, scoring=scoring, batch=min(batch, sequences))

    with ThreadPoolExecutor(workers) as pool:
        right = dict(zip(caches, pool.map(run, caches.values()), strict=True))
    layers = model.config.num_layers
    return {n: figures(right[n], right["full"], tokens, task, layer_configs(c, layers)) for n, c in caches.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| cache | exact match % (95 % interval) | of pairs in pages % | same as full % |", "|---|---|---|---|"]
    for name, row in results.items():
        low, high = (100 * x for x in row["interval"])
        inside = "" if row["pages_accuracy"] is None else f"{100 * row['pages_accuracy']:.2f}"
        same = 100 * row["same_as_full"]
        lines.append(f"| {name} | {100 * row['accuracy']:.2f} ({low:.2f} to {high:.2f}) | {inside} | {same:.2f} |")
    return "\n".join(lines)
