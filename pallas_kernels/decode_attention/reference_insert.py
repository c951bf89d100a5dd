"""Writing one new token per sequence into a layer's full-precision buffers, after attention has read them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.page_format import LayerKV


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
        sink_keys=put(kv.sink_keys, (b, every, sink_slot), keys),
        sink_values=put(kv.sink_values, (b, every, sink_slot), values),
        tail_keys=put(kv.tail_keys, (b, every, tail_slot), keys),
        ring_values=put(kv.ring_values, (b, every, ring_slot), values),
    )


def put(x: Array, index: tuple, new: Array) -> Array:
    """``x`` with ``new``, in its dtype, at ``index``; what lies outside is dropped."""
    return x.at[index].set(new.astype(x.dtype), mode="drop") if x.size else x
