"""What one thread of the decode-attention kernel knows at the start, the staging of q, and the running softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.shape import (
    COLUMNS,
    QUERY_LIMIT_LOG2,
    QUERY_SHIFT,
    WARPS,
    DecodePlan,
    padded_rows,
)
from kitty_jax.pallas_kernels.partials import MASKED
from kitty_jax.pallas_kernels.ptx import Value

# Weights are 2**(logit - m) in float16. m is set PEAK_LOG2 below the largest logit, so that small weights stay clear
# of float16's subnormals, and moves when a weight would exceed 2**WEIGHT_LOG2: 2**11 times the largest value scale, 2
# * 2**5 / 3 or 4 * (2 * 2**5 / 15), is below 65,504.
PEAK_LOG2 = 3.0
WEIGHT_LOG2 = 11.0
LANES_OF_A_COLUMN = (4, 8, 16)  # lanes with the same c = lane % 4 hold the same two columns


class Operands(NamedTuple):
    """Global addresses, in the order of the kernel's operands."""

    q: Value
    new_keys: Value
    new_values: Value
    key_pages: Value
    value_pages: Value
    sink_keys: Value
    sink_values: Value
    tail_keys: Value
    ring_values: Value
    page_table: Value
    lengths: Value
    num_new: Value


@dataclasses.dataclass
class Block:
    """Coordinates of a thread and its block. Lane ``4 * g + c`` holds row g of a fragment and columns 2c, 2c + 1 of
    accumulators."""

    plan: DecodePlan
    mem: Operands
    smem: Value
    tid: Value
    lane: Value
    warp: Value
    g: Value
    c: Value
    split: Value
    column_group: Value
    b: Value
    h: Value
    bh: Value
    warp_base: Value  # this warp's part of shared memory
    past_sink: Value  # n
    key_pages: Value  # n_k
    value_pages: Value  # n_v

    def refreshed(self) -> Block:
        """The same coordinates, computed again from a few of them, so that a stage's registers do not outlive it."""
        plan, tid = self.plan, ptx.special_register("tid.x")
        lane, warp, bh, n = ptx.bit_and(tid, 31), *(ptx.opaque(x) for x in (self.warp, self.bh, self.past_sink))
        full_values = ptx.div(ptx.max_signed(ptx.sub(n, plan.window), 0), plan.fmt.page)
        return dataclasses.replace(
            self,
            tid=tid,
            lane=lane,
            warp=warp,
            g=ptx.shr(lane, 2),
            c=ptx.bit_and(lane, 3),
            b=ptx.div(bh, plan.kv_heads),
            h=ptx.rem(bh, plan.kv_heads),
            bh=bh,
            warp_base=ptx.add(self.smem, ptx.add(ptx.mul(warp, plan.smem.warp_bytes), plan.smem.warps)),
            past_sink=n,
            key_pages=ptx.min_signed(ptx.div(n, plan.fmt.page), plan.pages),
            value_pages=ptx.min_signed(full_values, plan.pages),
        )

    @property
    def unit(self) -> Value:
        """Index of the warp among those that share the work."""
        return ptx.add(ptx.mul(self.split, WARPS), self.warp)

    @property
    def partial(self) -> Value:
        """Index of this block's partial result."""
        item = ptx.add(ptx.mul(self.bh, self.plan.column_groups), self.column_group)
        return ptx.add(ptx.mul(item, self.plan.splits), self.split)

    @property
    def key_barrier(self) -> Value:
        return ptx.add(self.warp_base, self.plan.smem.barriers)

    @property
    def value_barrier(self) -> Value:
        return ptx.add(self.warp_base, self.plan.smem.barriers + 8)


def start_block(plan: DecodePlan, mem: Operands, smem: Value) -> Block:
    """Coordinates of this thread."""
    tid, block = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    lane, warp = ptx.bit_and(tid, 31), ptx.warp_index(tid)
    split, rest = ptx.rem(block, plan.splits), ptx.div(block, plan.splits)  # neighbours, as clusters want them
    column_group, bh = ptx.rem(rest, plan.column_groups), ptx.div(rest, plan.column_groups)
    b, h = ptx.div(bh, plan.kv_heads), ptx.rem(bh, plan.kv_heads)
    length = ptx.load_global(1, ptx.address(mem.lengths, b, 4))
    n = ptx.max_signed(ptx.sub(length, plan.sink), 0)
    full_values = ptx.div(ptx.max_signed(ptx.sub(n, plan.window), 0), plan.fmt.page)
    return Block(
        plan=plan,
        mem=mem,
        smem=smem,
        tid=tid,
        lane=lane,
        warp=warp,
        g=ptx.shr(lane, 2),
        c=ptx.bit_and(lane, 3),
        split=split,
        column_group=column_group,
        b=b,
        h=h,
        bh=bh,
        warp_base=ptx.add(smem, ptx.add(ptx.mul(warp, plan.smem.warp_bytes), plan.smem.warps)),
        past_sink=n,
        key_pages=ptx.min_signed(ptx.div(n, plan.fmt.page), plan.pages),
        value_pages=ptx.min_signed(full_values, plan.pages),
    )


def row_offset(row: Value) -> Value:
    """Byte offset of a padded 16-byte row."""
    return ptx.mul(ptx.add(row, ptx.shr(row, 3)), 16)


def query_row(block: Block, column: Value) -> Value:
    """Row [B, T, N] of ``column``, an index below T * Q over all column groups."""
    plan = block.plan
    token, i = ptx.div(column, plan.group), ptx.rem(column, plan.group)
    head = ptx.add(ptx.mul(block.h, plan.group), i)
    return ptx.add(ptx.mul(ptx.add(ptx.mul(block.b, plan.tokens), token), plan.kv_heads * plan.group), head)


def load_queries(block: Block) -> list[list[Value]]:
    """Asks for q of all columns: words of a lane's D / 32 neighbouring channels, a list for each column."""
    plan = block.plan
    per_lane = plan.head_dim // 32
    columns = []
    for j in range(plan.stored_columns):
        column = ptx.add(ptx.mul(block.column_group, COLUMNS), j)
        row = query_row(block, ptx.min_signed(column, plan.columns - 1))
        pointer = ptx.address(ptx.address(block.mem.q, row, 2 * plan.head_dim), block.lane, 2 * per_lane)
        words = ptx.load_global(per_lane // 2, pointer)
        columns.append([words] if per_lane == 2 else words)
    return columns


def stage_queries(block: Block, loaded: list[list[Value]]) -> None:
    """Writes q as rows [D][8 columns] of float16, times 2**-(QUERY_SHIFT + e), and e (0 but for huge or tiny q) to
    shared memory.

    Every warp has all of q and so finds the same e; warp w writes columns 2 w and 2 w + 1. Columns past the last are
    zero. Ends in a block barrier.
    """
    plan = block.plan
    per_lane = plan.head_dim // 32
    columns = []
    for j, words in enumerate(loaded):
        numbers = [x for word in words for x in ptx.unpack_pair(word, plan.kind)]
        if plan.column_groups > 1:
            real = ptx.less(ptx.add(ptx.mul(block.column_group, COLUMNS), j), plan.columns)
            numbers = [ptx.select(real, x, ptx.f32(0.0)) for x in numbers]
        columns.append(numbers)
    top = ptx.tree(ptx.fmax, [ptx.fabs(x) for column in columns for x in column])
    top = ptx.reduce_lanes(ptx.fmax, top, (1, 2, 4, 8, 16))
    log2_top = ptx.sub(ptx.shr(ptx.bits_of(top), 23), 126)  # top < 2**log2_top
    ordinary = ptx.both(ptx.less(log2_top, QUERY_LIMIT_LOG2 + 1), ptx.less(ptx.i32(-1), log2_top))
    over = ptx.select(ordinary, ptx.i32(0), ptx.sub(log2_top, QUERY_LIMIT_LOG2))
    factor = ptx.power_of_two(ptx.sub(ptx.i32(-QUERY_SHIFT), over))
    columns += [[ptx.f32(0.0)] * per_lane] * (COLUMNS - len(columns))
    own = [[ptx.f32(0.0)] * per_lane] * 2
    for pair in range(WARPS):
        mine = ptx.equal(block.warp, pair)
        own = [[ptx.select(mine, x, y) for x, y in zip(columns[2 * pair + i], own[i], strict=True)] for i in range(2)]
    first = row_offset(ptx.mul(block.lane, per_lane))
    for i, (low, high) in enumerate(zip(*own, strict=True)):
        pair = ptx.pack_pair(ptx.fmul(low, factor), ptx.fmul(high, factor), "f16")
        ptx.store_shared([pair], ptx.add(ptx.add(block.smem, first), ptx.mul(block.warp, 4)), 16 * i)
    with ptx.when(ptx.equal(block.tid, 0)):
        ptx.store_shared([over], ptx.add(block.smem, plan.smem.exponents))
    ptx.sync_block()


class Running(NamedTuple):
    """A warp's partial result, in accumulator layout: entry k of m, l and bias is column 2c + k.

    m is uniform over the lanes of a column; l and bias are this lane's share. The output is ``o + bias``;
    full-precision tokens have no bias.
    """

    m: list[Value]
    l: list[Value]  # noqa: E741
    bias: list[Value]
    o: list[list[Value]]  # a list of four for each tile of 16 channels

    @classmethod
    def empty(cls, tiles: int, *, biased: bool) -> Running:
        zero = ptx.f32(0.0)
        return cls([ptx.f32(MASKED)] * 2, [zero] * 2, [zero] * 2 * biased, [[zero] * 4 for _ in range(tiles)])

    def flat(self) -> list[Value]:
        return [*self.m, *self.l, *self.bias, *(x for tile in self.o for x in tile)]

    @classmethod
    def of(cls, flat: Sequence[Value]) -> Running:
        flat = list(flat)
        first = 4 + len(flat) % 4  # o is in fours, m and l are four
        return cls(flat[0:2], flat[2:4], flat[4:first], [flat[i : i + 4] for i in range(first, len(flat), 4)])


def raise_maximum(state: Running, top: Sequence[Value]) -> Running:
    """Moves m where a weight of the lane's two columns would exceed 2**WEIGHT_LOG2; ``top`` are the largest logits the
    lane sees."""
    grow = ptx.any_greater([(top[k], ptx.fadd(state.m[k], ptx.f32(WEIGHT_LOG2))) for k in range(2)])

    def rescaled():
        tops = [ptx.reduce_lanes(ptx.fmax, top[k], LANES_OF_A_COLUMN) for k in range(2)]
        m = [ptx.fmax(state.m[k], ptx.fsub(tops[k], ptx.f32(PEAK_LOG2))) for k in range(2)]
        factor = [ptx.ex2(ptx.fsub(state.m[k], m[k])) for k in range(2)]
        return [*m, *(ptx.fmul(x, factor[i % 2]) for i, x in enumerate(state.flat()[2:]))]

    return Running.of(ptx.choose(grow, rescaled, state.flat()))


def mma_score_factor(plan: DecodePlan) -> float:
    """From products of the staged q to logits in powers of two."""
    return plan.logit_factor * 2.0**QUERY_SHIFT


__all__ = [
    "Block",
    "Operands",
    "Running",
    "load_queries",
    "mma_score_factor",
    "padded_rows",
    "query_row",
    "raise_maximum",
    "row_offset",
    "stage_queries",
    "start_block",
]
