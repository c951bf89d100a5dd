"""Scale and min of a page as bytes on a fixed-point grid: the reference of ``metadata="fixed8"`` (:mod:`.pages`).

A grid is a step and a base, two small integers. Byte b stands for ``(16 * base + b) * 2**step``: an integer of at most
11 bits times a power of two from 2**-24 on, which float16 holds exactly. So every decoding, in float16 or float32,
fused or not, gives the same bits.

Each page has one grid for its scales and one for its mins. Both are chosen from the ends, the least and the greatest
number to store: the step is the smallest power of two at which 256 levels from the base on reach the upper end and the
base fits a byte. Every product here is one with a power of two, or one that no sum follows, so a kernel that does the
same float32 operations gets the same bits.

All this is the project's own; what it costs is in docs/accuracy.md.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.pallas_kernels.page_format import PageFormat

BASE_UNIT = 16  # levels: the base is counted in these
TOP = 255  # the greatest byte
SPAN = TOP - BASE_UNIT  # levels between the ends: rounding the base down takes up to 15 of them, rounding a number one
REACH = 112 * BASE_UNIT  # levels from zero to the farther end: with TOP on top of it a number still has 11 bits
OFFSET = 1024  # float16's integers from here to 2,047 have the byte as their low bits
INFINITE_STEP = 128  # 2**128 is infinite, in float16 as well
LEAST_STEP = -24  # float16's smallest step is 2**-24


class Grid(NamedTuple):
    """``step`` and ``base``, int32 of one shape; from -24 to 7 and from -113 to 112 for the numbers of a page."""

    step: Array
    base: Array


def power_of_two(exponent: Array) -> Array:
    """2**exponent as float32, exactly, for integers from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def ceil_log2(x: Array) -> Array:
    """The smallest e with x <= 2**e, for float32 x >= 0: int32. From the bits, as logarithms round; -127 for 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def choose_grid(low: Array, high: Array) -> Grid:
    """The grid for numbers from ``low`` to ``high``, float32 of one shape: none of them is off by over half a step.

    Where an end is not finite, no number of the grid is, so that a page with NaN does not read as one without. That is
    the reference: PTX's min and max pass over NaN, so the kernels store such a page as if the NaN were not there.
    """
    span = ceil_log2((high - low) * np.float32(1 / SPAN))
    reach = ceil_log2(jnp.maximum(jnp.abs(low), jnp.abs(high)) * np.float32(1 / REACH))
    step = jnp.where(jnp.isfinite(high - low), jnp.maximum(jnp.maximum(span, reach), LEAST_STEP), INFINITE_STEP)
    base = jnp.floor(low * power_of_two(-step) * np.float32(1 / BASE_UNIT))
    return Grid(step, base.astype(jnp.int32))


def to_bytes(x: Array, grid: Grid) -> Array:
    """The byte of the nearest number of the grid, halves to even: float32, grid broadcast -> uint8."""
    level = jnp.round(x * power_of_two(-grid.step)).astype(jnp.int32)
    return jnp.clip(level - BASE_UNIT * grid.base, 0, TOP).astype(jnp.uint8)


def to_numbers(x: Array, grid: Grid) -> Array:
    """The number of a byte: uint8, grid broadcast -> float32."""
    return (BASE_UNIT * grid.base + x.astype(jnp.int32)).astype(jnp.float32) * power_of_two(grid.step)


def round_to(x: Array, grid: Grid) -> Array:
    """The nearest number of the grid: float32, grid broadcast -> float32."""
    return to_numbers(to_bytes(x, grid), grid)


def grid_bytes(scale: Grid, low: Grid) -> Array:
    """Part ``grid`` of a record from the grids of scale and min, int32 [...] each: uint8 [..., 8]."""
    halves = [
        x for g in (scale, low) for x in (power_of_two(g.step), (BASE_UNIT * g.base - OFFSET).astype(jnp.float32))
    ]
    pairs = jax.lax.bitcast_convert_type(jnp.stack(halves, -1).astype(jnp.float16), jnp.uint8)
    return pairs.reshape(*pairs.shape[:-2], -1)


def read_grids(part: Array) -> tuple[Grid, Grid]:
    """The grids of scale and min, int32 [...] each, that a record's part ``grid`` uint8 [..., 8] speaks of."""
    halves = jax.lax.bitcast_convert_type(part.reshape(*part.shape[:-1], 4, 2), jnp.float16).astype(jnp.float32)

    def grid(power: Array, shift: Array) -> Grid:
        return Grid(ceil_log2(power), (shift.astype(jnp.int32) + OFFSET) // BASE_UNIT)

    return grid(halves[..., 0], halves[..., 1]), grid(halves[..., 2], halves[..., 3])


def scale_and_min(parts: dict[str, Array], fmt: PageFormat) -> tuple[Array, Array]:
    """Scale and min of records' parts (:func:`.pages.split_record`), of keys or values and either kind of metadata.

    Returns:
        float32 [..., D] each for keys, [..., G] for values: numbers that float16 holds.
    """
    if fmt.metadata == "float16":
        return parts["scale"].astype(jnp.float32), parts["min"].astype(jnp.float32)
    scale, low = (Grid(*(x[..., None] for x in grid)) for grid in read_grids(parts["grid"]))
    return to_numbers(parts["scale"], scale), to_numbers(parts["min"], low)
