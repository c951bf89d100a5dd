"""The semantics of the cache, literally: one sequence, one layer, token by token, nothing packed. Slow, for tests.

Everything else that caches (the packed state, the kernels, the one-pass simulation) is held against this file, so it
shares no code with them. It follows arXiv 2511.18643, sections 3 and 4, and the published system where the paper is
silent. The authors' code has two versions of the algorithm that differ, a simulation (``kitty_sim``) and the Triton
kernels of the system (``kchanboost``). What they do, and what is done here:

* Rounding. Simulation: clamp, then half to even. Kernels: ``floor(x + 0.5)``, then clamp. Here: half to even, then
  clamp (the same codes as the simulation's).
* Flat groups. Simulation: the *range* is raised to at least 1e-4 (16-bit data; 1e-6 otherwise). Kernels: the *scale* is
  raised to at least 1e-6. Here neither: a scale of 0 has code 0 and gives back the minimum.
* What codes are computed with. Simulation: the scale in the data's dtype. Kernels: the scale before it is rounded to
  float16 for storage. Here: the float16 scale and minimum that are stored, so that their rounding is made up for.
* Ageing of values. Simulation: token by token, each as soon as R newer ones exist. Kernels: page by page, when G tokens
  have left the window of R. Here: as the kernels.
* Ageing of keys. Simulation: a page is quantized one step late, by the step that brings the first token after it, and
  a prompt that ends with a full page keeps it if it is the only one. Kernels: by the step that fills it, after that
  step's attention. Here: as the kernels.
* Scores of channels. Both: in the data's dtype, with the order of ties left to ``topk``; the simulation's random
  channels are drawn once for all sequences. Here: in float32 or better, ties to the lowest channel.
* Prompts. Simulation: a prompt must be longer than the sink. Kernels and here: any length.

Arithmetic of a group is float32, one rounding per operation; division by 3 or 15 is multiplication by its float32
reciprocal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kitty_jax.cache.config import CacheConfig

# A page of keys is stored below 2**13, one of values below 2**5; a larger one is divided by a power of two.
KEY_LIMIT_LOG2 = 13
VALUE_LIMIT_LOG2 = 5


@dataclasses.dataclass(frozen=True)
class OraclePage:
    """One quantized page of one KV head, nothing packed.

    Attributes:
        codes: int [G, D].
        scale, min: float16; of each channel [D] for keys, of each token [G] for values.
        channels: the boosted channels, ascending; empty for values.
        exponent: the page is stored divided by ``2**exponent``.
        restored: float32 [G, D], what reading the page gives.
    """

    codes: np.ndarray
    scale: np.ndarray
    min: np.ndarray
    channels: tuple[int, ...]
    exponent: int
    restored: np.ndarray


def page_exponent(x: np.ndarray, limit_log2: int) -> int:
    """Smallest e >= 0 with max |x| < 2**(limit_log2 + e)."""
    e = 0
    while np.max(np.abs(x.astype(np.float64))) >= 2.0 ** (limit_log2 + e):
        e += 1
    return e


def _twelve_bits(x: np.ndarray) -> np.ndarray:
    """float32 to 12 significant bits, half to even."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.ldexp(np.round(mantissa * 4096) / np.float32(4096), exponent).astype(np.float32)


def _to_bfloat16(x: float) -> np.float32:
    mantissa, exponent = np.frexp(np.float64(x))
    return np.float32(np.ldexp(np.round(mantissa * 256) / 256, exponent))


def quantize_group(
    x: np.ndarray, bits: int, shrink: tuple[float, ...] = (1.0,)
) -> tuple[np.ndarray, np.float16, np.float16]:
    """One group (a channel of a key page, or a token of a value page): float32 [X] -> (codes [X], scale, min).

    ``shrink``: factors of the range to try; each cuts both ends alike, and the first of least squared error is kept.
    """
    levels, best = 2**bits - 1, None
    for factor in shrink:
        low, high = np.min(x), np.max(x)
        if factor != 1:
            cut = _twelve_bits(high - low) * _to_bfloat16((1 - factor) / 2)
            low, high = low + cut, high - cut
        low = np.float16(low)
        scale = np.float16(np.maximum(high - np.float32(low), np.float32(0)) * np.float32(1 / levels))
        codes = np.clip(np.round((x - np.float32(low)) / np.float32(scale or 1)), 0, levels)
        error = np.sum(_twelve_bits(_restore(codes, scale, low) - x).astype(np.float64) ** 2)
        if best is None or error < best[0]:
            best = (error, codes.astype(np.int64), scale, low)
    return best[1:]


def _restore(codes: np.ndarray, scale: np.ndarray, low: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * np.float32(scale) + np.float32(low)


def _quantize_page(
    groups: np.ndarray, bits: list[int], limit_log2: int, shrink: tuple[float, ...], channels: tuple[int, ...] = ()
) -> OraclePage:
    """The groups [groups, X] of a page, each with its number of bits; codes and restored are [groups, X] too."""
    exponent = page_exponent(groups, limit_log2)
    scaled = groups.astype(np.float32) * np.float32(2.0**-exponent)
    codes, scale, low = map(
        np.array, zip(*(quantize_group(x, b, shrink) for x, b in zip(scaled, bits, strict=True)), strict=True)
    )
    restored = _restore(codes, scale[:, None], low[:, None]) * np.float32(2.0**exponent)
    return OraclePage(codes, scale, low, channels, exponent, restored)


def quantize_key_page(
    x: np.ndarray, channels: tuple[int, ...], bits: int = 2, shrink: tuple[float, ...] = (1.0,)
) -> OraclePage:
    """Keys of one KV head, [G, D]: each channel on its own, ``channels`` with 4 bits and the others with ``bits``."""
    each = [4 if d in channels else bits for d in range(x.shape[1])]
    page = _quantize_page(x.T, each, KEY_LIMIT_LOG2, shrink, channels)
    return dataclasses.replace(page, codes=page.codes.T, restored=page.restored.T)


def quantize_value_page(x: np.ndarray, bits: int, shrink: tuple[float, ...] = (1.0,)) -> OraclePage:
    """Values of one KV head, [G, D]: each token on its own."""
    return _quantize_page(x, [bits] * len(x), VALUE_LIMIT_LOG2, shrink)


class Oracle:
    """The cache of one sequence and one layer.

    Args:
        config: the cache; full precision too.
        num_kv_heads: K.
        head_dim: D.
        layer: the layer's number, on which random channels depend.
    """

    def __init__(self, config: CacheConfig, num_kv_heads: int, head_dim: int, layer: int = 0):
        self.config, self.num_kv_heads, self.head_dim, self.layer = config, num_kv_heads, head_dim, layer
        self.keys: list[np.ndarray] = []  # of every token, as it reads now: float32 [K, D]
        self.values: list[np.ndarray] = []
        self.queries: list[np.ndarray | None] = []  # of every token's own step, [N, D]
        self.key_pages: list[list[OraclePage]] = []  # by page, by KV head
        self.value_pages: list[list[OraclePage]] = []

    @property
    def length(self) -> int:
        """Tokens cached."""
        return len(self.keys)

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """A decode step, q [N, D], k and v [K, D] -> float64 [N, D]: insert, attend, quantize what is due."""
        self.insert(k, self._rotated(v), q)
        out = self._rotated(self.attend(q, self.length))
        self.age()
        return out

    def prefill(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """A chunk of T tokens, q [T, N, D], k and v [T, K, D] -> float64 [T, N, D].

        Causal. The chunk's own tokens are attended in full precision, those cached before as they are; then pages that
        are due are quantized.
        """
        before = self.length
        for t in range(len(k)):
            self.insert(k[t], self._rotated(v[t]), q[t])
        out = [self._rotated(self.attend(q[t], before + t + 1)) for t in range(len(q))]
        self.age()
        return np.stack(out) if out else np.zeros(q.shape, np.float64)

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """Values [K, D] into the basis they are cached in, or outputs [N, D] back: a Hadamard rotation, if wanted."""
        if not self.config.rotate_values:
            return x
        block, matrix = self.head_dim & -self.head_dim, np.ones((1, 1))
        while len(matrix) < block:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        blocks = x.astype(np.float64).reshape(len(x), -1, block)
        return (blocks @ matrix / np.sqrt(block)).reshape(x.shape)

    def insert(self, k: np.ndarray, v: np.ndarray, q: np.ndarray | None = None) -> None:
        """Appends one token, k and v [K, D] as they are cached, in full precision; q [N, D] where channels are chosen
        by the queries.
        """
        self.queries.append(None if q is None else np.array(q, np.float64))
        self.keys.append(np.array(k, np.float32))
        self.values.append(np.array(v, np.float32))

    def attend(self, q: np.ndarray, length: int) -> np.ndarray:
        """Softmax attention of one query [N, D] over the first ``length`` tokens, in float64: [N, D]."""
        out = np.zeros(q.shape, np.float64)
        per_head = q.shape[0] // self.num_kv_heads
        for n in range(q.shape[0]):
            head = n // per_head
            keys = np.stack([k[head] for k in self.keys[:length]]).astype(np.float64)
            values = np.stack([v[head] for v in self.values[:length]]).astype(np.float64)
            logits = keys @ q[n].astype(np.float64) / np.sqrt(self.head_dim)
            weights = np.exp(logits - np.max(logits))
            out[n] = weights @ values / np.sum(weights)
        return out

    def age(self) -> None:
        """Quantizes every page that is due: G keys past the sink at once; G values once R newer ones exist."""
        c = self.config
        if not c.quantized:
            return

        def key_page(x: np.ndarray, page: int, head: int) -> OraclePage:
            return quantize_key_page(x, self.boosted_channels(x, page, head), 2, c.key_shrink)

        def value_page(x: np.ndarray, page: int, head: int) -> OraclePage:
            return quantize_value_page(x, c.value_bits, c.value_shrink)

        self._quantize_due(self.keys, self.key_pages, key_page, newer=0)
        self._quantize_due(self.values, self.value_pages, value_page, newer=c.window)

    def _quantize_due(self, tokens: list[np.ndarray], pages: list, quantize: Callable, newer: int) -> None:
        size = self.config.page
        while self.length >= (start := self.config.sink + len(pages) * size) + size + newer:
            x = np.stack(tokens[start : start + size])  # [G, K, D]
            heads = [quantize(x[:, h], len(pages), h) for h in range(self.num_kv_heads)]
            tokens[start : start + size] = np.stack([page.restored for page in heads], axis=1)
            pages.append(heads)

    def boosted_channels(self, x: np.ndarray, page: int, head: int) -> tuple[int, ...]:
        """Channels of page number ``page``, x [G, D], that get 4 bits, ascending; ties go to the lowest channel."""
        count = round(self.config.boost * self.head_dim)
        lists = self.config.channel_lists()
        if lists:
            return tuple(sorted(lists[head % len(lists)]))
        order = np.argsort(-self._scores(x.astype(np.float64), page, head), kind="stable")
        return tuple(sorted(int(d) for d in order[:count]))

    def _scores(self, x: np.ndarray, page: int, head: int) -> np.ndarray:
        selection, spread = self.config.selection, np.max(x, axis=0) - np.min(x, axis=0)
        if selection == "magnitude":
            return np.mean(np.abs(x), axis=0)
        if selection == "variance":
            return np.mean((x - np.mean(x, axis=0)) ** 2, axis=0)
        if selection == "range":
            return spread
        if selection == "sensitivity":
            return np.sqrt(self._mean_square_of_queries(page, head)) * spread
        if selection == "error":
            return self._mean_square_of_queries(page, head) * self._gain(x)
        return random_scores(self.config.seed, self.layer, page, self.num_kv_heads, self.head_dim)[head]

    def _mean_square_of_queries(self, page: int, head: int) -> np.ndarray:
        """Of the steps that brought the page's tokens, over the query heads that read the KV head: [D]."""
        start, per_head = self.config.sink + page * self.config.page, len(self.queries[-1]) // self.num_kv_heads
        queries = np.stack(self.queries[start : start + self.config.page])[:, head * per_head : (head + 1) * per_head]
        return np.mean(queries**2, axis=(0, 1))

    def _gain(self, x: np.ndarray) -> np.ndarray:
        """How much squared error each channel loses by having 4 bits instead of 2: [G, D] -> [D]."""
        every = tuple(range(self.head_dim))
        two = quantize_key_page(x, (), 2, self.config.key_shrink).restored
        four = quantize_key_page(x, every, 2, self.config.key_shrink).restored
        return np.sum((two - x) ** 2 - (four - x) ** 2, axis=0)


def random_scores(seed: int, layer: int, page: int, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """Scores of the "random" selection, [K, D]: a draw that depends on seed, layer and page number alone."""
    import jax  # the generator is part of the semantics, so this one thing is JAX's

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), layer), page)
    return np.asarray(jax.random.uniform(key, (num_kv_heads, head_dim), np.float32))
