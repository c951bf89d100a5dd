"""Attention of a warp over full-precision tokens: sink, key tail, new tokens, and edge pages (quantized keys, values
still in the ring).

Full-precision rows go from global memory to registers in 16-byte loads, with no detour through shared memory. Two
freedoms make that possible. A contraction may run over channels in any order, so a lane's 16 bytes of a key serve as
its share of two k-tiles as they are (q is loaded the same way). And the rows of an accumulator may be any channels, so
a lane's 16 bytes of four values become A operands by pairing the halves of words of two tokens.

A warp's piece of work is 16 tokens of one region, or a quarter of an edge page. Weights are split into two bfloat16 for
bfloat16 values, because one alone (2**-9) would be the largest error of the whole operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import Block, Running, query_row, raise_maximum
from kitty_jax.pallas_kernels.decode_attention.pages import KeyShareStage, PageWalk, walked_pages
from kitty_jax.pallas_kernels.decode_attention.shape import COLUMNS, WARPS
from kitty_jax.pallas_kernels.ptx import Value

CHUNK = 16  # tokens of a piece of work: the rows of an mma


class Region(NamedTuple):
    """Tokens that lie together: offsets in bytes of token i's key in the array ``keys`` and of its value in ``values``.

    Offsets are 32 bits from the start of an array: a 64-bit pointer into it would take the loop a second register.
    """

    keys: Value
    values: Value
    key_offset: Callable[[Value], Value]
    value_offset: Callable[[Value], Value]
    count: Value
    causal: bool = False

    @property
    def chunks(self) -> Value:
        return ptx.div(ptx.add(self.count, CHUNK - 1), CHUNK)


class DenseStage:
    """Addresses and fragments of full-precision tokens of one sequence and head."""

    def __init__(self, block: Block):
        plan = block.plan
        self.block, self.plan = block, plan
        self.row_bytes = 2 * plan.head_dim
        self.ring_slots = plan.window + plan.fmt.page
        first = ptx.mul(block.column_group, COLUMNS)
        column = ptx.min_signed(ptx.add(first, block.g), plan.columns - 1)
        self.query = ptx.add(ptx.mul(query_row(block, column), self.row_bytes), ptx.mul(block.c, 16))
        columns = [ptx.add(ptx.add(first, ptx.mul(block.c, 2)), k) for k in range(2)]
        self.tokens_of_columns = [ptx.div(x, plan.group) for x in columns]

    def edge_split(self) -> Value:
        """The block that takes the edge pages: the one whose turn it would be among pages."""
        return ptx.rem(ptx.div(self.block.value_pages, WARPS), self.plan.splits)

    def first_chunk(self) -> Value:
        """The first chunk of this warp; it takes every ``units``-th.

        Warps with fewer pages come first; between blocks, the one with the edge pages comes last.
        """
        block, units = self.block, self.plan.units
        if self.plan.splits == 1:
            return ptx.bit_and(ptx.sub(block.warp, block.value_pages), WARPS - 1)
        first = ptx.mul(ptx.add(self.edge_split(), 1), WARPS)
        return ptx.rem(ptx.sub(ptx.add(block.unit, units), first), units)

    def head_offset(self, rows: int) -> Value:
        """Offset of the first of this sequence and head's ``rows`` rows in an array [B, K, rows, D]."""
        return ptx.mul(self.block.bh, rows * self.row_bytes)

    def sink(self) -> Region:
        """The first tokens of the sequence."""
        plan, mem, block = self.plan, self.block.mem, self.block
        length = ptx.load_global(1, ptx.address(mem.lengths, block.b, 4))
        offset = lambda i: ptx.add(self.head_offset(plan.sink), ptx.mul(i, self.row_bytes))  # noqa: E731
        count = ptx.min_signed(ptx.max_signed(length, 0), plan.sink)
        return Region(mem.sink_keys, mem.sink_values, offset, offset, count)

    def tail(self) -> Region:
        """Keys that do not fill a page, with their values in the ring."""
        plan, mem, block = self.plan, self.block.mem, self.block
        n, page = block.past_sink, plan.fmt.page
        in_tail = ptx.rem(n, page)
        start = ptx.rem(ptx.sub(n, in_tail), self.ring_slots)
        return Region(
            keys=mem.tail_keys,
            values=mem.ring_values,
            key_offset=lambda i: ptx.add(self.head_offset(page), ptx.mul(i, self.row_bytes)),
            value_offset=lambda i: self.ring_offset(ptx.add(start, i)),
            count=in_tail,
        )

    def new(self) -> Region:
        """The new tokens, [B, T, K, D]. A sequence with none still gets a finite, meaningless row."""
        plan, mem, block = self.plan, self.block.mem, self.block
        count = ptx.i32(1)
        if plan.tokens > 1:
            num_new = ptx.load_global(1, ptx.address(mem.num_new, block.b, 4))
            count = ptx.min_signed(ptx.max_signed(num_new, 1), plan.tokens)

        def offset(i: Value) -> Value:
            token = ptx.add(ptx.mul(block.b, plan.tokens), i)
            return ptx.mul(ptx.add(ptx.mul(token, plan.kv_heads), block.h), self.row_bytes)

        return Region(mem.new_keys, mem.new_values, offset, offset, count, causal=True)

    def load_queries(self) -> list[list[Value]]:
        """Column g's channels 32 j + 8 c + (0 ... 7), for each j: B operands of two k-tiles a load."""
        pointer = ptx.address(self.block.mem.q, ptx.opaque(self.query), 1)
        return [ptx.load_global(4, pointer, 64 * j) for j in range(self.plan.head_dim // 32)]

    def load_keys(self, base: Value, offset: Callable[[Value], Value]) -> list[list[list[Value]]]:
        """Rows g and g + 8 of a chunk, channels as in :meth:`load_queries`: [rh][j][word]. ``offset(row)``: bytes from
        base to a row's key."""
        out, own = [], ptx.mul(self.block.c, 16)
        for rh in range(2):
            pointer = ptx.address(base, ptx.opaque(ptx.add(offset(ptx.add(self.block.g, 8 * rh)), own)), 1)
            out.append([ptx.load_global(4, pointer, 64 * j) for j in range(self.plan.head_dim // 32)])
        return out

    def load_values(self, base: Value, offset: Callable[[int, int], Value]) -> list[list[list[list[Value]]]]:
        """Four tokens, channels 64 h + 8 g + (0 ... 7): [kh][e][h][word]. ``offset(kh, e)``: bytes from base to token
        8 kh + 2 c + e."""
        own = ptx.mul(self.block.g, 16)

        def load(kh: int, e: int) -> list[list[Value]]:
            pointer = ptx.address(base, ptx.opaque(ptx.add(offset(kh, e), own)), 1)
            return [ptx.load_global(4, pointer, 128 * h, ordered=True) for h in range(self.plan.head_dim // 64)]

        return [[load(kh, e) for e in range(2)] for kh in range(2)]

    def prefetch_row(self, base: Value, offset: Value) -> None:
        """Rows of 16 tokens; lane l asks for half l % 2 of that of token l / 2, at ``offset`` bytes from ``base``."""
        half = ptx.mul(ptx.bit_and(self.block.lane, 1), self.row_bytes // 2)
        ptx.prefetch(ptx.address(base, ptx.add(offset, half), 1))

    def scores(self, keys) -> list[Value]:
        s = [ptx.f32(0.0)] * 4
        for j, q in enumerate(self.load_queries()):
            for i in range(2):
                a = [keys[rh][j][2 * i + kh] for kh in range(2) for rh in range(2)]
                s = ptx.mma(s, a, q[2 * i : 2 * i + 2], self.plan.kind)
        return s

    @property
    def weight_count(self) -> int:
        """Words that hold a lane's weights of 16 tokens."""
        return 4 if self.plan.kind == "bf16" else 2

    def weight_words(self, p: list[Value]) -> list[list[Value]]:
        """Weights of 16 tokens as pairs of words whose sum they are: one pair for float16, two for bfloat16. movmatrix
        makes B operands of them."""
        pairs = [p[0:2], p[2:4]]
        words = [ptx.pack_pair(*pair, self.plan.kind) for pair in pairs]
        out = [words]
        if self.plan.kind == "bf16":
            rest = []
            for pair, word in zip(pairs, words, strict=True):
                rounded = ptx.unpack_pair(word, "bf16")
                rest.append(ptx.pack_pair(*(ptx.fsub(x, y) for x, y in zip(pair, rounded, strict=True)), "bf16"))
            out.append(rest)
        return out

    def accumulate(self, o, values, operands: list[list[Value]]):
        """o tile 4 h + i has channel 64 h + 8 g + 2 i + rh in row 8 rh + g."""
        out = list(o)
        for h in range(self.plan.head_dim // 64):
            for i in range(4):
                # Low halves of a word are even channels (rh = 0), high halves odd ones.
                a = [
                    ptx.prmt(values[kh][0][h][i], values[kh][1][h][i], (0x5410, 0x7632)[rh])
                    for kh in range(2)
                    for rh in range(2)
                ]
                for b in operands:
                    out[4 * h + i] = ptx.mma(out[4 * h + i], a, b, self.plan.kind)
        return out

    def ring_offset(self, slot: Value) -> Value:
        """Offset in the rings of the value in ``slot`` of this head's, which may be one turn too far."""
        past = ptx.less(ptx.i32(self.ring_slots - 1), slot)
        slot = ptx.select(past, ptx.sub(slot, self.ring_slots), slot)
        return ptx.add(self.head_offset(self.ring_slots), ptx.mul(slot, self.row_bytes))


def attend_region(stage: DenseStage, region: Region, first_chunk: Value, step: int, state: Running) -> Running:
    """Every step-th chunk of a region."""
    block, plan = stage.block, stage.plan
    factor, last = ptx.f32(plan.logit_factor), ptx.sub(region.count, 1)

    def body(chunk: Value, *flat: Value):
        state = Running.of(flat)
        first = ptx.mul(chunk, CHUNK)

        def token(row: Value) -> Value:
            return ptx.min_signed(ptx.add(first, row), last)  # rows past the end repeat the last token, with weight 0

        def value_offset(kh: int, e: int) -> Value:
            return region.value_offset(token(ptx.add(ptx.mul(block.c, 2), 8 * kh + e)))

        # Values have no registers to wait in yet: L2 gets them meanwhile.
        stage.prefetch_row(region.values, region.value_offset(token(ptx.shr(block.lane, 1))))
        keys = stage.load_keys(region.keys, lambda row: region.key_offset(token(row)))
        s = [ptx.fmul(x, factor) for x in stage.scores(keys)]
        for k in range(2):
            limit = region.count
            if region.causal and plan.tokens > 1:
                limit = ptx.min_signed(limit, ptx.add(stage.tokens_of_columns[k], 1))
            for rh in range(2):
                seen = ptx.less(ptx.add(ptx.add(first, block.g), 8 * rh), limit)
                s[2 * rh + k] = ptx.select(seen, s[2 * rh + k], ptx.f32(float("-inf")))
        state = raise_maximum(state, [ptx.fmax(s[k], s[k + 2]) for k in range(2)])
        p = [ptx.ex2(ptx.fsub(s[i], state.m[i % 2])) for i in range(4)]
        sums = [ptx.fadd(state.l[k], ptx.fadd(p[k], p[k + 2])) for k in range(2)]
        operands = [[ptx.movmatrix(x) for x in words] for words in stage.weight_words(p)]
        # Only now values fill registers, those that keys have left. Four blocks a multiprocessor need <= 128.
        ptx.sync_warp()
        o = stage.accumulate(state.o, stage.load_values(region.values, value_offset), operands)
        return state._replace(l=sums, o=o).flat()

    return Running.of(ptx.loop(first_chunk, region.chunks, ptx.i32(step), state.flat(), body))


def attend_regions(stage: DenseStage, state: Running) -> Running:
    """Sink, key tail and new tokens, their chunks dealt out to the warps."""
    chunk, units = stage.first_chunk(), stage.plan.units  # the next chunk of this warp, counted over all regions
    for name in ("sink", "tail", "new") if stage.plan.sink else ("tail", "new"):
        fresh = DenseStage(stage.block.refreshed())
        region = {"sink": fresh.sink, "tail": fresh.tail, "new": fresh.new}[name]()
        state = attend_region(fresh, region, chunk, units, state)
        done = ptx.div(ptx.add(ptx.max_signed(ptx.sub(region.chunks, chunk), 0), units - 1), units)
        chunk = ptx.sub(ptx.add(chunk, ptx.mul(done, units)), region.chunks)
    return state


def attend_edge_pages(stage: DenseStage, state: Running) -> Running:
    """Pages n_v to n_k - 1: keys from the record, values from the ring. The four warps of one block take two row tiles
    of a page each. The first record is in every warp's key slot or on its way there (:class:`.PageWalk`)."""
    if not stage.plan.has_edges:
        return state
    stage = DenseStage(stage.block.refreshed())
    block, plan = stage.block, stage.plan
    keys, walk = KeyShareStage(block), PageWalk(block)
    phases = walked_pages(block)
    stop = block.key_pages
    if plan.splits > 1:
        stop = ptx.select(ptx.equal(block.split, stage.edge_split()), stop, block.value_pages)
    unused = ptx.both(ptx.less(ptx.i32(0), block.key_pages), ptx.less(ptx.sub(stop, 1), block.value_pages))
    with ptx.when(unused):
        ptx.mbarrier_wait(block.key_barrier, ptx.bit_and(phases, 1))

    def body(page: Value, parity: Value, *flat: Value):
        state = Running.of(flat)
        ptx.mbarrier_wait(block.key_barrier, parity)
        scores, bias = keys.logits()
        state = raise_maximum(state, keys.top(scores, bias))
        p, state = keys.weights(state, scores, bias)
        operands = [[[ptx.movmatrix(x) for x in words] for words in stage.weight_words(tile)] for tile in p]
        start = ptx.rem(ptx.mul(page, plan.fmt.page), stage.ring_slots)
        own = ptx.add(ptx.add(start, ptx.mul(block.c, 32)), ptx.mul(block.warp, 2))
        flat_operands = [x for tile in operands for words in tile for x in words]
        half = len(flat_operands) // 2

        def add_tile(i: Value, *o: Value):
            # Row 8 rh + g of tile r is token 16 g + 2 r + rh; the warp's tiles are w + 4 i.
            first = ptx.opaque(ptx.add(own, ptx.mul(i, 8)))

            def offset(kh: int, e: int) -> Value:
                return stage.ring_offset(ptx.add(first, 16 * e + kh))

            words = [
                ptx.select(ptx.equal(i, 0), a, b)
                for a, b in zip(flat_operands[:half], flat_operands[half:], strict=True)
            ]
            words = [words[k : k + 2] for k in range(0, half, 2)]
            values = stage.load_values(block.mem.ring_values, offset)
            tiles = stage.accumulate([list(o[k : k + 4]) for k in range(0, len(o), 4)], values, words)
            return [x for tile in tiles for x in tile]

        ptx.sync_warp()
        o = [x for tile in state.o for x in tile]
        o = ptx.loop(ptx.i32(0), ptx.opaque(2), ptx.i32(1), o, add_tile)
        o = [o[k : k + 4] for k in range(0, len(o), 4)]
        ptx.sync_warp()
        following = ptx.add(page, 1)
        walk.slots.fetch_key(ptx.less(following, stop), walk.slots.record(walk.page(following)))
        return [ptx.sub(ptx.i32(1), parity), *state._replace(o=o).flat()]

    init = [ptx.bit_and(phases, 1), *state.flat()]
    _, *flat = ptx.loop(block.value_pages, stop, ptx.i32(1), init, body)
    return Running.of(flat)
