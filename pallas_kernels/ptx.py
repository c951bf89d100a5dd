"""PTX instructions for Mosaic GPU kernels that are written one thread at a time.

Each function emits the instruction it is named after; arithmetic is that of :class:`.Value`, in operators of MLIR.
A kernel body gets its operands as plain addresses (:func:`.launch`) and controls flow with :func:`.when`,
:func:`.choose` and :func:`.loop`: all of :mod:`.kernel_value` can be had from here.

Inline PTX that synchronises lanes is marked as having side effects, so that LLVM neither moves nor duplicates it; pure
arithmetic and ``mma`` are not. Branches around a ``.sync`` instruction must be uniform in the warp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitty_jax.pallas_kernels.kernel_value import (  # noqa: F401
    THREADS,
    Value,
    address,
    asm,
    choose,
    f32,
    i32,
    launch,
    loop,
    maximum,
    min_unsigned,
    minimum,
    select,
    when,
    word,
)

FULL_WARP = "0xffffffff"


def _vector(first: int, n: int) -> str:
    """Operands first to first + n - 1 in braces."""
    return "{" + ", ".join(f"${i}" for i in range(first, first + n)) + "}"


def _registers(first: int, n: int) -> str:
    """The same for loads and stores, whose single operand takes no braces."""
    return _vector(first, n) if n > 1 else f"${first}"


_VECTOR = {1: "b32", 2: "v2.b32", 4: "v4.b32"}


def opaque(x: Value | int) -> Value:
    """An i32 that LLVM knows nothing about and computes here: no unrolling by it, no hoisting or widening of it."""
    return asm("mov.b32 $0, $1;", "r", (i32(x) if isinstance(x, int) else x,), pure=False)


def _instruction(text: str, out: str, *, pure: bool = True) -> Callable[..., Value]:
    """An instruction of fixed text: its result of kind ``out``, if any, comes first, then its operands in order."""
    return lambda *operands: asm(text, out, operands, pure=pure)


# ---------------------------------------------------------------- instructions of fixed text
fma = _instruction("fma.rn.f32 $0, $1, $2, $3;", "f")
fmax, fmin = _instruction("max.f32 $0, $1, $2;", "f"), _instruction("min.f32 $0, $1, $2;", "f")
fabs = _instruction("abs.f32 $0, $1;", "f")
ex2 = _instruction("ex2.approx.ftz.f32 $0, $1;", "f")  # 2**a, to 2**-22
rcp = _instruction("rcp.rn.f32 $0, $1;", "f")
bits_of, float_of = _instruction("mov.b32 $0, $1;", "r"), _instruction("mov.b32 $0, $1;", "f")
half_of = _instruction("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }", "r")  # bits of the float16
hmul2 = _instruction("mul.rn.f16x2 $0, $1, $2;", "r")  # product of two pairs of float16
# Transposes an 8 x 8 matrix of 16-bit numbers that lies across the warp.
movmatrix = _instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", pure=False)
sync_warp = _instruction(f"bar.warp.sync {FULL_WARP};", "")
sync_block = _instruction("bar.sync 0;", "")
# A barrier of all threads of the cluster, after which each sees what the others wrote to shared memory.
sync_cluster = _instruction("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "")
# Of a barrier's address and the parity of the phase to wait for.
mbarrier_wait = _instruction(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again; }", ""
)


# ---------------------------------------------------------------- float32 and float16 pairs
def less_float(a: Value, b: Value) -> Value:
    """float32 a < b, an i1."""
    return asm("{ .reg .pred p; setp.lt.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }", "r", (a, b)) != 0


def float_of_half(a: Value, kind: str = "f16") -> Value:
    """float32 of the ``kind`` ("f16" or "bf16") number in the low 16 bits."""
    if kind == "bf16":
        return float_of(a << 16)
    return asm("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", "f", (a,))


def power_of_two(e: Value) -> Value:
    """2**e as float32 for an i32 e, clamped to -126..127."""
    return float_of(maximum(minimum(e, 127), -126) + 127 << 23)


def tree(f: Callable, xs: Sequence[Value]) -> Value:
    """Reduces values pairwise."""
    xs = list(xs)
    while len(xs) > 1:
        xs = [f(*xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def splat_half(pair: Value, which: int) -> Value:
    """(x, x) of the low (0) or high (1) 16 bits x of a word."""
    half = ("lo", "hi")[which]
    return asm(f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; mov.b32 $0, {{{half}, {half}}}; }}", "r", (pair,))


def unpack_pair(pair: Value, kind: str) -> list[Value]:
    """The two float32 of a word of two ``kind`` ("f16" or "bf16") numbers, low half first."""
    if kind == "bf16":
        return [float_of(pair << 16), float_of(pair & 0xFFFF0000)]
    return asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }", "ff", (pair,))


def pack_pair(low: Value, high: Value, kind: str) -> Value:
    """Two float32 rounded to a word of two ``kind`` numbers."""
    return asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "r", (low, high))


def prmt(a: Value, b: Value, selector: int) -> Value:
    """Picks four bytes of b:a (a is bytes 0 to 3), one a nibble of the selector."""
    return asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "r", (a, b))


# ---------------------------------------------------------------- threads and barriers
def special_register(name: str) -> Value:
    """Read anew at every call: what hangs on it is computed again, not kept in registers from an earlier stage."""
    return asm(f"mov.u32 $0, %{name};", "r", pure=False)


def warp_index(tid: Value) -> Value:
    """tid / 32, in a form the compiler knows to be uniform in the warp."""
    return asm(f"shfl.sync.idx.b32 $0, $1, 0, 31, {FULL_WARP};", "r", (tid >> 5,), pure=False)


def shfl_xor(a: Value, lanes: int) -> Value:
    return asm(f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, {FULL_WARP};", "f", (a,), pure=False)


def reduce_lanes(f: Callable, a: Value, lanes: Sequence[int]) -> Value:
    """Butterfly reduction over the lanes whose index differs in the bits ``lanes``."""
    for distance in lanes:
        a = f(a, shfl_xor(a, distance))
    return a


def any_greater(pairs: Sequence[tuple[Value, Value]]) -> Value:
    """i1, uniform in the warp: in some lane, one of two pairs (a, b) has a > b."""
    (a, b), (c, d) = pairs
    vote = asm(
        "{ .reg .pred p, q; setp.gt.f32 p, $1, $2; setp.gt.f32 q, $3, $4; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, {FULL_WARP}; selp.b32 $0, 1, 0, p; }}",
        "r",
        (a, b, c, d),
        pure=False,
    )
    return vote != 0


def mbarrier_init(barrier: Value, count: int) -> None:
    """``count`` barriers in a row, each with one arrival a phase."""
    inits = " ".join(f"mbarrier.init.shared::cta.b64 [$0+{8 * i}], 1;" for i in range(count))
    asm(f"{inits} fence.mbarrier_init.release.cluster;", "", (barrier,))


def bulk_copy(condition: Value, barrier: Value, to_shared: Value, from_global: Value, size: int) -> None:
    """Where ``condition`` (i1): starts one copy of ``size`` bytes, a multiple of 16, that completes a phase of the
    barrier."""
    asm(
        "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$2], [$3], {size}, [$1]; }}",
        "",
        (word(condition), barrier, to_shared, from_global),
    )


# ---------------------------------------------------------------- memory
def load_global(n: int, pointer: Value, offset: int = 0, kind: str = "r", *, ordered: bool = False):
    """n (1, 2 or 4) words through the read-only path; ``ordered``: an ordinary load, which the assembler leaves behind
    a sync_warp."""
    text = f"ld.global{'' if ordered else '.nc'}.{_VECTOR[n]} {_registers(0, n)}, [${n}+{offset}];"
    return asm(text, kind * n, (pointer,), pure=False)


def prefetch(pointer: Value, offset: int = 0) -> None:
    """Asks for the line at a global address to be brought into the L2 cache; no register waits for it."""
    asm(f"prefetch.global.L2 [$0+{offset}];", "", (pointer,))


def store_global(values: Sequence[Value], pointer: Value, offset: int = 0) -> None:
    n = len(values)
    asm(f"st.global.{_VECTOR[n]} [$0+{offset}], {_registers(1, n)};", "", (pointer, *values))


def store_global_as(value: Value, pointer: Value, offset: int, kind: str) -> None:
    """Stores a float32 as f32, f16 or bf16."""
    if kind == "f32":
        store_global([value], pointer, offset)
        return
    asm(
        f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; st.global.b16 [$0+{offset}], h; }}",
        "",
        (pointer, value),
    )


def store_global_byte(value: Value, pointer: Value, offset: int = 0) -> None:
    asm(f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.u8 [$0+{offset}], h; }}", "", (pointer, value))


def load_shared(n: int, pointer: Value, offset: int = 0, kind: str = "r"):
    text = f"ld.shared.{_VECTOR[n]} {_registers(0, n)}, [${n}+{offset}];"
    return asm(text, kind * n, (pointer,), pure=False)


def in_block(pointer: Value, rank: int) -> Value:
    """The place of this block's shared memory in that of another block of the cluster, for :func:`load_cluster`."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "r", (pointer, i32(rank)))


def load_cluster(pointer: Value, offset: int = 0, kind: str = "f") -> Value:
    """One word of the shared memory of a block of the cluster."""
    return asm(f"ld.shared::cluster.b32 $0, [$1+{offset}];", kind, (pointer,), pure=False)


def load_shared_byte(pointer: Value, offset: int = 0, *, signed: bool = False) -> Value:
    return asm(f"ld.shared.{'s8' if signed else 'u8'} $0, [$1+{offset}];", "r", (pointer,), pure=False)


def load_shared_half(pointer: Value, offset: int = 0) -> Value:
    """16 bits, zero-extended."""
    text = f"{{ .reg .b16 h; ld.shared.u16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return asm(text, "r", (pointer,), pure=False)


def store_shared_byte(value: Value, pointer: Value, offset: int = 0) -> None:
    asm(f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.u8 [$0+{offset}], h; }}", "", (pointer, value))


def store_shared(values: Sequence[Value], pointer: Value, offset: int = 0) -> None:
    n = len(values)
    asm(f"st.shared.{_VECTOR[n]} [$0+{offset}], {_registers(1, n)};", "", (pointer, *values))


# ---------------------------------------------------------------- matrices
def ldmatrix(n: int, pointer: Value, offset: int = 0, *, transpose: bool):
    """n (1, 2 or 4) 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i // 8."""
    trans = ".trans" if transpose else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {_vector(0, n)}, [${n}+{offset}];"
    out = asm(text, "r" * n, (pointer,), pure=False)
    return [out] if n == 1 else out


def mma(accumulator: Sequence[Value], a: Sequence[Value], b: Sequence[Value], kind: str = "f16") -> list[Value]:
    """``mma.m16n8k16`` (four words of A), or m16n8k8 (two words), into float32."""
    k = 4 * len(a)
    last = 4 + len(a) + len(b)
    return asm(
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {_vector(0, 4)}, "
        f"{_vector(4, len(a))}, {_vector(4 + len(a), len(b))}, {_vector(last, 4)};",
        "ffff",
        (*a, *b, *accumulator),
    )
