"""Attention of a warp over full-precision tokens: sink, key tail, new tokens, and edge pages (quantized keys, values
still in the ring).

Full-precision rows go from global memory to registers in 16-byte loads, with no detour through shared memory. Two
freedoms make that possible. A contraction may run over channels in any order, so a lane's 16 bytes of a key serve as
its share of two k-tiles as they are (q is loaded the same way). And the rows of an accumulator may be any channels, so
a lane's 16 bytes of four values become A operands by pairing the halves of words of two tokens.

A piece of work is 16 tokens of one region, or one edge page. Weights are split into two bfloat16 for bfloat16 values,
because one alone (2**-9) would be the largest error of the whole operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kitty_jax.pallas_kernels import mosaic_ptx as ptx
from kitty_jax.pallas_kernels.decode_block_mgpu import Block, Running, query_row, raise_maximum
from kitty_jax.pallas_kernels.decode_pages_mgpu import KEY_TILES, KeyStage, RecordSlots
from kitty_jax.pallas_kernels.decode_plan import COLUMNS, WARPS
from kitty_jax.pallas_kernels.mosaic_ptx import Value

CHUNK = 16  # tokens of a piece of work: the rows of an mma
NEVER = 1 << 20  # a chunk that no region has
WEIGHT_BYTES = 512  # room for the weights of a tile: 32 lanes x 4 words


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

    def warp_order(self) -> tuple[Value, Value]:
        """(the warp's place, the number of edge pages). Page p belongs to warp p % WARPS, so the first edge page's
        warp is first: it has no more pages than others."""
        block = self.block
        place = ptx.bit_and(ptx.sub(block.warp, block.value_pages), WARPS - 1)
        return place, ptx.sub(block.key_pages, block.value_pages)

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


def attend_region(stage: DenseStage, region: Region, first_chunk: Value, step: Value, state: Running) -> Running:
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

        keys = stage.load_keys(region.keys, lambda row: region.key_offset(token(row)))
        s = [ptx.fmul(x, factor) for x in stage.scores(keys)]
        for k in range(2):
            limit = region.count
            if region.causal:
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

    return Running.of(ptx.loop(first_chunk, region.chunks, step, state.flat(), body))


def attend_regions(stage: DenseStage, state: Running) -> Running:
    """Sink, key tail and new tokens, their chunks dealt out to the warps; where there is an edge page, its warp gets
    none."""
    place, edges = stage.warp_order()
    busy = ptx.less(ptx.i32(0), edges)
    step = ptx.select(busy, ptx.i32(WARPS - 1), ptx.i32(WARPS))
    # The next chunk of this warp, counted over all regions; out of reach for the warp of the edge page.
    chunk = ptx.select(busy, ptx.select(ptx.equal(place, 0), ptx.i32(NEVER), ptx.sub(place, 1)), place)
    for make_region in ([stage.sink] if stage.plan.sink else []) + [stage.tail, stage.new]:
        region = make_region()
        state = attend_region(stage, region, chunk, step, state)
        done = ptx.div(ptx.add(ptx.max_signed(ptx.sub(region.chunks, chunk), 0), ptx.sub(step, 1)), step)
        chunk = ptx.sub(ptx.add(chunk, ptx.mul(done, step)), region.chunks)
    return state


def attend_edge_pages(
    stage: DenseStage, slots: RecordSlots, phases: Value, meanwhile: Callable[[], Running]
) -> Running:
    """Pages n_v to n_k - 1: keys from the record, values from the ring. Page p belongs to warp p % WARPS.

    The first record is on its way during ``meanwhile()``, the warp's other work. ``phases``: phases the key barrier
    has passed.
    """
    block, plan = stage.block, stage.plan
    if not plan.pages or not plan.window:
        return meanwhile()
    first = ptx.add(block.value_pages, stage.warp_order()[0])
    row = ptx.address(block.mem.page_table, block.b, 4 * plan.pages)

    def fetch(page: Value) -> None:
        index = ptx.min_signed(page, plan.pages - 1)
        record = slots.record(ptx.load_global(1, ptx.address(row, index, 4)))
        slots.fetch_key(ptx.less(page, block.key_pages), record)

    fetch(first)
    _prefetch_values(stage, slots, first)
    state = meanwhile()
    keys = KeyStage(block)
    # The weights of a tile go through the key slot, which makes the loop over tiles a loop of the machine: it needs
    # few registers.
    own_words = ptx.add(slots.key, ptx.mul(block.lane, 16))

    def body(page: Value, parity: Value, *flat: Value):
        state = Running.of(flat)
        ptx.mbarrier_wait(block.key_barrier, parity)
        scores, bias = keys.logits()
        state = raise_maximum(state, keys.top(scores, bias))
        p, state = keys.weights(state, scores, bias)
        ptx.sync_warp()
        for tile in range(KEY_TILES):
            words = [x for pair in stage.weight_words(p[tile]) for x in pair]
            ptx.store_shared(words, own_words, WEIGHT_BYTES * tile)
        start = ptx.rem(ptx.mul(page, plan.fmt.page), stage.ring_slots)

        def add_tile(tile: Value, *o: Value):
            # Row 8 rh + g of tile r is token 16 g + 2 r + rh.
            def offset(kh: int, e: int) -> Value:
                token = ptx.add(ptx.mul(block.c, 32), ptx.add(ptx.mul(tile, 2), 16 * e + kh))
                return stage.ring_offset(ptx.add(start, token))

            values = stage.load_values(block.mem.ring_values, offset)
            words = ptx.load_shared(stage.weight_count, ptx.add(own_words, ptx.mul(tile, WEIGHT_BYTES)))
            words = [ptx.movmatrix(x) for x in words]
            operands = [words[i : i + 2] for i in range(0, len(words), 2)]
            tiles = stage.accumulate([list(o[i : i + 4]) for i in range(0, len(o), 4)], values, operands)
            return [x for tile in tiles for x in tile]

        o = [x for tile in state.o for x in tile]
        o = ptx.loop(ptx.i32(0), ptx.opaque(KEY_TILES), ptx.i32(1), o, add_tile)
        ptx.sync_warp()
        fetch(ptx.add(page, WARPS))
        state = state._replace(o=[o[i : i + 4] for i in range(0, len(o), 4)])
        return [ptx.sub(ptx.i32(1), parity), *state.flat()]

    init = [ptx.bit_and(phases, 1), *state.flat()]
    _, *flat = ptx.loop(first, block.key_pages, ptx.i32(WARPS), init, body)
    return Running.of(flat)


def _prefetch_values(stage: DenseStage, slots: RecordSlots, page: Value) -> None:
    """Asks for the ring's part of an edge page: its tiles are read one after the other, each waiting for memory
    otherwise."""
    block, plan = stage.block, stage.plan
    wanted = ptx.both(slots.leader, ptx.less(page, block.key_pages))
    start = ptx.rem(ptx.mul(page, plan.fmt.page), stage.ring_slots)
    before_end = ptx.min_signed(ptx.sub(ptx.i32(stage.ring_slots), start), plan.fmt.page)
    ring = ptx.address(block.mem.ring_values, stage.head_offset(stage.ring_slots), 1)
    first = ptx.address(ring, start, stage.row_bytes)
    ptx.bulk_prefetch(wanted, first, ptx.mul(before_end, stage.row_bytes))
    wraps = ptx.both(wanted, ptx.less(before_end, plan.fmt.page))
    ptx.bulk_prefetch(wraps, ring, ptx.mul(ptx.sub(ptx.i32(plan.fmt.page), before_end), stage.row_bytes))
