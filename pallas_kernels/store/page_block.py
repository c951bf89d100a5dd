"""One block's work in the quantize-and-pack kernel: load, statistics, choice of channels, codes, packing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.ptx import THREADS, Value
from kitty_jax.pallas_kernels.quantize import KEY_LIMIT_LOG2, VALUE_LIMIT_LOG2
from kitty_jax.pallas_kernels.store.shape import PAGE, UNROLL, StoreShape

LANES = (1, 2, 4, 8, 16)
ROUNDER = 12582912.0  # 1.5 * 2**23: a small float32 added to it is rounded half to even, in the low bits of the sum


class PageBlock:
    """A block's work on one page, as thread ``tid`` sees it. With 64 units, threads 64 to 127 repeat those before."""

    def __init__(self, shape: StoreShape, smem: Value):
        self.shape = shape
        self.tid = ptx.special_register("tid.x")
        self.unit = self.tid & (shape.units - 1)
        self.at = {name: smem + offset for name, offset in shape.smem.items() if name != "total"}
        unit_stride, self.stride = shape.itemsize, shape.pitch
        if not shape.is_keys:
            unit_stride, self.stride = self.stride, unit_stride
        self.own_elements = self.at["tile"] + self.unit * unit_stride

    def run(self, source: Value, start: Value | None, vectors: list[Value], record: Value) -> None:
        shape = self.shape
        self.load_page(source, start)
        self.low, self.high = self.range_of_unit()
        self.exponent = self.page_exponent()
        self.inverse = ptx.power_of_two(0 - self.exponent)
        boosted = self.choose_channels(vectors, record) if shape.is_keys else None
        if shape.chooses:
            self.levels = ptx.select(boosted, ptx.f32(15.0), 3.0)
            self.reciprocal = ptx.select(boosted, ptx.f32(np.float32(1 / 15)), float(np.float32(1 / 3)))
        else:
            levels = 15 if shape.boosted else 3
            self.levels, self.reciprocal = ptx.f32(levels), ptx.f32(float(np.float32(1 / levels)))
        scale, low = self.best_range()
        for name, x in (("scale", scale), ("min", low)):
            ptx.store_global_as(x, ptx.address(record, self.unit, 2), shape.parts[name].offset, "f16")
        self.store_end(record)
        ptx.sync_block()
        self.write_codes(scale, low)
        ptx.sync_block()
        self.pack("low", shape.units, record)
        if shape.boosted:
            self.pack("high", shape.boosted, record)

    # ------------------------------------------------------------ the page and its statistics
    def load_page(self, source: Value, start: Value | None) -> None:
        """Brings the page to shared memory, a word of a thread at a time."""
        shape = self.shape
        row_words = shape.row_bytes // 4
        rows, first_row, column = THREADS // row_words, self.tid // row_words, self.tid % row_words * 4
        target = self.at["tile"] + column

        def body(i: Value) -> list[Value]:
            tokens = [first_row + (i + j) * rows for j in range(UNROLL)]
            slots = tokens if start is None else [(start + token) % shape.slots for token in tokens]
            words = [ptx.load_global(1, ptx.address(source, slot * shape.row_bytes + column)) for slot in slots]
            for token, word in zip(tokens, words, strict=True):
                ptx.store_shared([word], target + token * shape.pitch)
            return []

        ptx.loop(ptx.i32(0), PAGE // rows, UNROLL, [], body)
        ptx.sync_block()

    def element(self, pointer: Value, index: int = 0) -> Value:
        """The ``index``-th element of a unit from ``pointer`` on, as float32."""
        if self.shape.kind == "f32":
            return ptx.load_shared(1, pointer, index * self.stride, kind="f")
        return ptx.float_of_half(ptx.load_shared_half(pointer, index * self.stride), self.shape.kind)

    def range_of_unit(self) -> tuple[Value, Value]:
        """The unit's least and greatest element."""

        def body(i: Value, low: Value, high: Value) -> list[Value]:
            pointer = self.own_elements + i * self.stride
            numbers = [self.element(pointer, j) for j in range(UNROLL)]
            return [ptx.tree(ptx.fmin, [low, *numbers]), ptx.tree(ptx.fmax, [high, *numbers])]

        init = [ptx.f32(float("inf")), ptx.f32(float("-inf"))]
        return tuple(ptx.loop(ptx.i32(0), self.shape.elements, UNROLL, init, body))

    def page_exponent(self) -> Value:
        """:func:`.quantize.page_exponent` of the page."""
        limit = KEY_LIMIT_LOG2 if self.shape.is_keys else VALUE_LIMIT_LOG2
        top = ptx.reduce_lanes(ptx.fmax, ptx.fmax(ptx.fabs(self.low), ptx.fabs(self.high)), LANES)
        ptx.store_shared([top], self.at["warps"] + ptx.warp_index(self.tid) * 4)
        ptx.sync_block()
        top = ptx.tree(ptx.fmax, ptx.load_shared(4, self.at["warps"], kind="f"))
        return ptx.maximum((ptx.bits_of(top) >> 23) - (126 + limit), 0)

    def tree_sum(self, term: Callable[[Value], Value]) -> Value:
        """Sum of ``term(element)`` over a channel's 128 tokens, in the order of :func:`.quantize.tree_sum`."""
        own = self.at["sums"] + self.tid * 4
        halves = functools.partial(_halving_tree, operator.add)

        def body(i: Value) -> list[Value]:
            pointer = self.own_elements + i * self.stride
            terms = [term(self.element(pointer, token)) for token in range(0, PAGE, UNROLL)]
            ptx.store_shared([halves(terms)], own + i * (4 * THREADS))
            return []

        ptx.loop(ptx.i32(0), UNROLL, 1, [], body)
        return halves([ptx.load_shared(1, own, 4 * THREADS * i, kind="f") for i in range(UNROLL)])

    # ------------------------------------------------------------ the choice of channels
    def score(self, vectors: list[Value]) -> Value:
        """The channel's score (:func:`.quantize.channel_scores`, or the given one) times its weight, if it has one."""
        given = [ptx.load_global(1, ptx.address(v, self.unit, 4), kind="f") for v in vectors]
        weight = given.pop() if self.shape.weighted else None
        mean = 1 / PAGE  # a power of two: the product is exact
        if self.shape.score is None:
            score = given[0]
        elif self.shape.score == "range":
            score = self.high - self.low
        elif self.shape.score == "magnitude":
            score = self.tree_sum(ptx.fabs) * mean
        else:
            centre = self.tree_sum(lambda x: x) * mean
            score = self.tree_sum(lambda x: _short_square(x - centre)) * mean
        return score * weight if weight is not None else score

    def choose_channels(self, vectors: list[Value], record: Value) -> Value | None:
        """Writes the list of boosted channels. Returns the i1 whether the thread's is one, None where all or none are.

        A channel's rank is how many have a higher score, or the same one and a lower number; its place in the list is
        how many boosted ones come before it.
        """
        shape = self.shape
        if not shape.chooses:
            if shape.boosted:
                self.store_channel(self.unit, record)
            return None
        own = _sortable(self.score(vectors))
        ptx.store_shared([own], self.at["scores"] + self.unit * 4)
        ptx.sync_block()
        rank = self.count("scores", lambda i, other: own.below(other) | ((other == own) & (i < self.unit)))
        ptx.store_shared([rank], self.at["ranks"] + self.unit * 4)
        ptx.sync_block()
        place = self.count("ranks", lambda i, other: other.below(shape.boosted) & (i < self.unit))
        boosted = rank.below(shape.boosted)
        with ptx.when(boosted):
            self.store_channel(place, record)
        return boosted

    def count(self, name: str, counts: Callable[[Value, Value], Value]) -> Value:
        """How many channels i, with the word ``other`` of an array in shared memory, make ``counts(i, other)`` true."""

        def body(i: Value, total: Value) -> list[Value]:
            for j, other in enumerate(ptx.load_shared(4, self.at[name] + i * 4)):
                total = total + ptx.select(counts(i + j, other), ptx.i32(1), 0)
            return [total]

        return ptx.loop(ptx.i32(0), self.shape.units, 4, [ptx.i32(0)], body)[0]

    def store_channel(self, place: Value, record: Value) -> None:
        ptx.store_shared_byte(self.unit, self.at["channels"] + place)
        ptx.store_global_byte(self.unit, ptx.address(record, place), self.shape.parts["channels"].offset)

    # ------------------------------------------------------------ scale, min and codes
    def best_range(self) -> tuple[Value, Value]:
        """Scale and min of the shrink factor of least squared error, ties to the first."""
        low, high = self.low * self.inverse, self.high * self.inverse
        if self.shape.shrink == (1.0,):
            return self.scale_and_min(low, high)
        width = _short(high - low)
        best = None
        for factor in self.shape.shrink:
            cut = width * float(jnp.bfloat16((1 - factor) / 2))
            scale, base = self.scale_and_min(low + cut, high - cut)
            if len(self.shape.shrink) == 1:
                return scale, base
            error = self.tree_sum(lambda x, scale=scale, base=base: self.squared_error(x * self.inverse, scale, base))
            new = (error, scale, base)
            if best is None:
                best = new
            else:
                better = ptx.less_float(error, best[0])
                best = tuple(ptx.select(better, x, y) for x, y in zip(new, best, strict=True))
        return best[1:]

    def scale_and_min(self, low: Value, high: Value) -> tuple[Value, Value]:
        """The stored scale and min of a range, as float32."""
        low = ptx.float_of_half(ptx.half_of(low + 0.0))  # -0 + 0 is +0
        return ptx.float_of_half(ptx.half_of(ptx.fmax(high - low, ptx.f32(0.0)) * self.reciprocal)), low

    def code(self, x: Value, scale: Value, base: Value) -> Value:
        """The code of x, as a float32 to which :data:`ROUNDER` has been added.

        The remainder of the first guess is exact, so what it adds is off by 2**-47 of the quotient. An x that is no tie
        of codes is at least (1 + 2**-11) half units of the quotient away from one, as a scale has 11 bits: rounding
        cannot make a tie of it.
        """
        step = ptx.select(ptx.bits_of(scale) == 0, ptx.f32(1.0), scale)
        inverse = ptx.rcp(step)
        x = x - base
        guess = x * inverse
        quotient = ptx.fma(ptx.fma(0.0 - guess, step, x), inverse, guess)
        return ptx.fmin(ptx.fmax(quotient, ptx.f32(0.0)), self.levels) + ROUNDER

    def squared_error(self, x: Value, scale: Value, base: Value) -> Value:
        return _short_square(ptx.fma(self.code(x, scale, base) - ROUNDER, scale, base) - x)

    def write_codes(self, scale: Value, base: Value) -> None:
        """The unit's codes to shared memory, a byte each: [elements, units]."""
        own = self.at["sums"] + self.unit

        def body(i: Value) -> list[Value]:
            pointer, target = self.own_elements + i * self.stride, own + i * self.shape.code_pitch
            for j in range(8):
                code = self.code(self.element(pointer, j) * self.inverse, scale, base)
                ptx.store_shared_byte(ptx.bits_of(code), target, j * self.shape.code_pitch)
            return []

        ptx.loop(ptx.i32(0), self.shape.elements, 8, [], body)

    def store_end(self, record: Value) -> None:
        """The record's last bytes: the exponent, and zeros after it."""
        part = self.shape.parts["exponent"]
        with ptx.when(self.tid.below(4 * self.shape.words - part.offset)):
            byte = ptx.select(self.tid == 0, self.exponent, 0)
            ptx.store_global_byte(byte, ptx.address(record, self.tid), part.offset)

    # ------------------------------------------------------------ packing
    def pack(self, plane: str, columns: int, record: Value) -> None:
        """Assembles a plane of ``columns`` units: a thread makes one word of two word groups at a time."""
        target = ptx.address(record, self.tid, 4)
        offset = self.shape.parts[plane].offset
        groups = self.shape.elements // 16 * -(-columns // 8) // 8

        def body(chunk: Value) -> list[Value]:
            word = self.word(plane, columns, chunk * 2 + (self.tid >> 1 & 1), self.tid >> 2, self.tid & 1)
            ptx.store_global([word], ptx.address(target, chunk, 4 * THREADS), offset)
            return []

        if groups > 1:
            ptx.loop(ptx.i32(0), groups // 2, 1, [], body)
        if groups % 2:
            with ptx.when(self.tid.below(THREADS // 2)):
                word = self.word(plane, columns, ptx.i32(groups - 1), self.tid >> 1, self.tid & 1)
                ptx.store_global([word], target, offset + groups // 2 * 4 * THREADS)

    def word(self, plane: str, columns: int, group: Value, lane: Value, rh: Value) -> Value:
        """Word ``rh`` of a lane in a word group: fields 0 to 7 of columns ``2 * c + e``, as :mod:`.packing` says."""
        shape = self.shape
        g, c = lane >> 2, lane & 3
        row_tiles = shape.elements // 16
        row = g * (PAGE // 8) + rh if shape.is_keys else rh * 8 + g
        word = ptx.i32(0)
        for e in range(2):
            column = group * 8 + c * 2 + e if shape.is_keys else (c * 2 + e) * (PAGE // 8) + group * (8 // row_tiles)
            inside = None
            if shape.is_keys and plane == "high":
                inside = column.below(columns) if columns % 8 else None
                column = ptx.load_shared_byte(self.at["channels"] + ptx.min_unsigned(column, columns - 1))
            pointer = self.at["sums"] + row * shape.code_pitch + column
            half = ptx.i32(0)
            for field in range(8):
                rows = 2 * field if shape.is_keys else 16 * (field % row_tiles)
                code = ptx.load_shared_byte(pointer, rows * shape.code_pitch + field // row_tiles)
                half = half | ((code >> (2 if plane == "high" else 0)) & 3) << 2 * field
            half = half if inside is None else ptx.select(inside, half, 0)
            word = word | half << 16 * e
        return word


def _halving_tree(f: Callable, xs: list[Value]) -> Value:
    """Reduces a power of two of values: the first half with the second, and so on."""
    while len(xs) > 1:
        half = len(xs) // 2
        xs = [f(a, b) for a, b in zip(xs[:half], xs[half:], strict=True)]
    return xs[0]


def _short(x: Value) -> Value:
    """To 12 significant bits, half to even (:func:`.quantize._short`)."""
    bits = ptx.bits_of(x)
    return ptx.float_of((bits + 0x7FF + (bits >> 12 & 1)) & 0xFFFFF000)


def _short_square(x: Value) -> Value:
    x = _short(x)
    return x * x


def _sortable(x: Value) -> Value:
    """float32 to a word whose unsigned order is the total order of the numbers (-0 below +0)."""
    bits = ptx.bits_of(x)
    return bits ^ ptx.select(bits < 0, ptx.i32(0xFFFFFFFF), 0x80000000)
