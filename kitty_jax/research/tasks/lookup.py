"""A synthetic recall task: many key-value pairs in a context, and then every key again, to be answered with its value.

    <bos>  a b v  a b v  ...  a b v     a b [v]  a b [v]  ...  a b [v]
           pairs, in random order       the same keys in another order; the values in brackets are the answers

A key is two tokens, one of each alphabet, and other pairs share one or the other of them, so an answer needs both; a
value is one token of a third alphabet. Every answer is one token, so teacher-forced argmax is exact match.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.steps import functional
from kitty_jax.inference.prompts import check_whole
from kitty_jax.research.scoring import Cache, score
from kitty_jax.research.tasks.comparison import accuracy_interval

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
            check_whole(field.name, getattr(self, field.name), 1)
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
    model: Any, tokens: np.ndarray, task: Lookup, cache: Cache, *, scoring: str = "simulation", batch: int = 16
) -> np.ndarray:
    """Which answers are right under a cache.

    Args:
        model: a decoder, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        tokens: int32 [B, length + 1], from :meth:`Lookup.sample`.
        cache: config, name, or one config per layer.
        scoring: "simulation" or "packed"; see :func:`kitty_jax.research.scoring.score`.
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
    pairs, asked = tokens[:, 1:].reshape(len(tokens), 2, task.pairs, 3).swapaxes(0, 1)
    same = (asked[:, :, None, :2] == pairs[:, None, :, :2]).all(-1)
    where = 3 + 3 * same.argmax(-1) - cache.sink  # of its value, past the sink
    when = np.arange(task.length)[task.asked] - cache.sink
    return (where >= 0) & (where // cache.page < np.maximum(when, 0) // cache.page)


def evaluate(
    model: Any,
    task: Lookup,
    caches: dict[str, Cache],
    *,
    sequences: int,
    seed: int,
    scoring: str = "simulation",
    batch: int = 16,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """Figures of "full" and each cache, on the same ``sequences`` sequences drawn with ``seed``.

    ``workers`` caches at a time: on a GPU most of the time is compilation.

    Returns:
        By cache ``answers`` and ``correct`` ones; ``accuracy`` with its 95 % ``interval``, over the sequences' own
        means, since answers of one sequence share its pages; ``same_as_full``, share of answers right or wrong together
        with full precision's; ``in_pages``, share of the pairs asked for that lie in a page then; ``pages_accuracy``
        over those alone (None where there is none).
    """
    model = functional(model)
    tokens = np.asarray(task.sample(jax.random.key(seed), sequences))
    caches = {"full": CacheConfig.full(), **caches}

    def run(cache) -> np.ndarray:
        return answers(model, tokens, task, cache, scoring=scoring, batch=min(batch, sequences))

    with ThreadPoolExecutor(workers) as pool:
        right = dict(zip(caches, pool.map(run, caches.values()), strict=True))
    out = {}
    for name, cache in caches.items():
        # Quantized layers agree in sink and page.
        quantized = [c for c in layer_configs(cache, model.config.num_layers) if c.quantized]
        inside, got = in_pages(tokens, task, [*quantized, CacheConfig.full()][0]), right[name]
        out[name] = {
            "answers": int(got.size),
            "correct": int(got.sum()),
            "accuracy": float(got.mean()),
            "interval": list(accuracy_interval(got.tolist())),
            "same_as_full": float((got == right["full"]).mean()),
            "in_pages": float(inside.mean()),
            "pages_accuracy": float(got[inside].mean()) if inside.any() else None,
        }
    return out
