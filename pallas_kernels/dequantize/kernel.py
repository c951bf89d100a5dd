"""Page dequantization as a Mosaic GPU kernel: a block of 128 threads for every page and KV head.

A record comes to shared memory by asynchronous copies. A thread then makes 8 neighbouring channels of a token at a
time, one 16-byte store (two for float32), and the lanes of a warp write whole rows. Equal to the reference bit for bit:
``code * scale`` is exact, so its fused sum with min rounds once, as the reference's does; powers of two are exact.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.metadata_kernel import load_number
from kitty_jax.pallas_kernels.page_format import PageFormat, Part
from kitty_jax.pallas_kernels.ptx import THREADS, Value
from kitty_jax.pallas_kernels.store import ptx_store as sx
from kitty_jax.pallas_kernels.store import tile as tiles
from kitty_jax.pallas_kernels.store.tile import CHUNK, KINDS, PAGE, Layout

INTEGER = 0x4B000000  # bits of 2**23 as float32: or-ed with a small integer, the float32 2**23 + integer
NO_SLOT = 255


def unsupported(fmt: PageFormat, dtype: DTypeLike) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    return tiles.unsupported(jnp.dtype(dtype), fmt.page, fmt.head_dim)


@dataclasses.dataclass(frozen=True)
class DequantizePlan:
    """What is fixed when the kernel is built."""

    fmt: PageFormat
    keys: bool
    kv_heads: int
    pool: int
    kind: str

    @property
    def layout(self) -> dict[str, Part]:
        return self.fmt.key_parts if self.keys else self.fmt.value_parts

    @property
    def words(self) -> int:
        return self.fmt.key_words if self.keys else self.fmt.value_words

    @property
    def padded_chunks(self) -> int:
        """The low plane of keys gets a chunk of padding after every 32: lanes read from many half tiles at once."""
        return self.layout["low"].size // CHUNK if self.keys else 0

    @property
    def row_bytes(self) -> int:
        return self.fmt.head_dim * (4 if self.kind == "f32" else 2)

    @functools.cached_property
    def smem(self) -> Layout:
        return Layout.of(
            record=4 * self.words + self.padded_chunks // 32 * CHUNK,
            slots=self.fmt.head_dim,
            zero=16,
        )


def dequantize(pool: Array, page_ids: Array, fmt: PageFormat, side: str, dtype: DTypeLike) -> Array:
    """:func:`.dequantize.dequantize_pages` by the kernel."""
    m, k, _ = pool.shape
    dtype = jnp.dtype(dtype)
    plan = DequantizePlan(fmt=fmt, keys=side == "keys", kv_heads=k, pool=m, kind=KINDS[dtype.name])
    x = page_ids.shape[0]
    out = jax.ShapeDtypeStruct((x, k, fmt.page, fmt.head_dim), dtype)
    (result,) = ptx.launch(
        functools.partial(emit, plan), (out,), blocks=x * k, smem_bytes=plan.smem.total, name=f"dequantize_{side}"
    )(pool, page_ids)
    return result


def emit(plan: DequantizePlan, addresses: list[Value], smem: Value) -> None:
    pool, page_ids, out = addresses
    tid, block = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    page, head = ptx.div(block, plan.kv_heads), ptx.rem(block, plan.kv_heads)
    record = ptx.load_global(1, ptx.address(page_ids, page, 4))
    inside = sx.flag_if_less_unsigned(record, ptx.i32(plan.pool))
    work = Block(plan, smem, tid, ptx.address(out, block, PAGE * plan.row_bytes))
    with ptx.when(ptx.not_equal(inside, 0)):
        source = ptx.address(pool, ptx.add(ptx.mul(record, plan.kv_heads), head), 4 * plan.words)
        work.load(source)
        if plan.keys:
            work.restore_keys()
        else:
            work.restore_values()
    with ptx.when(ptx.equal(inside, 0)):
        work.write_zeros()


class Block:
    """One block's work."""

    def __init__(self, plan: DequantizePlan, smem: Value, tid: Value, out: Value):
        self.plan, self.fmt = plan, plan.fmt
        self.tid, self.out = tid, out
        self.lane, self.warp = ptx.bit_and(tid, 31), ptx.warp_index(tid)
        self.at = {name: ptx.add(smem, offset) for name, offset in plan.smem.offsets.items()}
        shift = plan.padded_chunks // 32 * CHUNK
        self.part = {
            name: ptx.add(self.at["record"], p.offset + (0 if name == "low" else shift))
            for name, p in plan.layout.items()
        }
        # Which 8 channels (a half tile of keys, 16 bytes of 16-bit numbers) a lane makes, and the rest of its index.
        eighths = self.fmt.head_dim // 8
        self.eighth, self.rest = ptx.bit_and(self.lane, eighths - 1), ptx.shr(self.lane, eighths.bit_length() - 1)

    def load(self, record: Value) -> None:
        """Copies the record to shared memory; marks every channel as not boosted."""

        def copy(i):
            target = ptx.add(self.at["record"], tiles.padded(i, self.plan.padded_chunks))
            sx.copy_async(target, 0, ptx.address(record, i, CHUNK), 0)

        tiles.in_chunks(self.tid, 0, self.plan.words // 4, copy)
        if self.plan.keys and self.fmt.boosted:
            with ptx.when(sx.less_unsigned(self.tid, self.fmt.head_dim)):
                sx.store_shared_byte(ptx.i32(NO_SLOT), ptx.add(self.at["slots"], self.tid))
            with ptx.when(ptx.equal(self.tid, 0)):
                ptx.store_shared([ptx.i32(0)] * 4, self.at["zero"])
        sx.wait_for_copies()
        ptx.sync_block()
        if self.plan.keys and self.fmt.boosted:
            with ptx.when(sx.less_unsigned(self.tid, self.fmt.boosted)):
                channel = ptx.load_shared_byte(ptx.add(self.part["channels"], self.tid))
                sx.store_shared_byte(self.tid, ptx.add(self.at["slots"], channel))
            ptx.sync_block()
        exponent = ptx.load_shared_byte(self.part["exponent"], signed=True)
        self.power = ptx.power_of_two(exponent)

    def metadata(self, name: str, index: Value, offset: int = 0) -> Value:
        """Scale or min number ``index + offset``, times the page's power of two."""
        return ptx.fmul(load_number(self.fmt, self.part, name, index, offset), self.power)

    @staticmethod
    def number(code: Value, scale: Value, low: Value) -> Value:
        """code * scale + low, for an integer code below 16."""
        integer = ptx.fsub(ptx.float_of(ptx.bit_or(code, ptx.i32(INTEGER))), ptx.f32(2.0**23))
        return ptx.fma(integer, scale, low)

    def store_row(self, numbers: list[Value], pointer: Value, offset: int) -> None:
        """Eight neighbouring channels."""
        if self.plan.kind == "f32":
            for i in range(0, 8, 4):
                ptx.store_global(numbers[i : i + 4], pointer, offset + 4 * i)
        else:
            pairs = [ptx.pack_pair(numbers[i], numbers[i + 1], self.plan.kind) for i in range(0, 8, 2)]
            ptx.store_global(pairs, pointer, offset)

    def column(self, token: Value) -> Value:
        """Address of the lane's channels of a token."""
        return ptx.address(
            ptx.address(self.out, token, self.plan.row_bytes),
            self.eighth,
            self.plan.row_bytes // (self.fmt.head_dim // 8),
        )

    def write_zeros(self) -> None:
        zeros = [ptx.i32(0)] * 4
        first = ptx.address(self.out, self.tid, CHUNK)
        for i in range(PAGE * self.plan.row_bytes // (THREADS * CHUNK)):
            ptx.store_global(zeros, first, i * THREADS * CHUNK)

    # ------------------------------------------------------------ keys
    def restore_keys(self) -> None:
        """A lane takes half tile ``eighth``: eight tokens (row tiles) of its channels come out of eight half words."""
        rh = ptx.bit_and(self.rest, 1)
        scales, lows, high = [], [], []
        for channel in range(8):
            scales.append(self.metadata("scale", ptx.mul(self.eighth, 8), channel))
            lows.append(self.metadata("min", ptx.mul(self.eighth, 8), channel))
            high.append(
                ptx.load_shared_byte(ptx.add(self.at["slots"], ptx.mul(self.eighth, 8)), channel)
                if self.fmt.boosted
                else None
            )
        chunk = ptx.mul(ptx.shr(self.eighth, 1), 33 * CHUNK)
        word = ptx.add(ptx.mul(ptx.bit_and(self.eighth, 1), 8), ptx.mul(rh, 4))
        low_words = ptx.add(self.part["low"], ptx.add(chunk, word))
        if self.fmt.head_dim == 128:
            rows = [ptx.add(self.warp, 4 * i) for i in range(2)]
        else:
            rows = [ptx.add(ptx.mul(self.warp, 2), ptx.shr(self.rest, 1))]
        for g in rows:
            codes = []
            pointer = ptx.add(low_words, ptx.mul(g, 4 * CHUNK))
            for c in range(4):
                words = ptx.load_shared(1, pointer, c * CHUNK)
                for e in range(2):
                    pairs = ptx.shr(words, 16) if e else ptx.bit_and(words, 0xFFFF)
                    codes.append(self.with_high_bits(sx.to_nibbles(pairs), high[2 * c + e], g, rh))
            column = self.column(ptx.add(ptx.mul(g, PAGE // 8), rh))
            for r in range(8):
                numbers = [
                    self.number(ptx.bit_and(ptx.shr(code, 4 * r), 15), scale, low)
                    for code, scale, low in zip(codes, scales, lows, strict=True)
                ]
                self.store_row(numbers, column, 2 * r * self.plan.row_bytes)

    def with_high_bits(self, nibbles: Value, slot: Value | None, g: Value, rh: Value) -> Value:
        """Adds the high bits of a channel with a slot in the high plane."""
        if slot is None:
            return nibbles
        offset = tiles.half_word_offset(slot, g, -(-self.fmt.boosted // 8))
        pointer = ptx.add(self.part["high"], ptx.add(offset, ptx.mul(rh, 4)))
        pointer = ptx.select(ptx.equal(slot, NO_SLOT), self.at["zero"], pointer)
        high = sx.to_nibbles(sx.load_shared_half(pointer))
        return ptx.bit_or(nibbles, ptx.shl(high, 2))

    # ------------------------------------------------------------ values
    def restore_values(self) -> None:
        """A lane takes 8 channels: row tile ``eighth / 2`` and rh = ``eighth % 2``; one token a turn."""
        row_tiles = self.fmt.head_dim // 16
        e = ptx.bit_and(self.rest, 1)
        tile, rh = ptx.shr(self.eighth, 1), ptx.bit_and(self.eighth, 1)
        base = ptx.add(ptx.mul(self.warp, CHUNK), ptx.mul(rh, 4))
        for turn in range(self.fmt.head_dim // 8):
            # With 64 channels a warp has lanes for two half tiles, which share a word group.
            if row_tiles == 8:
                half_tile, shift, group = ptx.i32(turn), ptx.mul(tile, 2), turn
            else:
                odd = ptx.shr(self.rest, 1)
                half_tile, group = ptx.add(odd, 2 * turn), turn
                shift = ptx.mul(ptx.add(tile, ptx.mul(odd, 4)), 2)
            shift = ptx.add(shift, ptx.mul(e, 16))
            token = ptx.add(ptx.add(ptx.mul(self.warp, PAGE // 4), ptx.mul(e, PAGE // 8)), half_tile)
            scale, low = self.metadata("scale", token), self.metadata("min", token)
            numbers = []
            for row in range(8):
                offset = group // 2 * 32 * CHUNK + group % 2 * 8 + row * 4 * CHUNK
                planes = ["low"] if self.fmt.value_bits == 2 else ["low", "high"]
                fields = [
                    ptx.bit_and(sx.shift_right(ptx.load_shared(1, ptx.add(self.part[p], base), offset), shift), 3)
                    for p in planes
                ]
                code = fields[0] if len(fields) == 1 else ptx.bit_or(fields[0], ptx.shl(fields[1], 2))
                numbers.append(self.number(code, scale, low))
            self.store_row(numbers, self.column(token), 0)
