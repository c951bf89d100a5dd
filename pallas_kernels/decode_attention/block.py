"""What one thread of the decode-attention kernel knows at the start, the staging of q, and the running softmax."""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence
from typing import NamedTuple

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.shape import COLUMNS, QUERY_LIMIT_LOG2, QUERY_SHIFT, WARPS, KernelShape
from kitty_jax.pallas_kernels.page_format import BUFFERS
from kitty_jax.pallas_kernels.partials import MASKED
from kitty_jax.pallas_kernels.ptx import Value

# Weights are 2**(logit - m) in float16. m is set PEAK_LOG2 below the largest logit, so that small weights stay clear
# of float16's subnormals, and moves when a weight would exceed 2**WEIGHT_LOG2: 2**11 times the largest value scale, 2
# * 2**5 / 3 or 4 * (2 * 2**5 / 15), is below 65,504.
PEAK_LOG2 = 3.0
WEIGHT_LOG2 = 11.0
ALL_LANES = (1, 2, 4, 8, 16)
LANES_OF_A_COLUMN = (4, 8, 16)  # lanes with the same c = lane % 4 hold the same two columns

Tiles = list[list[Value]]  # accumulators of an mma, four values each


Operands = collections.namedtuple(  # of the kernel: arrays, or their global addresses
    "Operands",
    ("q", "new_keys", "new_values", "key_pages", "value_pages", *BUFFERS, "page_table", "lengths", "num_new"),
)


class Block:
    """Coordinates of a thread and its block. Lane ``4 * g + c`` holds row g of a fragment and columns 2c, 2c + 1 of
    accumulators.

    Attributes:
        tid, lane, warp, g, c: of the thread.
        split, column_group, b, h, bh: of the block; ``bh`` is b * K + h.
        warp_base: address of this warp's part of shared memory.
        past_sink, key_pages, value_pages: n, n_k and n_v of the sequence.
    """

    def __init__(
        self,
        shape: KernelShape,
        mem: Operands,
        smem: Value,
        tid: Value,
        warp: Value,
        place: tuple[Value, Value, Value],
        past_sink: Value | None = None,
    ):
        self.shape, self.mem, self.smem = shape, mem, smem
        self.tid, self.lane, self.warp = tid, tid & 31, warp
        self.split, self.column_group, self.bh = place
        self.b, self.h = self.bh // shape.kv_heads, self.bh % shape.kv_heads
        if past_sink is None:
            past_sink = ptx.maximum(self.length() - shape.sink, 0)
        self.past_sink = past_sink
        self.g, self.c = self.lane >> 2, self.lane & 3
        self.warp_base = smem + (warp * shape.smem.warp_bytes + shape.smem.warps)
        self.key_pages = ptx.minimum(past_sink // shape.fmt.page, shape.pages)
        self.value_pages = ptx.minimum(ptx.maximum(past_sink - shape.window, 0) // shape.fmt.page, shape.pages)

    @classmethod
    def start(cls, shape: KernelShape, mem: Operands, smem: Value) -> Block:
        """Coordinates of this thread."""
        tid, block = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
        split, rest = block % shape.splits, block // shape.splits  # neighbours, as clusters want them
        place = (split, rest % shape.column_groups, rest // shape.column_groups)
        return cls(shape, mem, smem, tid, ptx.warp_index(tid), place)

    def refreshed(self) -> Block:
        """The same coordinates, computed again from a few of them, so that a stage's registers do not outlive it."""
        tid = ptx.special_register("tid.x")
        warp, bh, past_sink = (ptx.opaque(x) for x in (self.warp, self.bh, self.past_sink))
        return Block(self.shape, self.mem, self.smem, tid, warp, (self.split, self.column_group, bh), past_sink)

    def length(self) -> Value:
        """Tokens cached of the sequence."""
        return ptx.load_global(1, ptx.address(self.mem.lengths, self.b, 4))

    @property
    def unit(self) -> Value:
        """Index of the warp among those that share the work."""
        return self.split * WARPS + self.warp

    @property
    def partial(self) -> Value:
        """Index of this block's partial result."""
        return (self.bh * self.shape.column_groups + self.column_group) * self.shape.splits + self.split

    @property
    def key_barrier(self) -> Value:
        return self.warp_base + self.shape.smem.barriers

    @property
    def value_barrier(self) -> Value:
        return self.warp_base + (self.shape.smem.barriers + 8)


def row_offset(row: Value) -> Value:
    """Byte offset of a padded 16-byte row."""
    return (row + (row >> 3)) * 16


def query_row(block: Block, column: Value) -> Value:
    """Row [B, T, N] of ``column``, an index below T * Q over all column groups."""
    shape = block.shape
    token, i = column // shape.group, column % shape.group
    head = block.h * shape.group + i
    return (block.b * shape.tokens + token) * shape.heads + head


def load_queries(block: Block) -> list[list[Value]]:
    """Asks for q of all columns: words of a lane's D / 32 neighbouring channels, a list for each column."""
    shape = block.shape
    words = shape.head_dim // 64
    columns = []
    for j in range(shape.stored_columns):
        row = query_row(block, ptx.minimum(block.column_group * COLUMNS + j, shape.columns - 1))
        pointer = ptx.address(ptx.address(block.mem.q, row, shape.row_bytes), block.lane, 4 * words)
        loaded = ptx.load_global(words, pointer)
        columns.append([loaded] if words == 1 else loaded)
    return columns


def stage_queries(block: Block, loaded: list[list[Value]]) -> None:
    """Writes q as rows [D][8 columns] of float16, times 2**-(QUERY_SHIFT + e), and e (0 but for huge or tiny q) to
    shared memory.

    Every warp has all of q and so finds the same e; warp w writes columns 2 w and 2 w + 1. Columns past the last are
    zero. Ends in a block barrier.
    """
    shape = block.shape
    per_lane = shape.head_dim // 32
    columns = []
    for j, words in enumerate(loaded):
        numbers = [x for word in words for x in ptx.unpack_pair(word, shape.kind)]
        if shape.column_groups > 1:
            is_real = block.column_group * COLUMNS + j < shape.columns
            numbers = [ptx.select(is_real, x, 0.0) for x in numbers]
        columns.append(numbers)
    top = ptx.tree(ptx.fmax, [ptx.fabs(x) for column in columns for x in column])
    top = ptx.reduce_lanes(ptx.fmax, top, ALL_LANES)
    log2_top = (ptx.bits_of(top) >> 23) - 126  # top < 2**log2_top
    is_ordinary = (log2_top < QUERY_LIMIT_LOG2 + 1) & (log2_top > -1)
    over = ptx.select(is_ordinary, 0, log2_top - QUERY_LIMIT_LOG2)
    factor = ptx.power_of_two(-QUERY_SHIFT - over)
    columns += [[ptx.f32(0.0)] * per_lane] * (COLUMNS - len(columns))
    own = [[ptx.f32(0.0)] * per_lane] * 2
    for pair in range(WARPS):
        mine = block.warp == pair
        own = [[ptx.select(mine, x, y) for x, y in zip(columns[2 * pair + i], own[i], strict=True)] for i in range(2)]
    first = row_offset(block.lane * per_lane)
    for i, (low, high) in enumerate(zip(*own, strict=True)):
        pair = ptx.pack_pair(low * factor, high * factor, "f16")
        ptx.store_shared([pair], block.smem + first + block.warp * 4, 16 * i)
    with ptx.when(block.tid == 0):
        ptx.store_shared([over], block.smem + shape.smem.exponent)
    ptx.sync_block()


def flatten(tiles: Tiles) -> list[Value]:
    return [x for tile in tiles for x in tile]


def in_tiles(flat: Sequence[Value]) -> Tiles:
    return [list(flat[i : i + 4]) for i in range(0, len(flat), 4)]


class Running(NamedTuple):
    """A warp's partial result, in accumulator layout: entry k of m, l and bias is column 2c + k.

    m is uniform over the lanes of a column; l and bias are this lane's share. The output is ``o + bias``;
    full-precision tokens have no bias.
    """

    m: list[Value]
    l: list[Value]  # noqa: E741
    bias: list[Value]
    o: Tiles  # one for each 16 channels

    @classmethod
    def empty(cls, tiles: int, *, biased: bool) -> Running:
        zero = ptx.f32(0.0)
        return cls([ptx.f32(MASKED)] * 2, [zero] * 2, [zero] * 2 * biased, [[zero] * 4 for _ in range(tiles)])

    def flat(self) -> list[Value]:
        return [*self.m, *self.l, *self.bias, *flatten(self.o)]

    @classmethod
    def of(cls, flat: Sequence[Value]) -> Running:
        flat = list(flat)
        first = 4 + len(flat) % 4  # o is in fours, m and l are four
        return cls(flat[0:2], flat[2:4], flat[4:first], in_tiles(flat[first:]))


def raise_maximum(state: Running, top: Sequence[Value]) -> Running:
    """Moves m where a weight of the lane's two columns would exceed 2**WEIGHT_LOG2; ``top`` are the largest logits the
    lane sees."""
    grow = ptx.any_greater([(top[k], state.m[k] + WEIGHT_LOG2) for k in range(2)])

    def rescaled():
        tops = [ptx.reduce_lanes(ptx.fmax, top[k], LANES_OF_A_COLUMN) for k in range(2)]
        m = [ptx.fmax(state.m[k], tops[k] - PEAK_LOG2) for k in range(2)]
        factor = [ptx.ex2(state.m[k] - m[k]) for k in range(2)]
        return [*m, *(x * factor[i % 2] for i, x in enumerate(state.flat()[2:]))]

    return Running.of(ptx.choose(grow, rescaled, state.flat()))


def sum_of_column(x: Value) -> Value:
    """Sum over the lanes that hold the same two columns."""
    return ptx.reduce_lanes(operator.add, x, LANES_OF_A_COLUMN)
