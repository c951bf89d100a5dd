"""Writing one new token per sequence into a layer's full-precision buffers: in ``jax.numpy``, and by the kernel that
attends to it.

The kernel may write while others read: nobody reads the token's place. The ring's slot of token i held token
i - (R + G), which is in a value page by now; the slot in the tail lies past the tokens that count, and so does the one
in the sink.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import Block
from kitty_jax.pallas_kernels.decode_attention.shape import WARPS
from kitty_jax.pallas_kernels.page_format import LayerKV, buffer_slots
from kitty_jax.pallas_kernels.ptx import Value


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
    past = active & (lengths >= s)
    tail_slot, ring_slot = buffer_slots(jnp.maximum(lengths - s, 0), g, ring)
    sink_at = (b, every, jnp.where(active & (lengths < s), lengths, s))
    return dataclasses.replace(
        kv,
        sink_keys=put(kv.sink_keys, sink_at, keys),
        sink_values=put(kv.sink_values, sink_at, values),
        tail_keys=put(kv.tail_keys, (b, every, jnp.where(past, tail_slot, g)), keys),
        ring_values=put(kv.ring_values, (b, every, jnp.where(past, ring_slot, ring)), values),
    )


def put(x: Array, index: tuple, new: Array) -> Array:
    """``x`` with ``new``, in its dtype, at ``index``; what lies outside is dropped."""
    return x.at[index].set(new.astype(x.dtype), mode="drop") if x.size else x


class NewToken(NamedTuple):
    """A lane's 16 bytes of the new key (lanes 0 to 15) or value, on their way, and whether they are wanted."""

    words: list[Value]
    num_new: Value


def load_token(block: Block) -> NewToken:
    """Asks for the token. Every warp does: cheaper than a branch."""
    shape, mem = block.shape, block.mem
    row = block.b * shape.kv_heads + block.h
    source = ptx.select(block.lane < 16, mem.new_keys, mem.new_values)
    words = ptx.load_global(4, ptx.address(ptx.address(source, row, shape.row_bytes), _piece(block), 16))
    return NewToken(words, ptx.load_global(1, ptx.address(mem.num_new, block.b, 4)))


def store_token(block: Block, token: NewToken) -> None:
    """Writes it: the last warp of the first block of the sequence and head."""
    shape, mem = block.shape, block.mem
    wanted = (block.warp == WARPS - 1) & (token.num_new > 0)
    wanted = wanted & (block.split + block.column_group == 0)
    if shape.head_dim < 128:
        wanted = wanted & ((block.lane & 15) < shape.head_dim // 8)
    with ptx.when(wanted):
        is_key = block.lane < 16
        tail_slot, ring_slot = buffer_slots(block.past_sink, shape.fmt.page, shape.ring_slots)
        target = ptx.select(is_key, mem.tail_keys, mem.ring_values)
        row = ptx.select(is_key, block.bh * shape.fmt.page + tail_slot, block.bh * shape.ring_slots + ring_slot)
        if shape.sink:
            length = block.length()
            in_sink = length < shape.sink
            target = ptx.select(in_sink, ptx.select(is_key, mem.sink_keys, mem.sink_values), target)
            row = ptx.select(in_sink, block.bh * shape.sink + length, row)
        ptx.store_global(token.words, ptx.address(ptx.address(target, row, shape.row_bytes), _piece(block), 16))


def _piece(block: Block) -> Value:
    """Which 16 bytes of a row are the lane's."""
    return block.lane & (min(16, block.shape.head_dim // 8) - 1)
