"""Writing a sequence's new token into its buffers, in the kernel that attends to it: its place is read by nobody.

The slot of token i of the ring held token i - (R + G), which is in a value page by now; the slot in the tail lies past
the tokens that count, and so does the one in the sink.
"""

from __future__ import annotations

from typing import NamedTuple

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import Block
from kitty_jax.pallas_kernels.decode_attention.shape import WARPS
from kitty_jax.pallas_kernels.ptx import Value


class NewToken(NamedTuple):
    """A lane's 16 bytes of the new key (lanes 0 to 15) or value, on their way, and whether they are wanted."""

    words: list[Value]
    num_new: Value


def load_token(block: Block) -> NewToken:
    """Asks for the token. Every warp does: cheaper than a branch."""
    plan, mem = block.plan, block.mem
    row_bytes = 2 * plan.head_dim
    row = ptx.add(ptx.mul(block.b, plan.kv_heads), block.h)
    source = ptx.select(ptx.less(block.lane, 16), mem.new_keys, mem.new_values)
    words = ptx.load_global(4, ptx.address(ptx.address(source, row, row_bytes), _piece(block), 16))
    return NewToken(words, ptx.load_global(1, ptx.address(mem.num_new, block.b, 4)))


def store_token(block: Block, token: NewToken) -> None:
    """Writes it: the last warp of the first block of the sequence and head."""
    plan, mem = block.plan, block.mem
    page, ring, n = plan.fmt.page, plan.window + plan.fmt.page, block.past_sink
    wanted = ptx.both(ptx.equal(block.warp, WARPS - 1), ptx.less(ptx.i32(0), token.num_new))
    wanted = ptx.both(wanted, ptx.equal(ptx.add(block.split, block.column_group), 0))
    if plan.head_dim < 128:
        wanted = ptx.both(wanted, ptx.less(ptx.bit_and(block.lane, 15), plan.head_dim // 8))
    with ptx.when(wanted):
        is_key = ptx.less(block.lane, 16)

        def row(slots: int, slot: Value) -> Value:
            return ptx.add(ptx.mul(block.bh, slots), slot)

        target = ptx.select(is_key, mem.tail_keys, mem.ring_values)
        place = ptx.select(is_key, row(page, ptx.rem(n, page)), row(ring, ptx.rem(n, ring)))
        if plan.sink:
            length = ptx.load_global(1, ptx.address(mem.lengths, block.b, 4))
            in_sink = ptx.less(length, plan.sink)
            target = ptx.select(in_sink, ptx.select(is_key, mem.sink_keys, mem.sink_values), target)
            place = ptx.select(in_sink, row(plan.sink, length), place)
        ptx.store_global(token.words, ptx.address(ptx.address(target, place, 2 * plan.head_dim), _piece(block), 16))


def _piece(block: Block) -> Value:
    """Which 16 bytes of a row are the lane's."""
    return ptx.bit_and(block.lane, min(16, block.plan.head_dim // 8) - 1)
