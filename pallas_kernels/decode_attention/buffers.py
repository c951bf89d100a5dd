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
from kitty_jax.pallas_kernels.decode_attention.block import (
    Block,
    Running,
    Tiles,
    flatten,
    in_tiles,
    query_row,
    raise_maximum,
)
from kitty_jax.pallas_kernels.decode_attention.pages import KeyShareStage, PageWalk, walked_pages
from kitty_jax.pallas_kernels.decode_attention.shape import COLUMNS, WARPS
from kitty_jax.pallas_kernels.ptx import Value

CHUNK = 16  # tokens of a piece of work: the rows of an mma
EVEN_HALVES, ODD_HALVES = 0x5410, 0x7632  # of two words, for prmt


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
        return (self.count + (CHUNK - 1)) // CHUNK


class DenseStage:
    """Addresses and fragments of full-precision tokens of one sequence and head."""

    def __init__(self, block: Block):
        self.block, self.shape = block, block.shape
        first = block.column_group * COLUMNS
        column = ptx.minimum(first + block.g, self.shape.columns - 1)
        self.query = query_row(block, column) * self.shape.row_bytes + block.c * 16
        self.tokens_of_columns = [(first + block.c * 2 + k) // self.shape.group for k in range(2)]

    def edge_split(self) -> Value:
        """The block that takes the edge pages: the one that the next page would go to."""
        return (self.block.value_pages // WARPS) % self.shape.splits

    def first_chunk(self) -> Value:
        """The first chunk of this warp; it takes every ``units``-th.

        Warps with fewer pages come first; between blocks, the one with the edge pages comes last.
        """
        block, units = self.block, self.shape.units
        if self.shape.splits == 1:
            return (block.warp - block.value_pages) & (WARPS - 1)
        first = (self.edge_split() + 1) * WARPS
        return (block.unit + units - first) % units

    def row(self, slots: int, slot: Value) -> Value:
        """Offset in an array [B, K, slots, D] of this sequence and head's ``slot``."""
        return self.block.bh * (slots * self.shape.row_bytes) + slot * self.shape.row_bytes

    def ring_row(self, slot: Value) -> Value:
        """Offset in the rings of the value in ``slot`` of this head's, which may be one round too far."""
        slots = self.shape.ring_slots
        return self.row(slots, ptx.select(slot > slots - 1, slot - slots, slot))

    def sink(self) -> Region:
        """The first tokens of the sequence."""
        mem, sink = self.block.mem, self.shape.sink
        count = ptx.minimum(ptx.maximum(self.block.length(), 0), sink)
        offset = lambda i: self.row(sink, i)  # noqa: E731
        return Region(mem.sink_keys, mem.sink_values, offset, offset, count)

    def tail(self) -> Region:
        """Keys that do not fill a page, with their values in the ring."""
        mem, n, page = self.block.mem, self.block.past_sink, self.shape.fmt.page
        in_tail = n % page
        start = (n - in_tail) % self.shape.ring_slots
        return Region(
            keys=mem.tail_keys,
            values=mem.ring_values,
            key_offset=lambda i: self.row(page, i),
            value_offset=lambda i: self.ring_row(start + i),
            count=in_tail,
        )

    def new(self) -> Region:
        """The new tokens, [B, T, K, D]. A sequence with none still gets a finite, meaningless row."""
        shape, mem, block = self.shape, self.block.mem, self.block
        count = ptx.i32(1)
        if shape.tokens > 1:
            num_new = ptx.load_global(1, ptx.address(mem.num_new, block.b, 4))
            count = ptx.minimum(ptx.maximum(num_new, 1), shape.tokens)

        def offset(i: Value) -> Value:
            token = block.b * shape.tokens + i
            return (token * shape.kv_heads + block.h) * shape.row_bytes

        return Region(mem.new_keys, mem.new_values, offset, offset, count, causal=shape.tokens > 1)

    def load_queries(self) -> list[list[Value]]:
        """Column g's channels 32 j + 8 c + (0 ... 7), for each j: B operands of two k-tiles a load."""
        pointer = ptx.address(self.block.mem.q, ptx.opaque(self.query))
        return [ptx.load_global(4, pointer, 64 * j) for j in range(self.shape.head_dim // 32)]

    def load_keys(self, base: Value, offset: Callable[[Value], Value]) -> list[list[list[Value]]]:
        """Rows g and g + 8 of a chunk, channels as in :meth:`load_queries`: [rh][j][word]. ``offset(row)``: bytes from
        base to a row's key."""
        out, own = [], self.block.c * 16
        for rh in range(2):
            pointer = ptx.address(base, ptx.opaque(offset(self.block.g + 8 * rh) + own))
            out.append([ptx.load_global(4, pointer, 64 * j) for j in range(self.shape.head_dim // 32)])
        return out

    def load_values(self, base: Value, offset: Callable[[int, int], Value]) -> list[list[list[list[Value]]]]:
        """Four tokens, channels 64 h + 8 g + (0 ... 7): [kh][e][h][word]. ``offset(kh, e)``: bytes from base to token
        8 kh + 2 c + e."""
        own = self.block.g * 16

        def load(kh: int, e: int) -> list[list[Value]]:
            pointer = ptx.address(base, ptx.opaque(offset(kh, e) + own))
            return [ptx.load_global(4, pointer, 128 * h, ordered=True) for h in range(self.shape.head_dim // 64)]

        return [[load(kh, e) for e in range(2)] for kh in range(2)]

    def prefetch_row(self, base: Value, offset: Value) -> None:
        """Rows of 16 tokens; lane l asks for half l % 2 of that of token l / 2, at ``offset`` bytes from ``base``."""
        half = (self.block.lane & 1) * (self.shape.row_bytes // 2)
        ptx.prefetch(ptx.address(base, offset + half))

    def scores(self, keys) -> list[Value]:
        s = [ptx.f32(0.0)] * 4
        for j, q in enumerate(self.load_queries()):
            for i in range(2):
                a = [keys[rh][j][2 * i + kh] for kh in range(2) for rh in range(2)]
                s = ptx.mma(s, a, q[2 * i : 2 * i + 2], self.shape.kind)
        return s

    def weight_operands(self, p: list[Value]) -> list[list[Value]]:
        """Weights of 16 tokens as B operands whose sum they are: one for float16, two for bfloat16."""
        pairs, kind = [p[0:2], p[2:4]], self.shape.kind
        operands = [[ptx.pack_pair(*pair, kind) for pair in pairs]]
        if kind == "bf16":
            rest = []
            for pair, word in zip(pairs, operands[0], strict=True):
                rounded = ptx.unpack_pair(word, kind)
                rest.append(ptx.pack_pair(*(x - y for x, y in zip(pair, rounded, strict=True)), kind))
            operands.append(rest)
        return [[ptx.movmatrix(x) for x in words] for words in operands]

    def accumulate(self, o: Tiles, values, operands: list[list[Value]]) -> Tiles:
        """o tile 4 h + i has channel 64 h + 8 g + 2 i + rh in row 8 rh + g."""
        out = list(o)
        for h in range(self.shape.head_dim // 64):
            for i in range(4):
                # Low halves of a word are even channels (rh = 0), high halves odd ones.
                a = [
                    ptx.prmt(values[kh][0][h][i], values[kh][1][h][i], halves)
                    for kh in range(2)
                    for halves in (EVEN_HALVES, ODD_HALVES)
                ]
                for b in operands:
                    out[4 * h + i] = ptx.mma(out[4 * h + i], a, b, self.shape.kind)
        return out


def attend_region(stage: DenseStage, region: Region, first_chunk: Value, state: Running) -> Running:
    """Every ``units``-th chunk of a region."""
    block, shape = stage.block, stage.shape
    factor, last = ptx.f32(shape.logit_factor), region.count - 1

    def body(chunk: Value, *flat: Value):
        state = Running.of(flat)
        first = chunk * CHUNK

        def token(row: Value) -> Value:
            return ptx.minimum(first + row, last)  # rows past the end repeat the last token, with weight 0

        def value_offset(kh: int, e: int) -> Value:
            return region.value_offset(token(block.c * 2 + (8 * kh + e)))

        # Values have no registers to wait in yet: L2 gets them meanwhile.
        stage.prefetch_row(region.values, region.value_offset(token(block.lane >> 1)))
        keys = stage.load_keys(region.keys, lambda row: region.key_offset(token(row)))
        s = [x * factor for x in stage.scores(keys)]
        for k in range(2):
            limit = region.count
            if region.causal:
                limit = ptx.minimum(limit, stage.tokens_of_columns[k] + 1)
            for rh in range(2):
                is_seen = first + block.g + 8 * rh < limit
                s[2 * rh + k] = ptx.select(is_seen, s[2 * rh + k], float("-inf"))
        state = raise_maximum(state, [ptx.fmax(s[k], s[k + 2]) for k in range(2)])
        p = [ptx.ex2(s[i] - state.m[i % 2]) for i in range(4)]
        sums = [state.l[k] + (p[k] + p[k + 2]) for k in range(2)]
        operands = stage.weight_operands(p)
        # Only now values fill registers, those that keys have left. Four blocks a multiprocessor need <= 128.
        ptx.sync_warp()
        o = stage.accumulate(state.o, stage.load_values(region.values, value_offset), operands)
        return state._replace(l=sums, o=o).flat()

    return Running.of(ptx.loop(first_chunk, region.chunks, shape.units, state.flat(), body))


def attend_regions(stage: DenseStage, state: Running) -> Running:
    """Sink, key tail and new tokens, their chunks dealt out to the warps."""
    chunk, units = stage.first_chunk(), stage.shape.units  # the next chunk of this warp, counted over all regions
    regions = (DenseStage.sink, DenseStage.tail, DenseStage.new)
    for region_of in regions if stage.shape.sink else regions[1:]:
        fresh = DenseStage(stage.block.refreshed())
        region = region_of(fresh)
        state = attend_region(fresh, region, chunk, state)
        done = (ptx.maximum(region.chunks - chunk, 0) + (units - 1)) // units
        chunk = chunk + done * units - region.chunks
    return state


def attend_edge_pages(stage: DenseStage, state: Running) -> Running:
    """Pages n_v to n_k - 1: keys from the record, values from the ring. The four warps of one block take two row tiles
    of a page each. The first record is in every warp's key slot or on its way there (:class:`.PageWalk`)."""
    if not stage.shape.has_edges:
        return state
    stage = DenseStage(stage.block.refreshed())
    block, shape = stage.block, stage.shape
    keys, walk = KeyShareStage(block), PageWalk(block)
    phases = walked_pages(block)
    stop = block.key_pages
    if shape.splits > 1:
        stop = ptx.select(block.split == stage.edge_split(), stop, block.value_pages)
    with ptx.when((block.key_pages > 0) & (block.value_pages > stop - 1)):  # the record that nobody uses
        ptx.mbarrier_wait(block.key_barrier, phases & 1)

    def body(page: Value, parity: Value, *flat: Value):
        state = Running.of(flat)
        ptx.mbarrier_wait(block.key_barrier, parity)
        scores, bias = keys.logits()
        state = raise_maximum(state, keys.top(scores, bias))
        p, state = keys.weights(state, scores, bias)
        operands = [flatten(stage.weight_operands(tile)) for tile in p]
        start = page * shape.fmt.page % shape.ring_slots
        own = start + block.c * 32 + block.warp * 2

        def add_tile(i: Value, *o: Value):
            # Row 8 rh + g of tile r is token 16 g + 2 r + rh; the warp's tiles are w + 4 i.
            first = ptx.opaque(own + i * 8)

            def offset(kh: int, e: int) -> Value:
                return stage.ring_row(first + (16 * e + kh))

            words = [ptx.select(i == 0, a, b) for a, b in zip(*operands, strict=True)]
            words = [words[k : k + 2] for k in range(0, len(words), 2)]
            values = stage.load_values(block.mem.ring_values, offset)
            return flatten(stage.accumulate(in_tiles(o), values, words))

        ptx.sync_warp()
        o = in_tiles(ptx.loop(ptx.i32(0), ptx.opaque(2), 1, flatten(state.o), add_tile))
        ptx.sync_warp()
        following = page + 1
        walk.slots.fetch_key(following < stop, walk.slots.record(walk.page(following)))
        return [1 - parity, *state._replace(o=o).flat()]

    _, *flat = ptx.loop(block.value_pages, stop, 1, [phases & 1, *state.flat()], body)
    return Running.of(flat)
