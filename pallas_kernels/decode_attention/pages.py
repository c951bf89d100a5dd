"""Attention of a warp over quantized pages, one page at a time.

For a page with low codes c, high codes h of the boosted channels x(b), scales s and mins m (DESIGN section 6):

    logit[t, j] = sum_d (q[j, d] s[d]) c[t, d]  +  sum_b 4 (q[j, x(b)] s[x(b)]) h[t, b]  +  sum_d q[j, d] m[d]
    out[e, j]   = sum_t (p[t, j] s[t]) c[e, t]  +  sum_t p[t, j] m[t]

* A field of a packed word, masked, is a pair of float16 subnormals code * 4**(tile % 4) * 2**-24: one AND unpacks two
  codes, and the power of two is a constant of the accumulator tile (``tile_unit``).
* ``ldmatrix`` reads rows of scaled queries from any addresses, so it gathers the boosted channels; ``movmatrix`` turns
  weights from accumulator layout into the B operand.
* Nothing crosses warps. A warp has one slot for a key record and one for a value record; the key slot is refilled while
  the warp works on the values, and the other way round.
* Exponents of records and of q are 0 but for numbers that float16 does not hold well; a branch, uniform in the warp,
  takes care of others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import (
    Block,
    Running,
    Tiles,
    flatten,
    in_tiles,
    raise_maximum,
    row_offset,
)
from kitty_jax.pallas_kernels.decode_attention.shape import padded_rows, tile_unit
from kitty_jax.pallas_kernels.ptx import Value

KEY_TILES = 8  # row tiles of a key page: 128 tokens / 16
FIELD = 0x00030003  # field 0 of a word
HALF_FOURS = 0x44004400  # float16 (4, 4)
CHUNK = 512  # bytes of 32 lanes x 4 words


def field(words: Sequence[Value], index: int) -> list[Value]:
    """Field ``index`` of each word: pairs of subnormals code * 4**(index % 4) * 2**-24."""
    mask = FIELD << (2 * (index % 4))
    return [(w if index < 4 else w >> 8) & mask for w in words]


def times_power_of_two(xs: list[Value], power: Value, exponent: Value) -> list[Value]:
    """``xs`` times 2**power where ``exponent`` is not 0: a branch that is seldom taken."""

    def scaled():
        factor = ptx.power_of_two(power)
        return [x * factor for x in xs]

    return ptx.choose(exponent != 0, scaled, xs)


class RecordSlots:
    """The warp's two slots and the copies that fill them."""

    def __init__(self, block: Block):
        self.block, shape = block, block.shape
        self.leader = block.lane == 0
        self.key_bytes, self.value_bytes = shape.fmt.key_words * 4, shape.fmt.value_words * 4
        self.key, self.value = block.warp_base + shape.smem.key, block.warp_base + shape.smem.value

    def record(self, page: Value) -> Value:
        """Index [M, K] of this head's record of a page of the pool; a page outside of the pool is its last one."""
        page = ptx.min_unsigned(page, self.block.shape.pool - 1)
        return page * self.block.shape.kv_heads + self.block.h

    def fetch_key(self, wanted: Value | None, record: Value) -> None:
        """Where ``wanted`` (None: everywhere)."""
        source = ptx.address(self.block.mem.key_pages, record, self.key_bytes)
        wanted = self.leader if wanted is None else self.leader & wanted
        ptx.bulk_copy(wanted, self.block.key_barrier, self.key, source, self.key_bytes)

    def fetch_value(self, wanted: Value, record: Value) -> None:
        source = ptx.address(self.block.mem.value_pages, record, self.value_bytes)
        ptx.bulk_copy(self.leader & wanted, self.block.value_barrier, self.value, source, self.value_bytes)


class KeyStage:
    """Logits of the page in the key slot. Built once: its addresses do not change from page to page."""

    tiles = KEY_TILES

    def __init__(self, block: Block):
        self.block, self.shape = block, block.shape
        smem, fmt = self.shape.smem, self.shape.fmt
        self.parts = {name: smem.key + part.offset for name, part in fmt.key_parts.items()}
        self.per_lane = fmt.head_dim // 32  # neighbouring channels
        own_rows, fragment_rows = row_offset(block.lane * self.per_lane), row_offset(block.lane)
        self.scaled = block.warp_base + smem.scaled
        self.own_queries, self.own_scaled = block.smem + own_rows, self.scaled + own_rows
        self.query_fragments, self.scaled_fragments = block.smem + fragment_rows, self.scaled + fragment_rows
        self.chunk = block.warp_base + block.lane * 16
        self.own_scales = block.warp_base + block.lane * self.per_lane * 2
        # Matrices 0 and 1, 2 and 3 of ldmatrix become the two halves of an A tile whose 16 rows are all the same.
        self.min_rows = block.warp_base + (block.lane >> 4) * 16

    def scale_queries(self) -> None:
        """Rows of q times the page's scales."""
        loaded = ptx.load_shared(self.per_lane // 2, self.own_scales, self.parts["scale"])
        pairs = [loaded] if self.per_lane == 2 else loaded
        for j in range(self.per_lane):
            scale = ptx.splat_half(pairs[j // 2], j % 2)
            row = ptx.load_shared(4, self.own_queries, 16 * j)
            ptx.store_shared([ptx.hmul2(x, scale) for x in row], self.own_scaled, 16 * j)
        ptx.sync_warp()

    def fragments(self, words: Sequence[Value]) -> Tiles:
        """The stage's row tiles out of words of a plane, as A operands."""
        return [field(words, tile) for tile in range(KEY_TILES)]

    def products(self) -> tuple[Tiles, list[Value]]:
        """(accumulators of the row tiles, each in its unit; the sum of q times min for the lane's two columns)."""
        zero = [ptx.f32(0.0)] * 4
        bias, scores = zero, [zero] * self.tiles
        for pair in range(self.shape.head_dim // 32):
            rows = padded_rows(32) * pair
            scaled = ptx.ldmatrix(4, self.scaled_fragments, rows, transpose=True)
            plain = ptx.ldmatrix(4, self.query_fragments, rows, transpose=True)
            for i in range(2):
                words = ptx.load_shared(4, self.chunk, self.parts["low"] + CHUNK * (2 * pair + i))
                scores = self._add(scores, words, scaled[2 * i : 2 * i + 2])
                mins = ptx.ldmatrix(4, self.min_rows, self.parts["min"] + 64 * pair + 32 * i, transpose=False)
                bias = ptx.mma(bias, mins, plain[2 * i : 2 * i + 2])
        return self._boosted(scores), bias[:2]

    def _add(self, scores: Tiles, words: Sequence[Value], operand: list[Value]) -> Tiles:
        return [ptx.mma(s, a, operand) for s, a in zip(scores, self.fragments(words), strict=True)]

    def _boosted(self, scores: Tiles) -> Tiles:
        """Adds the high plane: row b of it belongs to channel x(b), whose row of scaled queries counts four times."""
        half_tiles = self.shape.fmt.boosted // 8
        for first in range(0, half_tiles, 4):
            count = min(4, half_tiles - first)
            loaded = count if count != 3 else 4  # ldmatrix loads 1, 2 or 4; the fourth repeats an address
            lane = self.block.lane & (8 * loaded - 1)
            if count == 3:
                lane = ptx.min_unsigned(lane, 23)
            channel = ptx.load_shared_byte(self.block.warp_base + lane, self.parts["channels"] + 8 * first)
            rows = ptx.ldmatrix(loaded, self.scaled + row_offset(channel), 0, transpose=True)
            rows = [ptx.hmul2(x, ptx.i32(HALF_FOURS)) for x in rows[:count]]
            for i in range(0, count, 2):
                scores = self._add(scores, self._high_words(first + i), rows[i : i + 2])
        return scores

    def _high_words(self, half_tile: int) -> list[Value]:
        """The words of half tiles ``half_tile`` and the next: four, or two where it is the odd last one."""
        offset = self.parts["high"] + CHUNK // 2 * half_tile
        if half_tile + 1 < self.shape.fmt.boosted // 8:
            return ptx.load_shared(4, self.chunk, offset)
        return ptx.load_shared(2, self.chunk - self.block.lane * 8, offset)

    def exponent(self) -> Value:
        """The record's exponent plus that of q; read it before the slot is refilled."""
        record = ptx.load_shared_byte(self.block.warp_base, self.parts["exponent"], signed=True)
        return record + ptx.load_shared(1, self.block.smem + self.shape.smem.exponent)

    def logits(self) -> tuple[Tiles, list[Value]]:
        """(accumulators, bias): a logit in powers of two is ``accumulator * factor[tile] + bias``."""
        self.scale_queries()
        scores, bias = self.products()
        bias = [x * self.shape.staged_logit_factor for x in bias]
        exponent = self.exponent()
        flat = times_power_of_two([*bias, *flatten(scores)], exponent, exponent)
        return in_tiles(flat[2:]), flat[:2]

    def factor(self, tile: int) -> Value:
        return ptx.f32(tile_unit(tile) * self.shape.staged_logit_factor)

    def top(self, scores: Tiles, bias: list[Value]) -> list[Value]:
        """Largest logit of each of the lane's two columns among its own tokens."""
        out, half = [], self.tiles // 2
        for k in range(2):
            # Tiles of the page four apart share a unit: the stage's first and second half.
            same_unit = [[s[i] for s in (scores[t], scores[t + half]) for i in (k, k + 2)] for t in range(half)]
            tops = [ptx.tree(ptx.fmax, xs) * self.factor(t) for t, xs in enumerate(same_unit)]
            out.append(ptx.tree(ptx.fmax, tops) + bias[k])
        return out

    def weights(self, state: Running, scores: Tiles, bias: list[Value]) -> tuple[Tiles, Running]:
        """(2**(logit - m) of every tile; the state with their sums added to l)."""
        shift = [bias[k] - state.m[k] for k in range(2)]
        p = [[ptx.ex2(ptx.fma(s[i], self.factor(t), shift[i % 2])) for i in range(4)] for t, s in enumerate(scores)]
        total = [state.l[k] + ptx.tree(operator.add, [x for tile in p for x in tile[k::2]]) for k in range(2)]
        return p, state._replace(l=total)


class KeyShareStage(KeyStage):
    """A quarter of a page's logits: those of row tiles w and w + 4, for warp w."""

    tiles = 2

    def __init__(self, block: Block):
        super().__init__(block)
        self.mask = ptx.i32(FIELD) << block.warp * 2
        self.unit = ptx.power_of_two(24 - block.warp * 2) * self.shape.staged_logit_factor  # tile_unit(warp)

    def fragments(self, words: Sequence[Value]) -> Tiles:
        return [[x & self.mask for x in half] for half in (words, [x >> 8 for x in words])]

    def factor(self, tile: int) -> Value:
        return self.unit


class ValueStage:
    """Weighted sum of the page in the value slot."""

    def __init__(self, block: Block):
        self.block, self.shape = block, block.shape
        parts = self.shape.fmt.value_parts.items()
        self.parts = {name: self.shape.smem.value + part.offset for name, part in parts}
        self.chunk = block.warp_base + block.lane * 16
        self.own_tokens = block.warp_base + block.g * 16 * 2  # 16 of them, in the parts scale and min

    def operands(self, p: Tiles, bias: list[Value]) -> tuple[list[Value], list[Value]]:
        """(B operand: p times value scale, two words for each 16 tokens; bias plus p times value min)."""
        scales, mins = (
            [x for i in (0, 16) for x in ptx.load_shared(4, self.own_tokens, self.parts[name] + i)]
            for name in ("scale", "min")
        )
        words = []
        for tile, tile_weights in enumerate(p):
            low_high = ptx.unpack_pair(mins[tile], "f16")  # tokens 2 tile and 2 tile + 1 of the lane
            for rh in range(2):
                pair = tile_weights[2 * rh : 2 * rh + 2]
                bias = [ptx.fma(pair[k], low_high[rh], bias[k]) for k in range(2)]
                scaled = ptx.hmul2(ptx.pack_pair(*pair, "f16"), ptx.splat_half(scales[tile], rh))
                words.append(ptx.movmatrix(scaled))
        return words, bias

    def accumulate(self, state: Running, p: Tiles) -> Running:
        exponent = ptx.load_shared_byte(self.block.warp_base, self.parts["exponent"], signed=True)
        state = self._times_power(state, 0 - exponent, exponent)
        words, bias = self.operands(p, state.bias)
        o = self._add_plane(state.o, "low", words)
        if self.shape.fmt.value_bits == 4:
            o = self._add_plane(o, "high", [ptx.hmul2(x, ptx.i32(HALF_FOURS)) for x in words])
        return self._times_power(state._replace(bias=bias, o=o), exponent, exponent)

    def _add_plane(self, o: Tiles, plane: str, operand: list[Value]) -> Tiles:
        """Adds one 2-bit plane. A word group holds 8 tiles: two half tiles of 4 at D = 64, one half tile of 8 at D =
        128."""
        groups_a_step = len(o) // 4  # word groups for the 16 tokens of an mma
        for chunk in range(self.shape.head_dim // 16):
            words = ptx.load_shared(4, self.chunk, self.parts[plane] + CHUNK * chunk)
            for i in range(0, 2, groups_a_step):
                step = (2 * chunk + i) // groups_a_step
                b, out = operand[2 * step : 2 * step + 2], []
                for tile, accumulator in enumerate(o):
                    if groups_a_step == 2:
                        a = field(words, tile)
                    else:
                        pair = words[2 * i : 2 * i + 2]
                        a = [*field(pair, tile), *field(pair, 4 + tile)]
                    out.append(ptx.mma(accumulator, a, b))
                o = out
        return o

    def _times_power(self, state: Running, power: Value, exponent: Value) -> Running:
        """o and bias times 2**power, where the record's exponent is not 0: around such a page, sums are kept in the
        page's unit."""
        flat = times_power_of_two([*state.bias, *flatten(state.o)], power, exponent)
        return state._replace(bias=flat[:2], o=in_tiles(flat[2:]))


class PageWalk:
    """The warp's share of the pages whose keys and values are both quantized, every ``units``-th, and the copies of the
    first.

    The key record that follows the last of them is that of the first edge page, for every warp: warps without a page
    start with it, so a warp's key barrier passes a phase more than the warp has pages. Where no edge page is, the
    record is a meaningless one; without any quantized key, there is none.
    """

    def __init__(self, block: Block):
        self.block, self.first, self.stop = block, block.unit, block.value_pages
        self.row = ptx.address(block.mem.page_table, block.b, 4 * block.shape.pages)
        self.slots = RecordSlots(block)

    def start(self) -> None:
        """Starts the first copies."""
        block = self.block
        page = self.page(self.first)  # asked for before the sequence's length is known
        has_page = self.first < self.stop
        self.slots.fetch_value(has_page, self.slots.record(page))
        wanted = has_page
        if block.shape.has_edges:
            wanted = block.key_pages > 0
            has_none = self.first > self.stop - 1
            (page,) = ptx.choose(has_none, lambda: [self.page(self.stop)], [page])
        self.slots.fetch_key(wanted, self.slots.record(page))

    def page(self, index: Value) -> Value:
        """Id of a page of the sequence."""
        index = ptx.min_unsigned(index, self.block.shape.pages - 1)
        return ptx.load_global(1, ptx.address(self.row, index, 4))

    def next_page(self, index: Value) -> Value:
        """Id of a page; past those of the walk, of the first edge page."""
        return self.page(ptx.minimum(index, self.stop))


def walked_pages(block: Block) -> Value:
    """How many pages the warp's walk has."""
    units = block.shape.units
    return ptx.maximum(block.value_pages - block.unit + (units - 1), 0) // units


def attend_pages(block: Block, walk: PageWalk | None) -> Running:
    """The warp's share of the pages.

    Returns the partial result, whose o tiles are in units (``tile_unit``).
    """
    empty = Running.empty(block.shape.head_dim // 16, biased=True)
    if walk is None:
        return empty
    keys, values, slots, step = KeyStage(block), ValueStage(block), walk.slots, block.shape.units

    def body(i: Value, next_page: Value, *flat: Value):
        state = Running.of(flat)
        following, parity, record = i + step, (i // step) & 1, slots.record(next_page)
        wanted = following < walk.stop
        next_page = walk.next_page(i + 2 * step)
        ptx.mbarrier_wait(block.key_barrier, parity)
        scores, bias = keys.logits()
        ptx.sync_warp()
        slots.fetch_key(None if block.shape.has_edges else wanted, record)
        state = raise_maximum(state, keys.top(scores, bias))
        p, state = keys.weights(state, scores, bias)
        ptx.mbarrier_wait(block.value_barrier, parity)
        state = values.accumulate(state, p)
        ptx.sync_warp()
        slots.fetch_value(wanted, record)
        return [next_page, *state.flat()]

    init = [walk.next_page(walk.first + step), *empty.flat()]
    _, *flat = ptx.loop(walk.first, walk.stop, step, init, body)
    return Running.of(flat)
