"""PTX instructions that only the page kernels (quantize-and-pack, dequantize) need, beside :mod:`.mosaic_ptx`."""

from __future__ import annotations

import struct

from kitty_jax.pallas_kernels.ptx import FULL_WARP, Value, asm, bit_or, shl

ROUNDER = (
    12582912.0  # 1.5 * 2**23: added to a float32 below 2**22, leaves it rounded half to even in the low mantissa bits
)
ROUNDER_BITS = 0x4B400000


# ---------------------------------------------------------------- integers and predicates
def bit_xor(a: Value, b: Value) -> Value:
    return a ^ b


def less_unsigned(a: Value, b: Value | int) -> Value:
    return a.below(b)


def shift_right(a: Value, bits: Value) -> Value:
    """a >> bits for a run-time number of bits below 32."""
    return a >> bits


def popc(a: Value) -> Value:
    """Number of one bits."""
    return asm("popc.b32 $0, $1;", "r", (a,))


def ballot(flag: Value) -> Value:
    """Bit i: lane i's ``flag`` (a word, 0 or not)."""
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, {FULL_WARP}; }}"
    return asm(text, "r", (flag,), pure=False)


def lanes_below() -> Value:
    """The mask of the lanes below this one."""
    return asm("mov.u32 $0, %lanemask_lt;", "r")


def flag_if_less_unsigned(a: Value, b: Value) -> Value:
    """1 where a < b, else 0."""
    return asm("{ .reg .pred p; setp.lt.u32 p, $1, $2; selp.b32 $0, 1, 0, p; }", "r", (a, b))


def flag_if_less(a: Value, b: Value) -> Value:
    """1 where float32 a < b, else 0."""
    return asm("{ .reg .pred p; setp.lt.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }", "r", (a, b))


def add_if_above(count: Value, key: Value, low: int, other_key: Value, other_low: Value) -> Value:
    """count + 1 where the 64-bit number key:low is above other_key:other_low (unsigned)."""
    return asm(
        f"{{ .reg .b64 u, v; .reg .b32 c; .reg .pred p; mov.b32 c, {low}; mov.b64 u, {{c, $2}}; mov.b64 v, {{$4, $3}}; "
        "setp.gt.u64 p, u, v; mov.b32 $0, $1; @p add.u32 $0, $0, 1; }",
        "r",
        (count, key, other_key, other_low),
    )


# ---------------------------------------------------------------- numbers of 16 and 32 bits
def fmin(a: Value, b: Value) -> Value:
    return asm("min.f32 $0, $1, $2;", "f", (a, b))


def fneg(a: Value) -> Value:
    return asm("neg.f32 $0, $1;", "f", (a,))


def half_of(a: Value) -> Value:
    """Bits of a float32 rounded to float16."""
    return asm("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }", "r", (a,))


def float_of_half(a: Value, kind: str = "f16") -> Value:
    """float32 of the ``kind`` ("f16" or "bf16") number in the low 16 bits."""
    if kind == "bf16":
        return asm("{ .reg .b32 w; shl.b32 w, $1, 16; mov.b32 $0, w; }", "f", (a,))
    return asm("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", "f", (a,))


def float_of_int(a: Value) -> Value:
    """float32 of a small signed integer, exactly."""
    return asm("cvt.rn.f32.s32 $0, $1;", "f", (a,))


def floor_to_int(a: Value) -> Value:
    """The greatest integer not above a float32."""
    return asm("cvt.rmi.s32.f32 $0, $1;", "r", (a,))


def min_pair(a: Value, b: Value, kind: str) -> Value:
    """Elementwise minimum of two words of two ``kind`` numbers."""
    return asm(f"min.{kind}x2 $0, $1, $2;", "r", (a, b))


def max_pair(a: Value, b: Value, kind: str) -> Value:
    return asm(f"max.{kind}x2 $0, $1, $2;", "r", (a, b))


def at_least_pair(a: Value, b: Value, kind: str) -> Value:
    """For each half: 0xFFFF where a >= b, else 0."""
    return asm(f"set.ge.u32.{kind}x2 $0, $1, $2;", "r", (a, b))


def at_least(a: Value, b: Value) -> Value:
    """All ones where float32 a >= b, else 0."""
    return asm("set.ge.u32.f32 $0, $1, $2;", "r", (a, b))


def round_up_to(a: Value, kind: str) -> Value:
    """Bits of the smallest ``kind`` number that is not below a float32."""
    if kind == "f16":
        return asm("{ .reg .b16 h; cvt.rp.f16.f32 h, $1; cvt.u32.u16 $0, h; }", "r", (a,))
    return asm(
        "{ .reg .b32 w, u; .reg .pred p; mov.b32 w, $1; setp.ge.s32 p, w, 0; add.u32 u, w, 0xFFFF; "
        "selp.b32 w, u, w, p; shr.u32 $0, w, 16; }",
        "r",
        (a,),
    )


def splat(a: Value) -> Value:
    """The low 16 bits in both halves."""
    return asm("prmt.b32 $0, $1, $1, 0x1010;", "r", (a,))


def first_with_code(code: int, base: Value, step: Value, power: Value) -> Value:
    """The smallest float32 x with round_half_even(float32(x / power - base) / step) >= code, ``power`` a power of two.

    The difference d reaches the code at tie = (code - 1/2) * step: with d >= tie where the tie goes to the (even) code,
    else with d > tie. A real number rounds to a float32 >= tie from halfway between tie and the float32 below on
    (halfway goes to ``tie``, whose low mantissa bits are zero), and to one > tie above halfway to the next float32.
    float64 holds the sums.
    """
    odd = code % 2
    neighbour = "add.u32 w, w, 1;" if odd else "sub.u32 w, w, 1;"
    text = (
        "{ .reg .f32 t, n, y; .reg .b32 w, z; .reg .f64 u, v; .reg .pred p, q; "
        f"mul.rn.f32 t, $2, {_hex(code - 0.5)}; mov.b32 w, t; {neighbour} mov.b32 n, w; "
        "cvt.f64.f32 u, t; cvt.f64.f32 v, n; add.rn.f64 u, u, v; mul.rn.f64 u, u, 0d3FE0000000000000; "
        "cvt.f64.f32 v, $1; add.rn.f64 u, u, v; cvt.f64.f32 v, $3; mul.rn.f64 u, u, v; cvt.rp.f32.f64 y, u; "
    )
    if odd:  # strictly above: the next float32 if y is not above yet
        text += (
            "cvt.f64.f32 v, y; setp.eq.f64 p, u, v; mov.b32 w, y; setp.lt.s32 q, w, 0; add.s32 z, w, 1; "
            "@q sub.s32 z, w, 1; setp.eq.f32 q, y, 0f00000000; @q mov.b32 z, 1; selp.b32 w, z, w, p; mov.b32 y, w; "
        )
    return asm(text + "mov.f32 $0, y; }", "f", (base, step, power))


def _hex(x: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


# ---------------------------------------------------------------- memory
def copy_async(shared: Value, shared_offset: int, pointer: Value, offset: int) -> None:
    """Starts a copy of 16 bytes from global to shared memory."""
    asm(f"cp.async.cg.shared.global [$0+{shared_offset}], [$1+{offset}], 16;", "", (shared, pointer))


def wait_for_copies() -> None:
    """Waits for the copies this thread started; the block's barrier makes them visible to the others."""
    asm("cp.async.wait_all;", "")


def load_shared_half(pointer: Value, offset: int = 0) -> Value:
    """16 bits, zero-extended."""
    text = f"{{ .reg .b16 h; ld.shared.u16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return asm(text, "r", (pointer,), pure=False)


def store_shared_half(value: Value, pointer: Value, offset: int = 0) -> None:
    asm(f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.u16 [$0+{offset}], h; }}", "", (pointer, value))


def store_shared_byte(value: Value, pointer: Value, offset: int = 0) -> None:
    asm(f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.u8 [$0+{offset}], h; }}", "", (pointer, value))


# ---------------------------------------------------------------- 2-bit fields
def even_pairs(nibbles: Value) -> Value:
    """The low two bits of eight nibbles, side by side in the low 16 bits; bits 2 and 3 of each nibble must be zero."""
    x = nibbles
    for shift, mask in ((2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        x = _and(bit_or(x, x >> shift), mask)
    return x


def to_nibbles(pairs: Value) -> Value:
    """The inverse: eight 2-bit fields in the low 16 bits become the low bits of eight nibbles."""
    x = pairs
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333)):
        x = _and(bit_or(x, shl(x, shift)), mask)
    return x


def _and(a: Value, mask: int) -> Value:
    return a & mask
