"""A numpy stand-in for ``mosaic_ptx`` and ``store_ptx``: runs a kernel, block by block of 128 threads, on any machine.

A value is an array with an entry for each thread: uint32 for words, float32, int64 for global addresses, bool for
conditions. Threads run in step, so an ordering that only a barrier guarantees would never show in the results: shared
memory therefore remembers who touched each byte since the last barrier, and :class:`Block` reports races. Arithmetic is
that of the instructions, bit for bit, on finite numbers.
"""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np

from kitty_jax.pallas_kernels.store import ptx_store as store_ptx

THREADS = 128
OPERAND_SHIFT = 40  # bits of an address below the number of its operand
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDER, ROUNDER_BITS = store_ptx.ROUNDER, store_ptx.ROUNDER_BITS
TID = np.arange(THREADS, dtype=np.uint32)
_block: Block


class Block:
    """Memory and state of the block that runs."""

    def __init__(self, index: int, operands: list[np.ndarray], smem_bytes: int):
        self.index, self.operands, self.epoch = index, operands, 0
        self.active = np.ones(THREADS, bool)
        self.shared = np.full(smem_bytes, 0xAB, np.uint8)  # what is read before it is written should be seen
        self.writer, self.reader = np.full((2, smem_bytes), -1)
        self.written, self.read = np.full((2, smem_bytes), -1)  # epochs
        self.races: set[str] = set()

    def shared_bytes(self, address, size):
        """(indices, threads) of the active threads' bytes."""
        assert not (address[self.active] % size).any(), f"an access of {size} bytes is not aligned"
        where = (address.astype(np.int64)[:, None] + np.arange(size))[self.active]
        assert not where.size or where.max() < self.shared.size, "beyond the shared memory asked for"
        return where, np.broadcast_to(np.flatnonzero(self.active)[:, None], where.shape)

    def load(self, address, size):
        where, thread = self.shared_bytes(address, size)
        if ((self.written[where] == self.epoch) & (self.writer[where] != thread)).any():
            self.races.add("read of another thread's write without a barrier between")
        shared_by_others = (self.read[where] == self.epoch) & (self.reader[where] != thread)
        self.reader[where] = np.where(shared_by_others, -2, thread)
        several = np.flatnonzero(np.bincount(where.ravel(), minlength=self.shared.size) > 1)
        self.reader[several] = -2
        self.read[where] = self.epoch
        out = np.zeros((THREADS, size), np.uint8)
        out[self.active] = self.shared[where]
        return out

    def store(self, address, data):
        where, thread = self.shared_bytes(address, data.shape[1])
        data = data[self.active]
        if ((self.read[where] == self.epoch) & (self.reader[where] != thread)).any():
            self.races.add("write after another thread's read without a barrier between")
        other = (self.written[where] == self.epoch) & (self.writer[where] != thread)
        different = other & (self.shared[where] != data)
        self.shared[where] = data
        if different.any() or (self.shared[where] != data).any():
            self.races.add("two threads write different bytes")
        self.written[where], self.writer[where] = self.epoch, thread

    def global_bytes(self, address, size):
        address = address[self.active]
        assert not (address % size).any(), f"a global access of {size} bytes is not aligned"
        operand = np.unique(address >> OPERAND_SHIFT)
        assert operand.size == 1
        memory = self.operands[operand[0]]
        where = (address & ((1 << OPERAND_SHIFT) - 1))[:, None] + np.arange(size)
        assert where.max() < memory.size, "beyond an operand"
        return memory, where


def run(emit, operands: list[np.ndarray], blocks: int, smem_bytes: int) -> list[np.ndarray]:
    """Runs ``emit(addresses, smem)`` for every block; returns the operands as the blocks leave them, as bytes."""
    global _block
    memory = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy() for x in operands]
    addresses = [np.full(THREADS, i << OPERAND_SHIFT, np.int64) for i in range(len(memory))]
    for index in range(blocks):
        _block = Block(index, memory, smem_bytes)
        with np.errstate(all="ignore"):
            emit(list(addresses), np.zeros(THREADS, np.uint32))
        assert not _block.races, _block.races
    return memory


# ---------------------------------------------------------------- words
def _like(x, other):
    if not isinstance(x, int):
        return x
    return np.full(THREADS, x if other.dtype == np.int64 else x % 2**32, other.dtype)


def _signed(x):
    return x.view(np.int32)


def _words(x):
    return np.ascontiguousarray(x).view(np.uint32).reshape(THREADS)


def i32(x):
    return np.full(THREADS, x % 2**32, np.uint32)


def f32(x):
    return np.full(THREADS, x, np.float32)


def special_register(name):
    return {"tid.x": TID.copy(), "ctaid.x": i32(_block.index)}[name]


def warp_index(tid):
    return tid >> np.uint32(5)


def lanes_below():
    return (np.uint32(1) << (TID % 32)) - np.uint32(1)


def _binary(f):
    return lambda a, b: f(a, _like(b, a))


add, sub, mul = (_binary(f) for f in (np.add, np.subtract, np.multiply))
div, rem = _binary(np.floor_divide), _binary(np.remainder)
bit_and, bit_or, bit_xor = (_binary(f) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
min_unsigned, less_unsigned = _binary(np.minimum), _binary(np.less)
equal, not_equal = _binary(np.equal), _binary(np.not_equal)
less = _binary(lambda a, b: _signed(a) < _signed(b))
max_signed = _binary(lambda a, b: np.maximum(_signed(a), _signed(b)).view(np.uint32))
select = np.where


def shl(a, bits):
    return a << np.uint32(bits)


def shr(a, bits):
    return a >> np.uint32(bits)


def shift_right(a, bits):
    return a >> bits


def address(base, index, stride):
    return base + index.astype(np.int64) * stride


def popc(a):
    return np.bitwise_count(a).astype(np.uint32)


def ballot(flag):
    bits = (flag != 0).reshape(-1, 32) * (np.uint64(1) << np.arange(32, dtype=np.uint64))
    return np.repeat(bits.sum(1).astype(np.uint32), 32)


def flag_if_less_unsigned(a, b):
    return (a < b).astype(np.uint32)


flag_if_less = flag_if_less_unsigned


def add_if_above(count, key, low, other_key, other_low):
    wide = lambda high, low: (high.astype(np.uint64) << np.uint64(32)) | low  # noqa: E731
    return count + (wide(key, np.uint64(low)) > wide(other_key, other_low.astype(np.uint64))).astype(np.uint32)


def prmt(a, b, selector):
    both = np.stack([a, b], 1).view(np.uint8)
    return _words(both[:, [selector >> 4 * i & 7 for i in range(4)]])


def even_pairs(x):
    for shift, mask in ((2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        x = (x | x >> np.uint32(shift)) & np.uint32(mask)
    return x


def to_nibbles(x):
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333)):
        x = (x | x << np.uint32(shift)) & np.uint32(mask)
    return x


# ---------------------------------------------------------------- numbers
fadd, fsub, fmul = np.add, np.subtract, np.multiply
fmin, fmax, fabs, fneg = np.minimum, np.maximum, np.abs, np.negative


def fma(a, b, c):
    """One rounding: the sum in float64 is rounded to odd, so that rounding it to float32 does not round twice."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    to_odd = (error != 0) & (total.view(np.int64) & 1 == 0) & np.isfinite(error)
    return np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def rcp(a):
    return (1 / a.astype(np.float64)).astype(np.float32)


def bits_of(a):
    assert a.dtype == np.float32
    return a.view(np.uint32)


def float_of(a):
    assert a.dtype == np.uint32
    return a.view(np.float32)


def power_of_two(e):
    return np.ldexp(np.float32(1), np.clip(_signed(e), -126, 127)).astype(np.float32)


def tree(f, values):
    values = list(values)
    while len(values) > 1:
        values = [f(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def reduce_lanes(f, a, lanes):
    for distance in lanes:
        a = f(a, a[TID ^ np.uint32(distance)])
    return a


def _pair(word, kind):
    return word.reshape(THREADS, 1).view(HALVES[kind])


def unpack_pair(word, kind):
    return list(np.ascontiguousarray(_pair(word, kind).astype(np.float32).T))


def pack_pair(low, high, kind):
    return _words(np.stack([low, high], 1).astype(HALVES[kind]))


def min_pair(a, b, kind):
    return _words(np.minimum(_pair(a, kind), _pair(b, kind)))


def max_pair(a, b, kind):
    return _words(np.maximum(_pair(a, kind), _pair(b, kind)))


def at_least_pair(a, b, kind):
    return _words(np.where(_pair(a, kind) >= _pair(b, kind), np.uint16(0xFFFF), np.uint16(0)))


def at_least(a, b):
    return np.where(a >= b, np.uint32(0xFFFFFFFF), np.uint32(0))


def half_of(a):
    return a.astype(np.float16).view(np.uint16).astype(np.uint32)


def float_of_half(a, kind="f16"):
    return a.astype(np.uint16).view(HALVES[kind]).astype(np.float32)


def float_of_int(a):
    return _signed(a).astype(np.float32)


def floor_to_int(a):
    return np.floor(a).astype(np.int32).view(np.uint32)


def splat(a):
    return (a & np.uint32(0xFFFF)) * np.uint32(0x10001)


def round_up_to(a, kind):
    half = a.astype(HALVES[kind])
    above = np.nextafter(half, HALVES[kind](np.inf))
    return np.where(half.astype(np.float32) < a, above, half).view(np.uint16).astype(np.uint32)


def first_with_code(code, base, step, power):
    """By bisection over all float32 in order: nothing of the instructions' arithmetic is repeated here."""
    wanted = np.float32(code)

    def number(rank):  # of the finite float32 in ascending order; the middle rank is zero
        bits = np.where(rank >= 0, rank, -rank - 1) | np.where(rank >= 0, 0, 1 << 31)
        return bits.astype(np.uint32).view(np.float32)

    low = np.full(THREADS, -0x7F800000, np.int64)  # -infinity's neighbour
    high = np.full(THREADS, 0x7F800000, np.int64)  # infinity
    while (low < high).any():
        middle = (low + high) // 2
        difference = number(middle) / power - base
        quotient = difference.astype(np.float64) / step
        reached = np.round(quotient) >= wanted
        low, high = np.where(reached, low, np.minimum(middle + 1, high)), np.where(reached, middle, high)
    return number(low)


# ---------------------------------------------------------------- memory and control
def _vectors(data, n, kind):
    words = np.ascontiguousarray(data).view(np.float32 if kind == "f" else np.uint32)
    return [words[:, i].copy() for i in range(n)] if n > 1 else words[:, 0].copy()


def load_shared(n, pointer, offset=0, kind="r"):
    return _vectors(_block.load(pointer + np.uint32(offset), 4 * n), n, kind)


def load_shared_half(pointer, offset=0):
    return _block.load(pointer + np.uint32(offset), 2).view(np.uint16)[:, 0].astype(np.uint32)


def load_shared_byte(pointer, offset=0, *, signed=False):
    data = _block.load(pointer + np.uint32(offset), 1)[:, 0]
    return data.view(np.int8).astype(np.int32).view(np.uint32) if signed else data.astype(np.uint32)


def store_shared(values, pointer, offset=0):
    _block.store(pointer + np.uint32(offset), np.stack([_words(x) for x in values], 1).view(np.uint8))


def store_shared_half(value, pointer, offset=0):
    _block.store(pointer + np.uint32(offset), value.astype(np.uint16)[:, None].view(np.uint8))


def store_shared_byte(value, pointer, offset=0):
    _block.store(pointer + np.uint32(offset), value.astype(np.uint8)[:, None])


def load_global(n, pointer, offset=0, kind="r"):
    out = np.zeros((THREADS, 4 * n), np.uint8)
    if _block.active.any():
        memory, where = _block.global_bytes(pointer + offset, 4 * n)
        out[_block.active] = memory[where]
    return _vectors(out, n, kind)


def store_global(values, pointer, offset=0):
    if _block.active.any():
        data = np.stack([_words(x) for x in values], 1).view(np.uint8)
        memory, where = _block.global_bytes(pointer + offset, data.shape[1])
        memory[where] = data[_block.active]


def copy_async(shared, shared_offset, pointer, offset):
    if _block.active.any():
        memory, where = _block.global_bytes(pointer + offset, 16)
        data = np.zeros((THREADS, 16), np.uint8)
        data[_block.active] = memory[where]
        _block.store(shared + np.uint32(shared_offset), data)


def wait_for_copies():
    pass


def sync_block():
    _block.epoch += 1


@contextlib.contextmanager
def when(condition):
    outer = _block.active
    _block.active = outer & condition
    yield
    _block.active = outer


def loop(start, stop, step, init, body):
    state = list(init)
    for i in range(int(start[0]), int(stop[0]), int(step[0])):
        state = list(body(i32(i), *state))
    return state
