"""Merging partial results: the warps of a block in shared memory, the blocks of a cluster through shared memory, and
more blocks of a sequence and head in a second kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import ALL_LANES, Block, Running, query_row, sum_of_column
from kitty_jax.pallas_kernels.decode_attention.shape import COLUMNS, WARPS, KernelShape, tile_unit
from kitty_jax.pallas_kernels.ptx import Value

TILE_STATS = 2 * COLUMNS * 4  # bytes: 8 maxima, 8 sums
SMALLEST_SUM = 1e-30


def page_channel(block: Block, tile: int, rh: int) -> tuple[Value, float]:
    """(channel of row 8 rh + g of an o tile of the page stage, its unit)."""
    return block.g + (16 * tile + 8 * rh), tile_unit(tile)


def dense_channel(block: Block, tile: int, rh: int) -> tuple[Value, float]:
    """The same for the full-precision stage."""
    return block.g * 8 + (64 * (tile // 4) + 2 * (tile % 4) + rh), 1.0


def store_partial(block: Block, state: Running, slot: int, index: int, channel: Callable) -> None:
    """The warp's partial result to shared memory: o as float32 [D][8] at ``slot`` of its part, m and l as tile 4 *
    index + warp."""
    ptx.sync_warp()
    total, bias = [sum_of_column(x) for x in state.l], [sum_of_column(x) for x in state.bias]
    own_columns = block.c * 8
    stats = block.smem + (block.warp * TILE_STATS + own_columns)
    offset = block.shape.smem.stats + index * WARPS * TILE_STATS
    ptx.store_shared(state.m, stats, offset)
    ptx.store_shared(total, stats, offset + 4 * COLUMNS)
    base = block.warp_base + slot + own_columns
    for tile, values in enumerate(state.o):
        for rh in range(2):
            row, unit = channel(block, tile, rh)
            pair = values[2 * rh : 2 * rh + 2]
            if bias:
                pair = [ptx.fma(pair[k], ptx.f32(unit), bias[k]) for k in range(2)]
            ptx.store_shared(pair, base + row * (4 * COLUMNS))


def _weighted(xs: list[Value], factors: list[Value]) -> Value:
    return ptx.tree(operator.add, [x * f for x, f in zip(xs, factors, strict=True)])


def merge_warps(block: Block, slots: list[int], outs: list[Value]) -> None:
    """Merges the partial results at ``slots`` of every warp, then those of the cluster's blocks.

    Writes the output, or, for a merge in a second kernel, this block's partial result and statistics.
    """
    shape, smem = block.shape, block.smem
    tiles = WARPS * len(slots)
    stats = smem + shape.smem.stats
    summary = shape.smem.stats + 2 * WARPS * TILE_STATS
    ptx.sync_block()
    with ptx.when(block.tid < COLUMNS):
        own = stats + block.tid * 4
        m = [ptx.load_shared(1, own, TILE_STATS * i, "f") for i in range(tiles)]
        top = ptx.tree(ptx.fmax, m)
        factors = [ptx.ex2(x - top) for x in m]
        sums = [ptx.load_shared(1, own, TILE_STATS * i + 4 * COLUMNS, "f") for i in range(tiles)]
        for i, factor in enumerate(factors):
            ptx.store_shared([factor], own, TILE_STATS * i)
        total = _weighted(sums, factors)
        own = smem + block.tid * 4
        ptx.store_shared([top], own, summary)
        ptx.store_shared([total], own, summary + 4 * COLUMNS)
    ptx.sync_block()
    own_channel = block.tid < shape.head_dim
    with ptx.when(own_channel):
        sums = [_channel_sums(block, slots, half) for half in range(-(-shape.stored_columns // 4))]
        columns = [x for some in sums for x in some][: shape.stored_columns]
        if shape.cluster > 1:
            for half, some in enumerate(sums):  # over what only this thread has read
                ptx.store_shared(some, _row(block, slots[0]), 16 * half)
        elif shape.merges_in_memory:
            row = block.partial * shape.stored_columns
            pointer = ptx.address(ptx.address(outs[0], row, 4 * shape.head_dim), block.tid, 4)
            for j, x in enumerate(columns):
                ptx.store_global([x], pointer, 4 * shape.head_dim * j)
        else:
            for j, x in enumerate(columns):
                _write_column(block, j, x, ptx.load_shared(1, smem, summary + 4 * (COLUMNS + j), "f"), outs[0])
    if shape.cluster > 1:
        ptx.sync_cluster()
        with ptx.when(own_channel):
            for j in range(shape.stored_columns):
                with ptx.when(block.split == j % shape.splits):
                    _write_column(block, j, *_cluster_sums(block, slots[0], j, summary), outs[0])
        ptx.sync_cluster()  # a block must not end while others read it
    if shape.merges_in_memory:
        with ptx.when(block.tid < 4):
            words = ptx.load_shared(4, smem + block.tid * 16, summary)
            ptx.store_global(words, ptx.address(ptx.address(outs[1], block.partial, TILE_STATS), block.tid, 16))


def _row(block: Block, slot: int) -> Value:
    """Channel tid's row of the first warp's partial result: all eight columns."""
    return block.smem + (block.shape.smem.warps + slot) + block.tid * (4 * COLUMNS)


def _cluster_sums(block: Block, slot: int, j: int, summary: int) -> tuple[Value, Value]:
    """(channel tid's sum, sum of weights) of column j over the blocks of the cluster."""
    tops, totals, sums = [], [], []
    for rank in range(block.shape.cluster):
        there = ptx.in_block(block.smem, rank)
        tops.append(ptx.load_cluster(there, summary + 4 * j))
        totals.append(ptx.load_cluster(there, summary + 4 * (COLUMNS + j)))
        sums.append(ptx.load_cluster(ptx.in_block(_row(block, slot), rank), 4 * j))
    top = ptx.tree(ptx.fmax, tops)
    factors = [ptx.ex2(x - top) for x in tops]
    return _weighted(sums, factors), _weighted(totals, factors)


def _channel_sums(block: Block, slots: list[int], half: int) -> list[Value]:
    """Channel tid's sum over all warps for columns 4 half ... 4 half + 3."""
    smem = block.shape.smem
    channel = block.smem + smem.warps + block.tid * (4 * COLUMNS)
    sums = [ptx.f32(0.0)] * 4
    for index, slot in enumerate(slots):
        for warp in range(WARPS):
            factor_at = smem.stats + (index * WARPS + warp) * TILE_STATS + 16 * half
            factors = ptx.load_shared(4, block.smem, factor_at, "f")
            o = ptx.load_shared(4, channel, warp * smem.warp_bytes + slot + 16 * half, "f")
            sums = [ptx.fma(x, f, s) for x, f, s in zip(o, factors, sums, strict=True)]
    return sums


def _write_column(block: Block, j: int, x: Value, total: Value, out: Value) -> None:
    """out [B, T, N, D]: channel tid of column j of the block's."""
    column = block.column_group * COLUMNS + j
    if block.shape.column_groups == 1:
        _write_output(block.shape, out, query_row(block, column), block.tid, x, total)
    else:
        with ptx.when(column < block.shape.columns):
            _write_output(block.shape, out, query_row(block, column), block.tid, x, total)


def _write_output(shape: KernelShape, out: Value, row: Value, channel: Value, x: Value, total: Value) -> None:
    """out [B * T * N, D]: one element, ``x`` divided by ``total``."""
    size = 4 if shape.out_kind == "f32" else 2
    pointer = ptx.address(ptx.address(out, row, size * shape.head_dim), channel, size)
    y = x * ptx.rcp(ptx.fmax(total, ptx.f32(SMALLEST_SUM)))
    ptx.store_global_as(y, pointer, 0, shape.out_kind)


MERGE_UNROLL = 4
MERGE_SMEM = WARPS * (32 * 4 * 4 + 16)


def emit_merge(shape: KernelShape, addresses: list[Value], smem: Value) -> None:
    """The second kernel: a block for each row of the output. Warp w takes partial results w, w + 4, ...; a lane four
    channels.

    Operands: o float32 [partials, columns, D], stats float32 [partials, 16], out [B, T, N, D].
    """
    o, stats, out = addresses
    tid, row = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    lane, warp = tid & 31, ptx.warp_index(tid)
    n, bt = row % shape.heads, row // shape.heads
    b, token = bt // shape.tokens, bt % shape.tokens
    h, i = n // shape.group, n % shape.group
    column = token * shape.group + i
    group, j = column // COLUMNS, column % COLUMNS
    first = ((b * shape.kv_heads + h) * shape.column_groups + group) * shape.splits
    channel = lane * 4 if shape.head_dim == 128 else (lane & 15) * 4

    def stat(index: Value, which: int) -> Value:
        pointer = ptx.address(ptx.address(stats, first + index, TILE_STATS), j, 4)
        return ptx.load_global(1, pointer, 4 * COLUMNS * which, "f")

    last = shape.splits - 1
    tops = [stat(ptx.minimum(lane + 32 * k, last), 0) for k in range(-(-shape.splits // 32))]
    top = ptx.reduce_lanes(ptx.fmax, ptx.tree(ptx.fmax, tops), ALL_LANES)

    def body(base: Value, *sums: Value):
        loads = []
        for k in range(MERGE_UNROLL):
            index = base + WARPS * k
            is_inside, index = index < shape.splits, ptx.minimum(index, last)
            record = (first + index) * shape.stored_columns + j
            pointer = ptx.address(ptx.address(o, record, 4 * shape.head_dim), channel, 4)
            loads.append((is_inside, stat(index, 0), stat(index, 1), ptx.load_global(4, pointer, 0, "f")))
        for is_inside, m, total, values in loads:
            factor = ptx.select(is_inside, ptx.ex2(m - top), 0.0)
            sums = [ptx.fma(x, factor, s) for x, s in zip([*values, total], sums, strict=True)]
        return sums

    sums = ptx.loop(warp, shape.splits, WARPS * MERGE_UNROLL, [ptx.f32(0.0)] * 5, body)
    ptx.store_shared(sums[:4], smem + (warp * 512 + lane * 16))
    totals = smem + WARPS * 512
    ptx.store_shared(sums[4:], totals + warp * 4)
    ptx.sync_block()
    with ptx.when(tid < shape.head_dim):
        channel_at = smem + tid * 4
        x = ptx.tree(operator.add, [ptx.load_shared(1, channel_at, 512 * w, "f") for w in range(WARPS)])
        total = ptx.tree(operator.add, [ptx.load_shared(1, totals, 4 * w, "f") for w in range(WARPS)])
        _write_output(shape, out, row, tid, x, total)
