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

from collections.abc import Sequence

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.block import (
    Block,
    Running,
    mma_score_factor,
    raise_maximum,
    row_offset,
)
from kitty_jax.pallas_kernels.decode_attention.shape import padded_rows, tile_unit
from kitty_jax.pallas_kernels.metadata_kernel import MetadataPairs
from kitty_jax.pallas_kernels.ptx import Value

KEY_TILES = 8  # row tiles of a key page: 128 tokens / 16
HALF_FOURS = 0x44004400  # float16 (4, 4)
ODD_CHUNK = 512  # bytes of 32 lanes x 4 words


def field(words: Sequence[Value], index: int) -> list[Value]:
    """Field ``index`` of each word: pairs of subnormals code * 4**(index % 4) * 2**-24."""
    mask = 0x00030003 << (2 * (index % 4))
    return [ptx.bit_and(w if index < 4 else ptx.shr(w, 8), mask) for w in words]


class RecordSlots:
    """The warp's two slots and the copies that fill them."""

    def __init__(self, block: Block):
        plan = block.plan
        self.block = block
        self.leader = ptx.equal(block.lane, 0)
        self.key_bytes, self.value_bytes = plan.fmt.key_words * 4, plan.fmt.value_words * 4
        self.key = ptx.add(block.warp_base, plan.smem.key)
        self.value = ptx.add(block.warp_base, plan.smem.value)

    def record(self, page: Value) -> Value:
        """Index [M, K] of this head's record of a page of the pool; a page outside of the pool is its last one."""
        page = ptx.min_unsigned(page, self.block.plan.pool - 1)
        return ptx.add(ptx.mul(page, self.block.plan.kv_heads), self.block.h)

    def fetch_key(self, wanted: Value | None, record: Value) -> None:
        """Where ``wanted`` (None: everywhere)."""
        source = ptx.address(self.block.mem.key_pages, record, self.key_bytes)
        wanted = self.leader if wanted is None else ptx.both(self.leader, wanted)
        ptx.bulk_copy(wanted, self.block.key_barrier, self.key, source, self.key_bytes)

    def fetch_value(self, wanted: Value, record: Value) -> None:
        source = ptx.address(self.block.mem.value_pages, record, self.value_bytes)
        ptx.bulk_copy(ptx.both(self.leader, wanted), self.block.value_barrier, self.value, source, self.value_bytes)


class KeyStage:
    """Logits of the page in the key slot. Built once: its addresses do not change from page to page."""

    tiles = KEY_TILES

    def __init__(self, block: Block):
        plan = block.plan
        self.block, self.plan = block, plan
        self.parts = {name: plan.smem.key + part.offset for name, part in plan.fmt.key_parts.items()}
        self.per_lane = plan.head_dim // 32
        own_rows, fragment_rows = row_offset(ptx.mul(block.lane, self.per_lane)), row_offset(block.lane)
        scaled = ptx.add(block.warp_base, plan.smem.scaled)
        self.scaled = scaled
        self.own_queries, self.own_scaled = ptx.add(block.smem, own_rows), ptx.add(scaled, own_rows)
        self.query_fragments, self.scaled_fragments = ptx.add(block.smem, fragment_rows), ptx.add(scaled, fragment_rows)
        self.chunk = ptx.add(block.warp_base, ptx.mul(block.lane, 16))
        first = ptx.mul(block.lane, self.per_lane)
        self.metadata = MetadataPairs(plan.fmt, self.parts, block.warp_base, first, self.per_lane, small=False)
        self.decodes_mins = plan.fmt.metadata != "float16"
        self.mins = plan.smem.mins if self.decodes_mins else self.parts["min"]
        self.own_mins = ptx.add(block.warp_base, ptx.mul(block.lane, 2 * self.per_lane))
        # Matrices 0 and 1, 2 and 3 of ldmatrix become the two halves of an A tile whose 16 rows are all the same.
        self.min_rows = ptx.add(block.warp_base, ptx.mul(ptx.shr(block.lane, 4), 16))

    def scale_queries(self) -> None:
        """Rows of q times the page's scales; a lane takes D / 32 neighbouring channels. Mins that are no float16 in the
        record become so."""
        words = self.metadata.load("scale")
        if self.decodes_mins:
            ptx.store_shared(self.metadata.load("min"), self.own_mins, self.mins)
        for j in range(self.per_lane):
            scale = ptx.splat_half(words[j // 2], j % 2)
            row = ptx.load_shared(4, self.own_queries, 16 * j)
            ptx.store_shared([ptx.hmul2(x, scale) for x in row], self.own_scaled, 16 * j)
        ptx.sync_warp()

    def fragments(self, words: Sequence[Value]) -> list[list[Value]]:
        """The stage's row tiles out of words of a plane, as A operands."""
        return [field(words, tile) for tile in range(KEY_TILES)]

    def products(self) -> tuple[list[list[Value]], list[Value]]:
        """(accumulators of the row tiles, each in its unit; the sum of q times min for the lane's two columns)."""
        zero = [ptx.f32(0.0)] * 4
        bias, scores = zero, [zero] * self.tiles
        for pair in range(self.plan.head_dim // 32):
            rows = padded_rows(32) * pair
            scaled = ptx.ldmatrix(4, self.scaled_fragments, rows, transpose=True)
            plain = ptx.ldmatrix(4, self.query_fragments, rows, transpose=True)
            for i in range(2):
                words = ptx.load_shared(4, self.chunk, self.parts["low"] + ODD_CHUNK * (2 * pair + i))
                scores = self._add(scores, words, scaled[2 * i : 2 * i + 2])
                mins = ptx.ldmatrix(4, self.min_rows, self.mins + 64 * pair + 32 * i, transpose=False)
                bias = ptx.mma(bias, mins, plain[2 * i : 2 * i + 2])
        return self._boosted(scores), bias[:2]

    def _add(self, scores: list[list[Value]], words: Sequence[Value], operand: list[Value]) -> list[list[Value]]:
        return [ptx.mma(s, a, operand) for s, a in zip(scores, self.fragments(words), strict=True)]

    def _boosted(self, scores: list[list[Value]]) -> list[list[Value]]:
        """Adds the high plane: row b of it belongs to channel x(b), whose row of scaled queries counts four times."""
        half_tiles = self.plan.fmt.boosted // 8
        for first in range(0, half_tiles, 4):
            count = min(4, half_tiles - first)
            loaded = count if count != 3 else 4  # ldmatrix loads 1, 2 or 4; the fourth repeats an address
            lane = ptx.bit_and(self.block.lane, 8 * loaded - 1)
            if count == 3:
                lane = ptx.min_unsigned(lane, 23)
            slot = ptx.add(self.block.warp_base, lane)
            channel = ptx.load_shared_byte(slot, self.parts["channels"] + 8 * first)
            rows = ptx.ldmatrix(loaded, ptx.add(self.scaled, row_offset(channel)), 0, transpose=True)
            rows = [ptx.hmul2(x, ptx.i32(HALF_FOURS)) for x in rows[:count]]
            for i in range(0, count, 2):
                scores = self._add(scores, self._high_words(first + i), rows[i : i + 2])
        return scores

    def _high_words(self, half_tile: int) -> list[Value]:
        """The words of half tiles ``half_tile`` and the next: four, or two where it is the odd last one."""
        offset = self.parts["high"] + ODD_CHUNK // 2 * half_tile
        if half_tile + 1 < self.plan.fmt.boosted // 8:
            return ptx.load_shared(4, self.chunk, offset)
        return ptx.load_shared(2, ptx.sub(self.chunk, ptx.mul(self.block.lane, 8)), offset)

    def exponent(self) -> Value:
        """The record's exponent plus that of q; read it before the slot is refilled."""
        record = ptx.load_shared_byte(self.block.warp_base, self.parts["exponent"], signed=True)
        return ptx.add(record, ptx.load_shared(1, ptx.add(self.block.smem, self.plan.smem.exponents)))

    def logits(self) -> tuple[list[list[Value]], list[Value]]:
        """(accumulators, bias): a logit in powers of two is ``accumulator * factor[tile] + bias``."""
        self.scale_queries()
        scores, bias = self.products()
        bias = [ptx.fmul(x, ptx.f32(mma_score_factor(self.plan))) for x in bias]
        exponent = self.exponent()
        flat = [*bias, *(x for tile in scores for x in tile)]

        def scaled():
            power = ptx.power_of_two(exponent)
            return [ptx.fmul(x, power) for x in flat]

        flat = ptx.choose(ptx.not_equal(exponent, 0), scaled, flat)
        return [flat[i : i + 4] for i in range(2, len(flat), 4)], flat[:2]

    def factor(self, tile: int) -> Value:
        return ptx.f32(tile_unit(tile) * mma_score_factor(self.plan))

    def top(self, scores: list[list[Value]], bias: list[Value]) -> list[Value]:
        """Largest logit of each of the lane's two columns among its own tokens."""
        out, half = [], self.tiles // 2
        for k in range(2):
            # Tiles of the page four apart share a unit: the stage's first and second half.
            same_unit = [[s[i] for s in (scores[t], scores[t + half]) for i in (k, k + 2)] for t in range(half)]
            tops = [ptx.fmul(ptx.tree(ptx.fmax, xs), self.factor(t)) for t, xs in enumerate(same_unit)]
            out.append(ptx.fadd(ptx.tree(ptx.fmax, tops), bias[k]))
        return out

    def weights(self, state: Running, scores, bias: list[Value]) -> tuple[list[list[Value]], Running]:
        """(2**(logit - m) of every tile; the state with their sums added to l)."""
        shift = [ptx.fsub(bias[k], state.m[k]) for k in range(2)]
        p = [[ptx.ex2(ptx.fma(s[i], self.factor(t), shift[i % 2])) for i in range(4)] for t, s in enumerate(scores)]
        total = [ptx.fadd(state.l[k], ptx.tree(ptx.fadd, [x for tile in p for x in tile[k::2]])) for k in range(2)]
        return p, state._replace(l=total)


class KeyShareStage(KeyStage):
    """A quarter of a page's logits: those of row tiles w and w + 4, for warp w."""

    tiles = 2

    def __init__(self, block: Block):
        super().__init__(block)
        self.mask = ptx.i32(0x00030003) << block.warp * 2
        unit = ptx.power_of_two(ptx.sub(ptx.i32(24), ptx.mul(block.warp, 2)))  # tile_unit(warp)
        self.unit = ptx.fmul(unit, ptx.f32(mma_score_factor(block.plan)))

    def fragments(self, words: Sequence[Value]) -> list[list[Value]]:
        return [[ptx.bit_and(x, self.mask) for x in half] for half in (words, [ptx.shr(x, 8) for x in words])]

    def factor(self, tile: int) -> Value:
        return self.unit


class ValueStage:
    """Weighted sum of the page in the value slot."""

    def __init__(self, block: Block):
        plan = block.plan
        self.block, self.plan = block, plan
        self.parts = {name: plan.smem.value + part.offset for name, part in plan.fmt.value_parts.items()}
        self.chunk = ptx.add(block.warp_base, ptx.mul(block.lane, 16))
        self.metadata = MetadataPairs(plan.fmt, self.parts, block.warp_base, ptx.mul(block.g, 16), 16, small=True)
        self.tiles = plan.head_dim // 16

    def operands(self, p: list[list[Value]], bias: list[Value]) -> tuple[list[Value], list[Value]]:
        """(B operand: p times value scale, two words for each 16 tokens; bias plus p times value min)."""
        scales, mins = self.metadata.load("scale"), self.metadata.load("min")
        words = []
        for tile, tile_weights in enumerate(p):
            low_high = ptx.unpack_pair(mins[tile], "f16")  # tokens 2 tile and 2 tile + 1 of the lane
            for rh in range(2):
                pair = tile_weights[2 * rh : 2 * rh + 2]
                bias = [ptx.fma(pair[k], low_high[rh], bias[k]) for k in range(2)]
                scaled = ptx.hmul2(ptx.pack_pair(*pair, "f16"), ptx.splat_half(scales[tile], rh))
                words.append(ptx.movmatrix(scaled))
        return words, bias

    def accumulate(self, state: Running, p: list[list[Value]]) -> Running:
        exponent = ptx.load_shared_byte(self.block.warp_base, self.parts["exponent"], signed=True)
        state = self._times_power(state, ptx.sub(ptx.i32(0), exponent), exponent)
        words, bias = self.operands(p, state.bias)
        o = state.o
        for plane in ("low", "high") if self.plan.fmt.value_bits == 4 else ("low",):
            operand = [ptx.hmul2(x, ptx.i32(HALF_FOURS)) for x in words] if plane == "high" else words
            o = self._plane(o, plane, operand)
        return self._times_power(state._replace(bias=bias, o=o), exponent, exponent)

    def _plane(self, o, plane: str, operand: list[Value]):
        """Adds one 2-bit plane. A word group holds 8 tiles: two half tiles of 4 at D = 64, one half tile of 8 at D =
        128."""
        groups_a_step = self.tiles // 4  # word groups for the 16 tokens of an mma
        for chunk in range(self.plan.head_dim // 16):
            words = ptx.load_shared(4, self.chunk, self.parts[plane] + ODD_CHUNK * chunk)
            for i in range(0, 2, groups_a_step):
                step = (2 * chunk + i) // groups_a_step
                if groups_a_step == 2:
                    fragment = lambda t, words=words: field(words, t)  # noqa: E731
                else:
                    pair = words[2 * i : 2 * i + 2]
                    fragment = lambda t, pair=pair: [*field(pair, t), *field(pair, 4 + t)]  # noqa: E731
                o = [ptx.mma(acc, fragment(t), operand[2 * step : 2 * step + 2]) for t, acc in enumerate(o)]
        return o

    def _times_power(self, state: Running, power: Value, exponent: Value) -> Running:
        """o and bias times 2**power, where the record's exponent is not 0: around such a page, sums are kept in the
        page's unit."""
        flat = [*state.bias, *(x for tile in state.o for x in tile)]

        def scaled():
            factor = ptx.power_of_two(power)
            return [ptx.fmul(x, factor) for x in flat]

        flat = ptx.choose(ptx.not_equal(exponent, 0), scaled, flat)
        return state._replace(bias=flat[:2], o=[flat[i : i + 4] for i in range(2, len(flat), 4)])


class PageWalk:
    """The warp's share of the pages whose keys and values are both quantized, every ``units``-th, and the copies of the
    first.

    The key record that follows the last of them is that of the first edge page, for every warp: warps without a page
    start with it, so a warp's key barrier passes a phase more than the warp has pages. Where no edge page is, the
    record is a meaningless one; without any quantized key, there is none.
    """

    def __init__(self, block: Block):
        self.block, self.first, self.stop = block, block.unit, block.value_pages
        self.row = ptx.address(block.mem.page_table, block.b, 4 * block.plan.pages)
        self.slots = RecordSlots(block)

    def start(self) -> None:
        """Starts the first copies."""
        block = self.block
        page = self.page(self.first)  # asked for before the sequence's length is known
        has_page = ptx.less(self.first, self.stop)
        self.slots.fetch_value(has_page, self.slots.record(page))
        wanted = has_page
        if block.plan.has_edges:
            wanted = ptx.less(ptx.i32(0), block.key_pages)
            has_none = ptx.less(ptx.sub(self.stop, 1), self.first)
            (page,) = ptx.choose(has_none, lambda: [self.page(self.stop)], [page])
        self.slots.fetch_key(wanted, self.slots.record(page))

    def page(self, index: Value) -> Value:
        """Id of a page of the sequence."""
        index = ptx.min_unsigned(index, self.block.plan.pages - 1)
        return ptx.load_global(1, ptx.address(self.row, index, 4))

    def next_page(self, index: Value) -> Value:
        """Id of a page; past those of the walk, of the first edge page."""
        return self.page(ptx.min_signed(index, self.stop))


def walked_pages(block: Block) -> Value:
    """How many pages the warp's walk has."""
    units = block.plan.units
    return ptx.div(ptx.max_signed(ptx.add(ptx.sub(block.value_pages, block.unit), units - 1), 0), units)


def attend_pages(block: Block, walk: PageWalk | None) -> Running:
    """The warp's share of the pages.

    Returns the partial result, whose o tiles are in units (``tile_unit``).
    """
    empty = Running.empty(block.plan.head_dim // 16, biased=True)
    if walk is None:
        return empty
    keys, values, slots, step = KeyStage(block), ValueStage(block), walk.slots, block.plan.units

    def body(i: Value, next_page: Value, *flat: Value):
        state = Running.of(flat)
        following, parity, record = ptx.add(i, step), ptx.bit_and(ptx.div(i, step), 1), slots.record(next_page)
        wanted = ptx.less(following, walk.stop)
        next_page = walk.next_page(ptx.add(i, 2 * step))
        ptx.mbarrier_wait(block.key_barrier, parity)
        scores, bias = keys.logits()
        ptx.sync_warp()
        slots.fetch_key(None if block.plan.has_edges else wanted, record)
        state = raise_maximum(state, keys.top(scores, bias))
        p, state = keys.weights(state, scores, bias)
        ptx.mbarrier_wait(block.value_barrier, parity)
        state = values.accumulate(state, p)
        ptx.sync_warp()
        slots.fetch_value(wanted, record)
        return [next_page, *state.flat()]

    init = [walk.next_page(ptx.add(walk.first, step)), *empty.flat()]
    _, *flat = ptx.loop(walk.first, walk.stop, ptx.i32(step), init, body)
    return Running.of(flat)
