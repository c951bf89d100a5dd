"""Quantize-and-pack of value pages as a Mosaic GPU kernel: a block of 128 threads for every page and KV head.

Stages: load_page (out of the ring), scale_tokens (a thread a token), pack_2bit or pack_4bit; the record is copied out.
The result equals :func:`.quantize.quantize_values` bit for bit, by the means of :mod:`.store_keys_mgpu`.
"""

from __future__ import annotations

import dataclasses
import functools

from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.metadata_kernel import Metadata, choose_metadata, scale_and_min, scratch_bytes
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import Value
from kitty_jax.pallas_kernels.quantize import VALUE_LIMIT_LOG2
from kitty_jax.pallas_kernels.store import ptx_store as sx
from kitty_jax.pallas_kernels.store import tile as tiles
from kitty_jax.pallas_kernels.store.tile import CHUNK, KINDS, PAGE, Layout, Tile

# 32 lanes and a padding, which keeps the lanes that write neighbouring chunks off each other's banks.
CHUNK_STRIDE = 33 * CHUNK


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """What is fixed when the kernel is built. ``slots`` is W, the slots of a ring; ``shrink``, the factors of a token's
    range to try."""

    fmt: PageFormat
    kv_heads: int
    pool: int
    slots: int
    kind: str
    shrink: tuple[float, ...] = (1.0,)

    @functools.cached_property
    def tile(self) -> Tile:
        return Tile(self.fmt.head_dim, self.kind, rows_per_pad=1, pad_bytes=16)

    @property
    def planes(self) -> int:
        return self.fmt.value_bits // 2

    @property
    def plane_chunks(self) -> int:
        """16-byte chunks of the planes, which are padded in shared memory."""
        return self.planes * PAGE * self.fmt.head_dim // (4 * CHUNK)

    @functools.cached_property
    def smem(self) -> Layout:
        return Layout.of(
            record=4 * self.fmt.value_words + self.plane_chunks // 32 * CHUNK,
            tile=self.tile.size,
            tokens=PAGE * 16,
            warps=16,
            metadata=scratch_bytes(self.fmt),
        )


def store_values(
    pool_ref, values: Array, starts: Array, page_ids: Array, fmt: PageFormat, *, shrink: tuple[float, ...]
) -> None:
    """Writes the records of the pages in ``values`` [X, K, W, D] into the ref of the pool; ids outside are skipped."""
    x, k, slots, _ = values.shape
    plan = ValuePlan(
        fmt=fmt,
        kv_heads=k,
        pool=pool_ref.shape[0],
        slots=slots,
        kind=KINDS[values.dtype.name],
        shrink=tuple(shrink),
    )
    ptx.launch(functools.partial(emit, plan), (), blocks=x * k, smem_bytes=plan.smem.total, name="store_value_pages")(
        pool_ref, values, starts, page_ids
    )


def emit(plan: ValuePlan, addresses: list[Value], smem: Value) -> None:
    pool, values, starts, page_ids = addresses
    tid, block = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    page, head = ptx.div(block, plan.kv_heads), ptx.rem(block, plan.kv_heads)
    record = ptx.load_global(1, ptx.address(page_ids, page, 4))
    with ptx.when(sx.less_unsigned(record, plan.pool)):
        ValueBlock(plan, smem, tid).run(
            ptx.address(values, block, plan.slots * plan.tile.row_bytes),
            ptx.load_global(1, ptx.address(starts, page, 4)),
            ptx.address(pool, ptx.add(ptx.mul(record, plan.kv_heads), head), 4 * plan.fmt.value_words),
        )


class ValueBlock:
    """One block's work. Thread t is token t in scale_tokens; see :meth:`position` for those that pack."""

    def __init__(self, plan: ValuePlan, smem: Value, tid: Value):
        self.plan, self.fmt, self.tile = plan, plan.fmt, plan.tile
        self.tid = tid
        self.lane, self.warp = ptx.bit_and(tid, 31), ptx.warp_index(tid)
        self.at = {name: ptx.add(smem, offset) for name, offset in plan.smem.offsets.items()}
        paddings = plan.plane_chunks // 32 * CHUNK
        self.part = {name: ptx.add(self.at["record"], p.offset + paddings) for name, p in plan.fmt.value_parts.items()}

    def run(self, ring: Value, start: Value, record: Value) -> None:
        self.load_page(ring, start)
        sx.wait_for_copies()
        ptx.sync_block()
        self.scale_tokens()
        ptx.sync_block()
        if self.fmt.value_bits == 2:
            self.pack_2bit()
        else:
            self.pack_4bit()
        ptx.sync_block()
        tiles.copy_record(self.tid, self.at["record"], record, self.fmt.value_words, self.plan.plane_chunks)

    def load_page(self, ring: Value, start: Value) -> None:
        """The page's tokens are the slots (start + i) % W."""
        tile, slots = self.tile, self.plan.slots
        per_row = tile.row_bytes // CHUNK
        row, chunk = ptx.div(self.tid, per_row), ptx.rem(self.tid, per_row)
        column = ptx.address(ring, chunk, CHUNK)
        first = row if slots == PAGE else ptx.add(ptx.rem(start, slots), row)

        def source(i):
            slot = ptx.add(first, i * tile.rows_per_step)
            slot = ptx.select(sx.less_unsigned(slot, slots), slot, ptx.sub(slot, slots))
            return ptx.address(column, slot, tile.row_bytes), 0

        tile.load(self.tid, self.at["tile"], source)

    # ------------------------------------------------------------ tokens
    def scale_tokens(self) -> None:
        """Scale, min and what packing needs of the thread's token; the page's exponent and the end of the record."""
        tile = self.tile
        row = ptx.add(self.at["tile"], ptx.mul(self.tid, tile.group_bytes))
        lowest = highest = None
        for chunk in range(tile.row_bytes // CHUNK):
            words = ptx.load_shared(4, row, chunk * CHUNK, kind="f" if tile.kind == "f32" else "r")
            lowest = words if lowest is None else tile.min_pairs(lowest, words)
            highest = words if highest is None else tile.max_pairs(highest, words)
        low, high = self.reduce(lowest, sx.fmin), self.reduce(highest, ptx.fmax)
        top = ptx.reduce_lanes(ptx.fmax, ptx.fmax(ptx.fabs(low), ptx.fabs(high)), (1, 2, 4, 8, 16))
        exponent = tiles.page_exponent(top, self.warp, self.at["warps"], VALUE_LIMIT_LOG2)
        self.inverse = ptx.power_of_two(ptx.sub(ptx.i32(0), exponent))
        low, high = ptx.fmul(low, self.inverse), ptx.fmul(high, self.inverse)
        reciprocal = ptx.f32(tiles.RECIPROCAL[self.fmt.value_bits])
        metadata = choose_metadata(self.fmt, low, high, reciprocal, self.plan.shrink, self.warp, self.at["metadata"])
        scale, base = self.choose_range(metadata, row, low, high, reciprocal)
        metadata.store(self.part, self.tid, scale, base)
        self.end_record(metadata.grid_words(), exponent)
        step = tiles.nonzero(scale)
        if self.fmt.value_bits == 2:
            power = ptx.power_of_two(exponent)
            token = [self.limit(sx.first_with_code(i + 1, base, step, power)) for i in range(3)]
            token.append(ptx.i32(0))
        else:
            token = [ptx.bits_of(x) for x in (step, base, ptx.rcp(step))] + [ptx.i32(0)]
        ptx.store_shared(token, ptx.add(self.at["tokens"], ptx.mul(self.tid, 16)))

    def end_record(self, grid: list[Value], exponent: Value) -> None:
        """The bytes of the record that follow scale and min: 16."""
        words = [*grid, exponent]
        first = self.part["grid" if grid else "exponent"]
        with ptx.when(ptx.equal(self.tid, 0)):
            ptx.store_shared(words + [ptx.i32(0)] * (4 - len(words)), first)

    def choose_range(
        self, metadata: Metadata, row: Value, low: Value, high: Value, reciprocal: Value
    ) -> tuple[Value, Value]:
        """Scale and min of the token at ``row``, whose numbers go from ``low`` to ``high``."""
        shrink = self.plan.shrink
        if shrink == (1.0,):
            return scale_and_min(metadata, low, high, reciprocal)

        def attempt(cut):
            scale, base = scale_and_min(metadata, *tiles.shrunk_range(low, high, cut), reciprocal)
            return self.token_error(row, scale, base), scale, base

        if len(shrink) > 1:
            return tiles.best_of(shrink, attempt)
        ends = tiles.shrunk_range(low, high, ptx.f32(tiles.half_cut(shrink[0])))
        return scale_and_min(metadata, *ends, reciprocal)

    def token_error(self, row: Value, step: Value, base: Value) -> Value:
        """Squared error of the token's numbers, added in the order of :func:`.quantize.tree_sum`: the highest bit of
        the channel first, so the numbers of a chunk, which its lowest bits tell apart, come last."""
        tile, top = self.tile, ptx.f32(2.0**self.fmt.value_bits - 1)
        chunks = tile.row_bytes // CHUNK

        def leaf(chunk: int) -> list[Value]:
            words = ptx.load_shared(4, row, chunk * CHUNK, kind="f" if tile.kind == "f32" else "r")
            numbers = words if tile.kind == "f32" else [x for w in words for x in ptx.unpack_pair(w, tile.kind)]
            return [tiles.squared_error(ptx.fmul(x, self.inverse), step, base, top) for x in numbers]

        def add(a: list[Value], b: list[Value]) -> list[Value]:
            return [ptx.fadd(x, y) for x, y in zip(a, b, strict=True)]

        def over_chunks(bit: int, chunk: int) -> list[Value]:
            if 1 << bit == chunks:
                return leaf(chunk)
            return add(over_chunks(bit + 1, chunk), over_chunks(bit + 1, chunk | 1 << bit))

        sums = over_chunks(0, 0)
        while len(sums) > 1:
            sums = add(sums[: len(sums) // 2], sums[len(sums) // 2 :])
        return sums[0]

    def reduce(self, words: list[Value], f) -> Value:
        """One float32 out of words of numbers."""
        numbers = words if self.tile.kind == "f32" else [x for w in words for x in ptx.unpack_pair(w, self.tile.kind)]
        return ptx.tree(f, numbers)

    def limit(self, first: Value) -> Value:
        """A word that :meth:`.Tile.reaches` compares with: the threshold in both halves, or a float32's bits."""
        if self.tile.kind == "f32":
            return ptx.bits_of(first)
        return sx.splat(sx.round_up_to(first, self.tile.kind))

    # ------------------------------------------------------------ packing
    def position(self) -> tuple[Value, Value, Value, int]:
        """(group, rh, first, width): the word group, row half and rows, first to first + width - 1, the thread packs.

        Its c is the warp. The eight fields of a word are the channels ``16 * row_tile + 8 * rh + row`` of a token in
        each half (e = 0, 1).
        """
        groups = PAGE // 8 * (self.fmt.head_dim // 16) // 8
        group = ptx.bit_and(self.lane, groups - 1)
        rest = ptx.shr(self.lane, groups.bit_length() - 1)
        rh = ptx.bit_and(rest, 1)
        width = 8 * groups // 16
        first = ptx.mul(ptx.shr(rest, 1), width)
        return group, rh, first, width

    def fields(self):
        """Yields (field, abouts, columns): for tokens e = 0 and 1, where its numbers and the thread's channels lie.

        Field f of a group is row tile ``f % row_tiles`` of half tile ``group * 8 / row_tiles + f // row_tiles``.
        """
        row_tiles = self.fmt.head_dim // 16
        group, rh, first, _ = self.position()
        token = ptx.add(ptx.mul(self.warp, 2 * PAGE // 8), ptx.mul(group, 8 // row_tiles))
        channel = ptx.add(ptx.mul(rh, 8), first)
        column = ptx.add(
            ptx.add(self.at["tile"], ptx.mul(token, self.tile.group_bytes)), ptx.mul(channel, self.tile.itemsize)
        )
        about = ptx.add(self.at["tokens"], ptx.mul(token, 16))
        for field in range(8):
            rows = [e * PAGE // 8 + field // row_tiles for e in range(2)]
            channels = 16 * (field % row_tiles) * self.tile.itemsize
            yield (
                field,
                [(about, 16 * row) for row in rows],
                [(column, self.tile.row_offset(row) + channels) for row in rows],
            )

    def load_channels(self, column: tuple[Value, int], width: int) -> list[list[Value]]:
        """``width`` neighbouring channels as pairs (:meth:`.Tile.load_pair`)."""
        pointer, offset = column
        words = width * self.tile.itemsize // 4
        if self.tile.kind == "f32":
            flat = [x for i in range(0, words, 4) for x in ptx.load_shared(4, pointer, offset + 4 * i, kind="f")]
            return [flat[i : i + 2] for i in range(0, words, 2)]
        return [[x] for x in ptx.load_shared(words, pointer, offset)]

    def pack_2bit(self) -> None:
        *_, width = self.position()
        packed = [[ptx.i32(0)] * 2 for _ in range(width // 2)]  # by channel pair and e
        limits: dict[int, list[Value]] = {}
        for field, about, columns in self.fields():
            for e in range(2):
                pointer, offset = about[e]
                if offset not in limits:
                    kind = "f" if self.tile.kind == "f32" else "r"
                    limits[offset] = ptx.load_shared(4, pointer, offset, kind=kind)[:3]
                for pair, x in enumerate(self.load_channels(columns[e], width)):
                    reached = [self.tile.reaches(x, [limit] * len(x)) for limit in limits[offset]]
                    packed[pair][e] = tiles.insert_codes(packed[pair][e], reached, field)
        for pair, (first, second) in enumerate(packed):
            self.store_word(0, 2 * pair, ptx.prmt(first, second, 0x5410))
            self.store_word(0, 2 * pair + 1, ptx.prmt(first, second, 0x7632))

    def pack_4bit(self) -> None:
        *_, width = self.position()
        fields = list(self.fields())
        nibbles = [self.token_nibbles([(about[e], columns[e]) for _, about, columns in fields]) for e in range(2)]
        for row in range(width):
            first, second = (nibbles[e][row] for e in range(2))
            for plane in range(2):
                halves = [sx.even_pairs(ptx.bit_and(ptx.shr(x, 2 * plane), 0x33333333)) for x in (first, second)]
                self.store_word(plane, row, ptx.prmt(*halves, 0x5410))

    def token_nibbles(self, fields) -> list[Value]:
        """For each of the thread's channels, the codes of the eight fields ``(about, column)``, nibble by nibble."""
        *_, width = self.position()
        scales = {offset: ptx.load_shared(4, pointer, offset, kind="f")[:3] for (pointer, offset), _ in fields}
        data = [self.load_channels(column, width) for _, column in fields]
        out = []
        for pair in range(width // 2):
            numbers = [self.tile.to_floats(pairs[pair]) for pairs in data]
            for i in range(2):
                tokens = [scales[offset] for (_, offset), _ in fields]
                out.append(tiles.code_nibbles([x[i] for x in numbers], self.inverse, tokens))
        return out

    def store_word(self, plane: int, row: int, word: Value) -> None:
        """Stores the word of the thread's ``row``-th row."""
        group, rh, first, _ = self.position()
        lane = ptx.add(ptx.mul(first, 4), self.warp)
        offset = ptx.add(ptx.mul(ptx.shr(group, 1), CHUNK_STRIDE), ptx.mul(ptx.bit_and(group, 1), 8))
        offset = ptx.add(ptx.add(offset, ptx.mul(rh, 4)), ptx.mul(lane, CHUNK))
        plane_bytes = self.plan.plane_chunks // self.plan.planes // 32 * CHUNK_STRIDE
        ptx.store_shared([word], ptx.add(self.at["record"], offset), plane * plane_bytes + row * 4 * CHUNK)
