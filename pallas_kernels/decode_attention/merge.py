"""Merging partial results: the warps of a block in shared memory, the blocks of a cluster through shared memory, and
more blocks of a sequence and head in a second kernel."""

from __future__ import annotations

from collections.abc import Callable

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import LANES_OF_A_COLUMN, Block, Running, query_row
from kitty_jax.pallas_kernels.decode_attention.shape import COLUMNS, WARPS, DecodePlan, tile_unit
from kitty_jax.pallas_kernels.ptx import Value

TILE_STATS = 2 * COLUMNS * 4  # bytes: 8 maxima, 8 sums
SMALLEST_SUM = 1e-30


def page_channel(block: Block, tile: int, rh: int) -> tuple[Value, float]:
    """(channel of row 8 rh + g of an o tile of the page stage, its unit)."""
    return ptx.add(block.g, 16 * tile + 8 * rh), tile_unit(tile)


def dense_channel(block: Block, tile: int, rh: int) -> tuple[Value, float]:
    """The same for the full-precision stage."""
    return ptx.add(ptx.mul(block.g, 8), 64 * (tile // 4) + 2 * (tile % 4) + rh), 1.0


def store_partial(block: Block, state: Running, slot: int, index: int, channel: Callable) -> None:
    """The warp's partial result to shared memory: o as float32 [D][8] at ``slot`` of its part, m and l as tile 4 *
    index + warp."""
    ptx.sync_warp()
    total = [ptx.reduce_lanes(ptx.fadd, x, LANES_OF_A_COLUMN) for x in state.l]
    bias = [ptx.reduce_lanes(ptx.fadd, x, LANES_OF_A_COLUMN) for x in state.bias]
    own_columns = ptx.mul(block.c, 8)
    stats = ptx.add(block.smem, ptx.add(ptx.mul(block.warp, TILE_STATS), own_columns))
    offset = block.plan.smem.stats + index * WARPS * TILE_STATS
    ptx.store_shared(state.m, stats, offset)
    ptx.store_shared(total, stats, offset + 4 * COLUMNS)
    base = ptx.add(ptx.add(block.warp_base, slot), own_columns)
    for tile, values in enumerate(state.o):
        for rh in range(2):
            row, unit = channel(block, tile, rh)
            pair = values[2 * rh : 2 * rh + 2]
            if bias:
                pair = [ptx.fma(pair[k], ptx.f32(unit), bias[k]) for k in range(2)]
            ptx.store_shared(pair, ptx.add(base, ptx.mul(row, 4 * COLUMNS)))


def merge_warps(block: Block, slots: list[int], outs: list[Value]) -> None:
    """Merges the partial results at ``slots`` of every warp, then those of the cluster's blocks.

    Writes the output, or, for a merge in a second kernel, this block's partial result and statistics.
    """
    plan, smem = block.plan, block.smem
    tiles = WARPS * len(slots)
    stats = ptx.add(smem, plan.smem.stats)
    summary = plan.smem.stats + 2 * WARPS * TILE_STATS
    ptx.sync_block()
    with ptx.when(ptx.less(block.tid, COLUMNS)):
        own = ptx.add(stats, ptx.mul(block.tid, 4))
        m = [ptx.load_shared(1, own, TILE_STATS * i, "f") for i in range(tiles)]
        top = ptx.tree(ptx.fmax, m)
        factors = [ptx.ex2(ptx.fsub(x, top)) for x in m]
        sums = [ptx.load_shared(1, own, TILE_STATS * i + 4 * COLUMNS, "f") for i in range(tiles)]
        for i, factor in enumerate(factors):
            ptx.store_shared([factor], own, TILE_STATS * i)
        total = ptx.tree(ptx.fadd, [ptx.fmul(x, f) for x, f in zip(sums, factors, strict=True)])
        own = ptx.add(smem, ptx.mul(block.tid, 4))
        ptx.store_shared([top], own, summary)
        ptx.store_shared([total], own, summary + 4 * COLUMNS)
    ptx.sync_block()
    own_channel = ptx.less(block.tid, plan.head_dim)
    with ptx.when(own_channel):
        halves = range(-(-plan.stored_columns // 4))
        sums = [_channel_sums(block, slots, half) for half in halves]
        columns = [x for some in sums for x in some][: plan.stored_columns]
        if plan.cluster > 1:
            for half, some in enumerate(sums):  # over what only this thread has read
                ptx.store_shared(some, _row(block, slots[0]), 16 * half)
        elif plan.merges_in_memory:
            row = ptx.mul(block.partial, plan.stored_columns)
            pointer = ptx.address(ptx.address(outs[0], row, 4 * plan.head_dim), block.tid, 4)
            for j, x in enumerate(columns):
                ptx.store_global([x], pointer, 4 * plan.head_dim * j)
        else:
            for j, x in enumerate(columns):
                _write_column(block, j, x, ptx.load_shared(1, smem, summary + 4 * (COLUMNS + j), "f"), outs[0])
    if plan.cluster > 1:
        ptx.sync_cluster()
        with ptx.when(own_channel):
            for j in range(plan.stored_columns):
                with ptx.when(ptx.equal(block.split, j % plan.splits)):
                    _write_column(block, j, *_cluster_sums(block, slots[0], j, summary), outs[0])
        ptx.sync_cluster()  # a block must not end while others read it
    if plan.merges_in_memory:
        with ptx.when(ptx.less(block.tid, 4)):
            own = ptx.mul(block.tid, 16)
            words = ptx.load_shared(4, ptx.add(smem, own), summary)
            ptx.store_global(words, ptx.address(ptx.address(outs[1], block.partial, TILE_STATS), block.tid, 16))


def _row(block: Block, slot: int) -> Value:
    """Channel tid's row of the first warp's partial result: all eight columns."""
    return ptx.add(ptx.add(block.smem, block.plan.smem.warps + slot), ptx.mul(block.tid, 4 * COLUMNS))


def _cluster_sums(block: Block, slot: int, j: int, summary: int) -> tuple[Value, Value]:
    """(channel tid's sum, sum of weights) of column j over the blocks of the cluster."""
    tops, totals, sums = [], [], []
    for rank in range(block.plan.cluster):
        there = ptx.in_block(block.smem, rank)
        tops.append(ptx.load_cluster(there, summary + 4 * j))
        totals.append(ptx.load_cluster(there, summary + 4 * (COLUMNS + j)))
        sums.append(ptx.load_cluster(ptx.in_block(_row(block, slot), rank), 4 * j))
    top = ptx.tree(ptx.fmax, tops)
    factors = [ptx.ex2(ptx.fsub(x, top)) for x in tops]
    return tuple(
        ptx.tree(ptx.fadd, [ptx.fmul(x, f) for x, f in zip(xs, factors, strict=True)]) for xs in (sums, totals)
    )


def _channel_sums(block: Block, slots: list[int], half: int) -> list[Value]:
    """Channel tid's sum over all warps for columns 4 half ... 4 half + 3."""
    plan = block.plan
    first_warp = ptx.add(block.smem, plan.smem.warps)
    channel = ptx.add(first_warp, ptx.mul(block.tid, 4 * COLUMNS))
    sums = [ptx.f32(0.0)] * 4
    for index, slot in enumerate(slots):
        for warp in range(WARPS):
            factor_at = plan.smem.stats + (index * WARPS + warp) * TILE_STATS + 16 * half
            factors = ptx.load_shared(4, block.smem, factor_at, "f")
            o = ptx.load_shared(4, channel, warp * plan.smem.warp_bytes + slot + 16 * half, "f")
            sums = [ptx.fma(x, f, s) for x, f, s in zip(o, factors, sums, strict=True)]
    return sums


def _write_column(block: Block, j: int, x: Value, total: Value, out: Value) -> None:
    """out [B, T, N, D]: channel tid of column j of the block's, ``x`` divided by ``total``."""
    plan = block.plan
    size = {"f32": 4}.get(plan.out_kind, 2)
    column = ptx.add(ptx.mul(block.column_group, COLUMNS), j)

    def write():
        row = query_row(block, column)
        pointer = ptx.address(ptx.address(out, row, size * plan.head_dim), block.tid, size)
        y = ptx.fmul(x, ptx.rcp(ptx.fmax(total, ptx.f32(SMALLEST_SUM))))
        ptx.store_global_as(y, pointer, 0, plan.out_kind)

    if plan.column_groups == 1:
        write()
    else:
        with ptx.when(ptx.less(column, plan.columns)):
            write()


MERGE_UNROLL = 4
MERGE_SMEM = WARPS * (32 * 4 * 4 + 16)


def emit_merge(plan: DecodePlan, addresses: list[Value], smem: Value) -> None:
    """The second kernel: a block for each row of the output. Warp w takes partial results w, w + 4, ...; a lane four
    channels.

    Operands: o float32 [partials, columns, D], stats float32 [partials, 16], out [B, T, N, D].
    """
    o, stats, out = addresses
    tid, row = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    lane, warp = ptx.bit_and(tid, 31), ptx.warp_index(tid)
    heads = plan.kv_heads * plan.group
    n, bt = ptx.rem(row, heads), ptx.div(row, heads)
    b, token = ptx.div(bt, plan.tokens), ptx.rem(bt, plan.tokens)
    h, i = ptx.div(n, plan.group), ptx.rem(n, plan.group)
    column = ptx.add(ptx.mul(token, plan.group), i)
    group, j = ptx.div(column, COLUMNS), ptx.rem(column, COLUMNS)
    item = ptx.add(ptx.mul(ptx.add(ptx.mul(b, plan.kv_heads), h), plan.column_groups), group)
    first = ptx.mul(item, plan.splits)
    channel = ptx.mul(lane, 4) if plan.head_dim == 128 else ptx.mul(ptx.bit_and(lane, 15), 4)

    def stat(index: Value, which: int) -> Value:
        pointer = ptx.address(ptx.address(stats, ptx.add(first, index), TILE_STATS), j, 4)
        return ptx.load_global(1, pointer, 4 * COLUMNS * which, "f")

    last = plan.splits - 1
    tops = [stat(ptx.min_signed(ptx.add(lane, 32 * k), last), 0) for k in range(-(-plan.splits // 32))]
    top = ptx.reduce_lanes(ptx.fmax, ptx.tree(ptx.fmax, tops), (1, 2, 4, 8, 16))

    def body(base: Value, *sums: Value):
        loads = []
        for k in range(MERGE_UNROLL):
            index = ptx.add(base, WARPS * k)
            inside, index = ptx.less(index, plan.splits), ptx.min_signed(index, last)
            record = ptx.add(ptx.mul(ptx.add(first, index), plan.stored_columns), j)
            pointer = ptx.address(ptx.address(o, record, 4 * plan.head_dim), channel, 4)
            loads.append((inside, stat(index, 0), stat(index, 1), ptx.load_global(4, pointer, 0, "f")))
        for inside, m, total, values in loads:
            factor = ptx.select(inside, ptx.ex2(ptx.fsub(m, top)), ptx.f32(0.0))
            sums = [ptx.fma(x, factor, s) for x, s in zip([*values, total], sums, strict=True)]
        return sums

    step = ptx.i32(WARPS * MERGE_UNROLL)
    sums = ptx.loop(warp, ptx.i32(plan.splits), step, [ptx.f32(0.0)] * 5, body)
    own = ptx.add(smem, ptx.add(ptx.mul(warp, 512), ptx.mul(lane, 16)))
    ptx.store_shared(sums[:4], own)
    totals = ptx.add(smem, WARPS * 512)
    ptx.store_shared(sums[4:], ptx.add(totals, ptx.mul(warp, 4)))
    ptx.sync_block()
    with ptx.when(ptx.less(tid, plan.head_dim)):
        channel_at = ptx.add(smem, ptx.mul(tid, 4))
        x = ptx.tree(ptx.fadd, [ptx.load_shared(1, channel_at, 512 * w, "f") for w in range(WARPS)])
        total = ptx.tree(ptx.fadd, [ptx.load_shared(1, totals, 4 * w, "f") for w in range(WARPS)])
        size = {"f32": 4}.get(plan.out_kind, 2)
        pointer = ptx.address(ptx.address(out, row, size * plan.head_dim), tid, size)
        y = ptx.fmul(x, ptx.rcp(ptx.fmax(total, ptx.f32(SMALLEST_SUM))))
        ptx.store_global_as(y, pointer, 0, plan.out_kind)
