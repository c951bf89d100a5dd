"""What the quantize-and-pack kernels share: the page in shared memory, the arithmetic of codes, the way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jax import numpy as jnp

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.ptx import THREADS, Value
from kitty_jax.pallas_kernels.store import ptx_store as sx

PAGE = 128  # tokens of a page, the only size the kernels take
HEAD_DIMS = (64, 128)
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
CHUNK = 16  # bytes of the widest load, store and copy
RECIPROCAL = {2: float(np.float32(1 / 3)), 4: float(np.float32(1 / 15))}  # of the number of steps, by bits


def unsupported(dtype, page: int, head_dim: int) -> str | None:
    """Why the kernels do not take these pages, or None."""
    if page != PAGE:
        return f"the kernel takes pages of {PAGE} tokens, got {page}"
    if head_dim not in HEAD_DIMS:
        return f"the kernel takes head sizes {HEAD_DIMS}, got {head_dim}"
    if np.dtype(dtype).name not in KINDS:
        return f"the kernel takes {', '.join(KINDS)}, got {np.dtype(dtype).name}"
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Named parts of a block's shared memory: offsets in bytes, 16-byte aligned."""

    offsets: dict[str, int]
    total: int

    @classmethod
    def of(cls, **sizes: int) -> Layout:
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // CHUNK) * CHUNK
        return cls(offsets, end)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A page [128 tokens, D] in shared memory, padded so that the lanes of a warp read different banks.

    Attributes:
        head_dim: D.
        kind: "bf16", "f16" or "f32".
        rows_per_pad: a padding follows this many tokens.
        pad_bytes: its size, a multiple of 16.
    """

    head_dim: int
    kind: str
    rows_per_pad: int
    pad_bytes: int

    @property
    def itemsize(self) -> int:
        return 4 if self.kind == "f32" else 2

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.itemsize

    @property
    def bytes_in_memory(self) -> int:
        return PAGE * self.row_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes from one padded group of rows to the next."""
        return self.rows_per_pad * self.row_bytes + self.pad_bytes

    @property
    def size(self) -> int:
        return PAGE // self.rows_per_pad * self.group_bytes

    def row_offset(self, row: int) -> int:
        return row // self.rows_per_pad * self.group_bytes + row % self.rows_per_pad * self.row_bytes

    # ------------------------------------------------------------ loading
    @property
    def rows_per_step(self) -> int:
        """Rows the block loads with one 16-byte copy a thread."""
        return THREADS * CHUNK // self.row_bytes

    def load(self, tid: Value, tile: Value, source: Callable[[int], tuple[Value, int]]) -> None:
        """Starts the copies of the page: in step i, for rows_per_step rows, each thread 16 bytes of ``source(i)``.

        ``source(i)`` is a global address and an offset from it.
        """
        chunks = self.rows_per_pad * self.row_bytes // CHUNK  # between paddings
        first = ptx.mul(tid, CHUNK)
        if chunks < THREADS:
            first = ptx.add(first, ptx.mul(ptx.div(tid, chunks), self.pad_bytes))
        first = ptx.add(tile, first)
        for i in range(PAGE // self.rows_per_step):
            paddings = i * THREADS // chunks
            sx.copy_async(first, i * THREADS * CHUNK + paddings * self.pad_bytes, *source(i))

    # ------------------------------------------------------------ pairs of neighbouring channels
    def load_pair(self, pointer: Value, offset: int) -> list[Value]:
        """Two neighbours: one word of two 16-bit numbers, or two float32."""
        if self.kind == "f32":
            return ptx.load_shared(2, pointer, offset, kind="f")
        return [ptx.load_shared(1, pointer, offset)]

    def load_number(self, pointer: Value, offset: int = 0) -> Value:
        """One number, as float32."""
        if self.kind == "f32":
            return ptx.load_shared(1, pointer, offset, kind="f")
        return sx.float_of_half(sx.load_shared_half(pointer, offset), self.kind)

    def to_floats(self, pair: Sequence[Value]) -> list[Value]:
        return list(pair) if self.kind == "f32" else ptx.unpack_pair(pair[0], self.kind)

    def min_pairs(self, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        if self.kind == "f32":
            return [sx.fmin(x, y) for x, y in zip(a, b, strict=True)]
        return [sx.min_pair(x, y, self.kind) for x, y in zip(a, b, strict=True)]

    def max_pairs(self, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        if self.kind == "f32":
            return [ptx.fmax(x, y) for x, y in zip(a, b, strict=True)]
        return [sx.max_pair(x, y, self.kind) for x, y in zip(a, b, strict=True)]

    def reaches(self, pair: Sequence[Value], limits: Sequence[Value]) -> Value:
        """Halves of a word: 0xFFFF where the number reaches its limit, else 0."""
        if self.kind == "f32":
            low, high = (sx.at_least(x, limit) for x, limit in zip(pair, limits, strict=True))
            return ptx.prmt(low, high, 0x5410)
        return sx.at_least_pair(pair[0], limits[0], self.kind)

    def store_threshold(self, first: Value, pointer: Value, offset: int) -> None:
        """Stores the smallest number of the kind that is not below ``first``."""
        if self.kind == "f32":
            ptx.store_shared([first], pointer, offset)
        else:
            sx.store_shared_half(sx.round_up_to(first, self.kind), pointer, offset)


# ---------------------------------------------------------------- numbers
def short(x: Value) -> Value:
    """To 12 significant bits, half to even (:func:`.quantize._short`)."""
    bits = ptx.bits_of(x)
    odd = ptx.bit_and(ptx.shr(bits, 12), 1)
    return ptx.float_of(ptx.bit_and(ptx.add(ptx.add(bits, 0x7FF), odd), 0xFFFFF000))


def sortable(x: Value) -> Value:
    """float32 to a word whose unsigned order is the total order of the numbers (-0 below +0)."""
    bits = ptx.bits_of(x)
    flip = ptx.select(ptx.less(bits, 0), ptx.i32(0xFFFFFFFF), ptx.i32(0x80000000))
    return sx.bit_xor(bits, flip)


def page_exponent(top: Value, warp: Value, scratch: Value, limit_log2: int) -> Value:
    """:func:`.quantize.page_exponent` from each warp's largest magnitude; ``scratch`` is four words. Has a barrier."""
    ptx.store_shared([top], ptx.add(scratch, ptx.mul(warp, 4)))
    ptx.sync_block()
    top = ptx.tree(ptx.fmax, ptx.load_shared(4, scratch, kind="f"))
    return ptx.max_signed(ptx.sub(ptx.shr(ptx.bits_of(top), 23), 126 + limit_log2), 0)


def scale_of(low: Value, high: Value, reciprocal: Value) -> Value:
    """The unrounded scale of the range from ``low`` to ``high``; ``reciprocal`` is of its number of steps."""
    return ptx.fmul(ptx.fmax(ptx.fsub(high, low), ptx.f32(0.0)), reciprocal)


def nonzero(step: Value) -> Value:
    """The step to divide by: 1 where it is 0."""
    return ptx.select(ptx.equal(ptx.bits_of(step), 0), ptx.f32(1.0), step)


def half_cut(factor: float) -> float:
    """What a shrink factor takes off each end of the range, as a share of it."""
    return float(jnp.bfloat16((1 - factor) / 2))


def shrunk_range(low: Value, high: Value, cut: Value) -> tuple[Value, Value]:
    """The range from ``low`` to ``high`` without the share ``cut`` (:func:`half_cut`) of it at each end."""
    cut = ptx.fmul(short(ptx.fsub(high, low)), cut)
    return ptx.fadd(low, cut), ptx.fsub(high, cut)


def cut_of_factor(i: Value, factors: Sequence[float]) -> Value:
    """:func:`half_cut` of the ``i``-th shrink factor."""
    cut = ptx.f32(half_cut(factors[0]))
    for j, factor in enumerate(factors[1:], 1):
        cut = ptx.select(ptx.equal(i, j), ptx.f32(half_cut(factor)), cut)
    return cut


def best_of(factors: Sequence[float], attempt: Callable[[Value], tuple[Value, Value, Value]]) -> tuple[Value, Value]:
    """Scale and min of the shrink factor of least error, ties to the first; ``attempt(cut)`` is (error, scale, min)."""

    def body(i, error, scale, low):
        new = attempt(cut_of_factor(i, factors))
        better = ptx.not_equal(sx.flag_if_less(new[0], error), 0)
        first = ptx.equal(i, 0)
        old = (error, scale, low)
        return [ptx.select(first, a, ptx.select(better, a, b)) for a, b in zip(new, old, strict=True)]

    init = [ptx.float_of(ptx.i32(0x7F800000)), ptx.f32(0.0), ptx.f32(0.0)]
    _, scale, low = ptx.loop(ptx.i32(0), ptx.i32(len(factors)), ptx.i32(1), init, body)
    return scale, low


def quotient(x: Value, step: Value, inverse: Value) -> Value:
    """x / step, rounded: exact enough for every code.

    ``inverse`` is 1 / step rounded. The remainder of the first guess is exact, so what it adds is off by 2**-47 of the
    quotient. A float32 x that is no tie of codes is at least (1 + 2**-11) half units of the quotient away from one, as
    a step has 11 bits: rounding cannot make a tie of it.
    """
    guess = ptx.fmul(x, inverse)
    return ptx.fma(ptx.fma(sx.fneg(guess), step, x), inverse, guess)


def clamped(x: Value, top: Value) -> Value:
    return sx.fmin(ptx.fmax(x, ptx.f32(0.0)), top)


def rounded(x: Value) -> Value:
    """Half to even, for small x."""
    return ptx.fsub(ptx.fadd(x, ptx.f32(sx.ROUNDER)), ptx.f32(sx.ROUNDER))


def short_square(x: Value) -> Value:
    x = short(x)
    return ptx.fmul(x, x)


def squared_error(x: Value, step: Value, base: Value, top: Value) -> Value:
    """Of quantizing x to codes 0 to ``top``. A step of 0, which stands for equal numbers, counts as it is."""
    divisor = nonzero(step)
    code = rounded(clamped(quotient(ptx.fsub(x, base), divisor, ptx.rcp(divisor)), top))
    return short_square(ptx.fsub(ptx.fma(code, step, base), x))


def code_nibbles(numbers: Sequence[Value], factor: Value, scales: Sequence[Sequence[Value]]) -> Value:
    """4-bit codes of eight numbers, nibble by nibble.

    Number i is ``number * factor - base`` in steps, for ``step, base, inverse = scales[i]`` (:func:`quotient`).
    """
    top = ptx.f32(15.0)
    word = None
    for number, (step, base, inverse) in reversed(list(zip(numbers, scales, strict=True))):
        code = clamped(quotient(ptx.fma(number, factor, sx.fneg(base)), step, inverse), top)
        bits = ptx.bits_of(ptx.fadd(code, ptx.f32(sx.ROUNDER)))  # ROUNDER_BITS + code
        word = bits if word is None else ptx.add(ptx.shl(word, 4), bits)
    return ptx.sub(word, sum(sx.ROUNDER_BITS << 4 * i for i in range(8)) % 2**32)


def insert_codes(word: Value, reached: Sequence[Value], field: int) -> Value:
    """Adds to both halves of ``word`` the 2-bit code of a field: how many of three limits were reached, in order."""
    low = ptx.bit_and(sx.bit_xor(sx.bit_xor(reached[0], reached[1]), reached[2]), 0x00010001 << 2 * field)
    high = ptx.bit_and(reached[1], 0x00020002 << 2 * field)
    return ptx.bit_or(ptx.bit_or(word, low), high)


# ---------------------------------------------------------------- records
def half_word_offset(column: Value, g: Value, half_tiles: int) -> Value:
    """Offset in a plane of keys of the half word with a column's tokens of row g, rh = 0; rh = 1 is 4 bytes on.

    The layout is :mod:`.packing`'s for 8 row tiles: a half word is a field for each of them.
    """
    half_tile, c, e = ptx.shr(column, 3), ptx.bit_and(ptx.shr(column, 1), 3), ptx.bit_and(column, 1)
    lane = ptx.add(ptx.mul(g, 4), c)
    chunk = ptx.add(ptx.mul(ptx.shr(half_tile, 1), 512), ptx.mul(ptx.bit_and(half_tile, 1), 8))
    offset = ptx.add(chunk, ptx.mul(lane, 16))
    if half_tiles % 2:
        last = ptx.add(ptx.mul(lane, 8), half_tiles // 2 * 512)
        offset = ptx.select(ptx.equal(half_tile, half_tiles - 1), last, offset)
    return ptx.add(offset, ptx.mul(e, 2))


def in_chunks(tid: Value, start: int, end: int, body: Callable[[Value], None]) -> None:
    """``body(i)`` for every i from start to end - 1, one a thread at a time."""
    for first in range(start, end, THREADS):
        i = ptx.add(tid, first)
        if first + THREADS <= end:
            body(i)
            continue
        with ptx.when(sx.less_unsigned(i, end)):
            body(i)


def clear(tid: Value, record: Value, first: int, end: int) -> None:
    """Zeros the bytes from first to end - 1 of a record in shared memory, both multiples of 16."""
    zeros = [ptx.i32(0)] * 4
    in_chunks(tid, first // CHUNK, end // CHUNK, lambda i: ptx.store_shared(zeros, ptx.add(record, ptx.mul(i, CHUNK))))


def padded(i: Value, padded_chunks: int) -> Value:
    """Offset of 16-byte chunk i where a chunk of padding follows every 32 of the first ``padded_chunks``."""
    if not padded_chunks:
        return ptx.mul(i, CHUNK)
    return ptx.mul(ptx.add(i, ptx.min_unsigned(ptx.shr(i, 5), padded_chunks // 32)), CHUNK)


def copy_record(tid: Value, record: Value, pointer: Value, words: int, padded_chunks: int = 0) -> None:
    """Copies a record from shared memory (see :func:`padded`) to global memory."""

    def body(i):
        values = ptx.load_shared(4, ptx.add(record, padded(i, padded_chunks)))
        ptx.store_global(values, ptx.address(pointer, i, CHUNK))

    in_chunks(tid, 0, words // 4, body)
