"""Partial softmax results and their merge (flash-decoding).

A partial result over some keys is (o, m, l): the running maximum m of the logits, the sum l of ``exp(logit - m)`` and
the sum o of ``exp(logit - m) * value``, all float32. Partials over disjoint sets of keys merge exactly, in any order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

MASKED = -1e30  # "minus infinity" that stays finite under subtraction


class Partial(NamedTuple):
    """o [..., D], m [...], l [...], float32."""

    o: Array
    m: Array
    l: Array  # noqa: E741


def empty_partial(shape: tuple[int, ...], head_dim: int) -> Partial:
    """The partial over no keys: m [shape] is MASKED, o and l are zero."""
    return Partial(
        jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def partial_attention(logits: Array, mask: Array, values: Array) -> Partial:
    """Partial over one block of keys.

    Args:
        logits: float32 [B, K, Q, T, X] for X keys.
        mask: bool, broadcasts against logits; False keys do not exist.
        values: [B, K, X, D]; what rows of keys hold that no query sees does not matter, be it NaN.
    """
    logits = jnp.where(mask, logits, MASKED)
    values = jnp.where(jnp.any(mask, (-3, -2))[..., None], values, 0)
    m = jnp.max(logits, -1)
    p = jnp.where(mask, jnp.exp(logits - m[..., None]), 0)
    o = jnp.einsum("bkqtx,bkxd->bkqtd", p, values.astype(jnp.float32), precision="highest")
    return Partial(o, m, jnp.sum(p, -1))


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the union of two disjoint sets of keys."""
    m = jnp.maximum(a.m, b.m)
    fa, fb = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(a.o * fa[..., None] + b.o * fb[..., None], m, a.l * fa + b.l * fb)


def finish(*partials: Partial) -> Array:
    """Merges partials and normalises: float32 [..., D]. Queries with no key at all give zeros."""
    total = functools.reduce(merge, partials)
    return total.o / jnp.maximum(total.l, 1e-30)[..., None]
