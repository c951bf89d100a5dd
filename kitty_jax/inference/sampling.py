"""Choosing the next token from logits: small frozen dataclasses, each a pure function of logits and random keys.

A sampler is called as ``sampler(logits float32 [B, V], keys [B]) -> int32 [B]`` and treats every row by itself: the
token of a row depends on its own logits and its own key alone. Both classes here are pytrees, so their numbers are
run-time values and a new temperature compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Sampler = Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token; of equally likely ones the one with the lowest id. The keys are not used."""

    def __call__(self, logits: Array, keys: Array) -> Array:
        """logits float32 [B, V], keys [B] -> int32 [B]."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """A random token. Filters apply in the order of the attributes, which is that of Hugging Face's ``generate``.

    Attributes:
        temperature: above 0; logits are divided by it. Temperature 0 is :class:`Greedy`, and refused here.
        top_k: keep the k most likely tokens, and those as likely as the k-th.
        top_p: of those, keep the most likely tokens until their probabilities sum to top_p or more, and those as likely
            as the last one kept. Above 0, up to 1.
        min_p: of those, keep tokens at least min_p times as likely as the most likely one. From 0 to 1.

    None leaves a filter out. Tokens as likely as each other are kept or removed together, so the order of ids decides
    nothing, and the noise of a token depends on its id and the row's key alone: a filter that removes nothing changes
    nothing.

    Raises:
        ValueError: a number outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        # Leaves may also be tracers or placeholders, when JAX rebuilds the pytree: they have been checked before.
        _check("temperature", self.temperature, lambda x: x > 0, "above 0 (for temperature 0 use Greedy())")
        _check("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1, or None")
        _check("min_p", self.min_p, lambda x: 0 <= x <= 1, "from 0 to 1, or None")
        for name in ("temperature", "top_p", "min_p"):
            if isinstance(getattr(self, name), int):  # an int would be another type of argument, and compile again
                object.__setattr__(self, name, float(getattr(self, name)))
        k = self.top_k
        if k is not None and (isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1):
            raise ValueError(f"top_k must be a whole number, 1 or more, or None, got {k!r}")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """logits float32 [B, V], keys [B] (typed PRNG keys) -> int32 [B]."""
        return jax.vmap(lambda key, row: jax.random.categorical(key, row).astype(jnp.int32))(keys, self.filter(logits))

    def filter(self, logits: Array) -> Array:
        """The logits [..., V] that :func:`jax.random.categorical` draws from; removed tokens are -inf."""
        logits = logits.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kth = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits >= kth, logits, -jnp.inf)
        if self.top_p is not None:
            logits = _keep_top_p(logits, self.top_p)
        if self.min_p is not None:
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(self.min_p, jnp.float32))
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits


def _keep_top_p(logits: Array, top_p) -> Array:
    ordered = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A rounded sum may reach 1 too early, so top_p = 1 is spelled out: it keeps everything.
    kept = (before < top_p) | (jnp.asarray(top_p) >= 1)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def _check(name: str, value, allowed: Callable[[float], bool], wanted: str) -> None:
    if isinstance(value, str) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number {wanted}, got {value!r}")
    if isinstance(value, (int, float, np.number)):
        with np.errstate(over="ignore", under="ignore"):
            single = np.float32(value)  # what a program computes with; one that is not normal is 0 there
        single = 0.0 if abs(single) < np.finfo(np.float32).tiny else float(single)
        if not (math.isfinite(single) and allowed(single)):
            raise ValueError(f"{name} must be {wanted}, got {value} ({single} as a float32)")


def row_keys(seeds: Array) -> Array:
    """Typed keys [B] from uint32 [B] seeds, of one fixed kind: some kinds draw differently under ``vmap``."""
    return jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)


def step_keys(keys: Array, step: Array) -> Array:
    """The keys [B] of one step from the rows' keys [B]; ``step`` int32 [] or [B] counts new tokens from 0."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(step, keys.shape))
