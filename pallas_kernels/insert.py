"""Writing one new token per sequence into a layer's full-precision buffers, after attention has read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.pages import LayerKV


def insert_token(kv: LayerKV, keys: Array, values: Array, lengths: Array, active: Array) -> LayerKV:
    """The buffers with one token of every active sequence at its place; the others keep theirs.

    Args:
        kv: the layer before the token.
        keys, values: [B, K, D].
        lengths: int32 [B], tokens cached before.
        active: bool [B].
    """
    b, every = jnp.arange(lengths.shape[0]), slice(None)
    s, g, ring = kv.sink, kv.fmt.page, kv.ring_values.shape[2]
    in_sink, past = active & (lengths < s), active & (lengths >= s)
    i = jnp.maximum(lengths - s, 0)
    sink_slot = jnp.where(in_sink, lengths, s)
    tail_slot = jnp.where(past, i % g, g)
    ring_slot = jnp.where(past, i % ring, ring)
    return dataclasses.replace(
        kv,
        sink_keys=_set(kv.sink_keys, (b, every, sink_slot), keys),
        sink_values=_set(kv.sink_values, (b, every, sink_slot), values),
        tail_keys=_set(kv.tail_keys, (b, every, tail_slot), keys),
        ring_values=_set(kv.ring_values, (b, every, ring_slot), values),
    )


def _set(x: Array, index: tuple, new: Array) -> Array:
    return x.at[index].set(new.astype(x.dtype), mode="drop") if x.size else x


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
