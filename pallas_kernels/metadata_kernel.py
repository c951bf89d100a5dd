"""Scale and min of pages inside the kernels: float16, or bytes on the grid of their page (:mod:`.metadata`).

A number of a grid is ``(16 * base + byte) * 2**step``, of at most 11 bits: float16 and float32 hold it, so whoever
decodes it gets the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.metadata import BASE_UNIT, LEAST_STEP, OFFSET, REACH, SPAN, TOP
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import Value
from kitty_jax.pallas_kernels.store import ptx_store as sx
from kitty_jax.pallas_kernels.store import tile as tiles

NAMES = ("scale", "min")
THOUSANDS = 0x64646464  # over a byte, the upper byte of a float16 that is 1024 + the byte
LANES = (1, 2, 4, 8, 16)


def itemsize(fmt: PageFormat) -> int:
    """Bytes of a stored scale or min."""
    return 2 if fmt.metadata == "float16" else 1


# ---------------------------------------------------------------- decode attention: pairs of float16
class MetadataPairs:
    """A lane's scales and mins of the record in the slot at ``base``: ``count`` (2, 4 or 16) from number ``first`` on.

    ``parts`` gives the offsets of a record's parts from ``base``. ``small``: the numbers are below 64, which saves an
    instruction a pair.
    """

    def __init__(self, fmt: PageFormat, parts: dict[str, int], base: Value, first: Value, count: int, *, small: bool):
        self.fmt, self.parts, self.base, self.count, self.small = fmt, parts, base, count, small
        self.own = ptx.add(base, ptx.mul(first, itemsize(fmt)))

    def load(self, name: str) -> list[Value]:
        """Words of two float16."""
        size, offset = self.count * itemsize(self.fmt), self.parts[name]
        if size == 2:
            words = [sx.load_shared_half(self.own, offset)]
        else:
            step = min(size, 16)
            loads = [ptx.load_shared(step // 4, self.own, offset + i) for i in range(0, size, step)]
            words = [x for load in loads for x in (load if isinstance(load, list) else [load])]
        return words if self.fmt.metadata == "float16" else self._decode(name, words)

    def _decode(self, name: str, words: list[Value]) -> list[Value]:
        grid = ptx.load_shared(1, self.base, self.parts["grid"] + 4 * NAMES.index(name))
        power, shift = (ptx.splat_half(grid, i) for i in range(2))
        start = ptx.hmul2(shift, power) if self.small else None
        out = []
        for i in range(self.count // 2):
            # float16 1024 + byte. All that follows is exact.
            pair = ptx.prmt(words[i // 2], ptx.i32(THOUSANDS), (0x4140, 0x4342)[i % 2])
            if self.small:
                out.append(ptx.hfma2(pair, power, start))
            else:
                out.append(ptx.hmul2(ptx.hadd2(pair, shift), power))
        return out


# ---------------------------------------------------------------- dequantization: one number as float32
def load_number(fmt: PageFormat, part: dict[str, Value], name: str, index: Value, offset: int = 0) -> Value:
    """Number ``index + offset`` of the part ``name`` of a record whose parts lie at the addresses ``part``."""
    own = ptx.add(part[name], ptx.mul(index, itemsize(fmt)))
    if fmt.metadata == "float16":
        return sx.float_of_half(sx.load_shared_half(own, 2 * offset))
    first = 4 * NAMES.index(name)  # byte by byte: odd numbers of channels come before it
    halves = [ptx.load_shared_byte(part["grid"], first + i) for i in range(4)]
    power, shift = (sx.float_of_half(ptx.bit_or(a, ptx.shl(b, 8))) for a, b in (halves[:2], halves[2:]))
    byte = sx.float_of_int(ptx.add(ptx.load_shared_byte(own, offset), OFFSET))
    return ptx.fmul(ptx.fadd(byte, shift), power)


# ---------------------------------------------------------------- quantize-and-pack
@dataclasses.dataclass(frozen=True)
class Grid:
    """:class:`.metadata.Grid` of one statistic of the page: its step and base, and what rounding takes."""

    step: Value
    base: Value

    @classmethod
    def of(cls, low: Value, high: Value) -> Grid:
        """For numbers from ``low`` to ``high``."""
        span = ptx.fmul(ptx.fsub(high, low), _inverse(SPAN))
        top = ptx.fmul(ptx.fmax(ptx.fabs(low), ptx.fabs(high)), _inverse(REACH))
        step = ptx.max_signed(ptx.max_signed(_ceil_log2(span), _ceil_log2(top)), LEAST_STEP)
        down = ptx.fmul(low, ptx.power_of_two(ptx.sub(ptx.i32(0), step)))
        return cls(step, sx.floor_to_int(ptx.fmul(down, _inverse(BASE_UNIT))))

    @property
    def first(self) -> Value:
        """The level of byte 0, a float32."""
        return sx.float_of_int(ptx.mul(self.base, BASE_UNIT))

    def round(self, x: Value) -> Value:
        level = tiles.rounded(ptx.fmul(x, ptx.power_of_two(ptx.sub(ptx.i32(0), self.step))))
        level = sx.fmin(ptx.fmax(level, self.first), ptx.fadd(self.first, ptx.f32(TOP)))
        return ptx.fmul(level, ptx.power_of_two(self.step))

    def byte(self, number: Value) -> Value:
        """Of a number that the grid has; bits above the byte mean nothing."""
        level = ptx.fmul(number, ptx.power_of_two(ptx.sub(ptx.i32(0), self.step)))
        return ptx.bits_of(ptx.fadd(ptx.fsub(level, self.first), ptx.f32(sx.ROUNDER)))


def _inverse(count: int) -> Value:
    return ptx.f32(float(np.float32(1 / count)))


def _ceil_log2(x: Value) -> Value:
    bits = ptx.bits_of(x)
    more = sx.flag_if_less_unsigned(ptx.i32(0), ptx.bit_and(bits, 0x7FFFFF))
    return ptx.add(ptx.sub(ptx.shr(bits, 23), 127), more)


class HalfMetadata:
    """Scale and min as float16. ``round_*`` give float32 numbers that the record can hold."""

    def round_min(self, x: Value) -> Value:
        return sx.float_of_half(sx.half_of(x))

    round_scale = round_min

    def store(self, part: dict[str, Value], index: Value, scale: Value, low: Value) -> None:
        """Scale and min number ``index`` of the record."""
        for name, x in zip(NAMES, (scale, low), strict=True):
            sx.store_shared_half(sx.half_of(x), ptx.add(part[name], ptx.mul(index, 2)))

    def grid_words(self) -> list[Value]:
        return []


@dataclasses.dataclass(frozen=True)
class GridMetadata:
    """Scale and min as bytes on grids."""

    scale: Grid
    low: Grid

    def round_min(self, x: Value) -> Value:
        return self.low.round(x)

    def round_scale(self, x: Value) -> Value:
        return self.scale.round(x)

    def store(self, part: dict[str, Value], index: Value, scale: Value, low: Value) -> None:
        for name, grid, x in (("scale", self.scale, scale), ("min", self.low, low)):
            sx.store_shared_byte(grid.byte(x), ptx.add(part[name], index))

    def grid_words(self) -> list[Value]:
        """The part ``grid``, two words."""
        return [
            ptx.pack_pair(ptx.power_of_two(grid.step), ptx.fsub(grid.first, ptx.f32(OFFSET)), "f16")
            for grid in (self.scale, self.low)
        ]


Metadata = HalfMetadata | GridMetadata


def scratch_bytes(fmt: PageFormat) -> int:
    """Shared memory that :func:`choose_metadata` needs."""
    return 0 if fmt.metadata == "float16" else 4 * 16


def choose_metadata(
    fmt: PageFormat,
    low: Value,
    high: Value,
    reciprocal: Value,
    shrink: Sequence[float],
    warp: Value,
    scratch: Value | None,
) -> Metadata:
    """How the page's scales and mins are to be stored.

    Args:
        low, high: ends of the thread's channel or token; every one of the page is some thread's.
        reciprocal: of its number of steps.
        shrink: factors of its range that may be tried.
        warp: the thread's.
        scratch: :func:`scratch_bytes` of shared memory. Grids take a barrier.
    """
    if fmt.metadata == "float16":
        return HalfMetadata()
    widest, narrowest = (
        tiles.shrunk_range(low, high, ptx.f32(tiles.half_cut(factor))) for factor in (max(shrink), min(shrink))
    )
    scales = [tiles.scale_of(*ends, reciprocal) for ends in (narrowest, widest)]
    ends = [widest[0], narrowest[0], *scales]  # lowest and highest min, least and greatest scale
    pick = (sx.fmin, ptx.fmax, sx.fmin, ptx.fmax)
    ends = [ptx.reduce_lanes(f, x, LANES) for f, x in zip(pick, ends, strict=True)]
    ptx.store_shared(ends, ptx.add(scratch, ptx.mul(warp, 16)))
    ptx.sync_block()
    of_warps = [ptx.load_shared(4, scratch, 16 * i, kind="f") for i in range(4)]
    low, high, least, greatest = (ptx.tree(f, xs) for f, xs in zip(pick, zip(*of_warps, strict=True), strict=True))
    return GridMetadata(Grid.of(least, greatest), Grid.of(low, high))


def scale_and_min(metadata: Metadata, low: Value, high: Value, reciprocal: Value) -> tuple[Value, Value]:
    """The stored scale and min for the range from ``low`` to ``high``, float32."""
    low = metadata.round_min(ptx.fadd(low, ptx.f32(0.0)))  # -0 + 0 is +0
    return metadata.round_scale(tiles.scale_of(low, high, reciprocal)), low
