"""Order where XLA sees none: values that pass through unchanged, but not before others are there.

By arithmetic: XLA keeps what it cannot prove to be zero. An ``optimization_barrier`` is gone when it decides on copies
and on the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def ordered(x: Array, after: Array) -> Array:
    """``x`` [B, T, K, D], unchanged, but not computable before ``after`` [B, T, N, D].

    A reader and a writer of the same buffer with no data between them make XLA copy the buffer. So what is to be
    written passes through here together with what the reader produced, each KV head with its own (heads may be on
    different devices). An ``optimization_barrier`` would not do: it is gone when XLA decides on copies.
    """
    own = after.reshape(*x.shape[:3], -1)[..., :1]
    return jnp.where(zero(own) == 0, x, jnp.zeros_like(x))


def not_before(x: Array, others: Sequence[Array]) -> Array:
    """``x``, unchanged, but not computable before ``others`` are.

    For the order of a model's layers: nothing else makes XLA finish with one layer's cache before it turns to the next
    one's, and what it reads early or writes late takes memory meanwhile, for all layers.
    """
    marks = [zero(y[(0,) * y.ndim]) for y in others if y.size]
    first = (0,) * x.ndim
    return x.at[first].set(jnp.where(sum(marks, jnp.int32(0)) == 0, x[first], 0)) if x.size else x


def zero(x: Array) -> Array:
    """int32 zeros that XLA does not know to be zeros."""
    return jnp.minimum((x > 0).astype(jnp.int32), 0)
