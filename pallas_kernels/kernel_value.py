"""Values of Mosaic GPU kernels that are written one thread at a time, and what holds them: launching, control flow and
inline PTX.

Kernels use this module through :mod:`.ptx`. JAX offers no public way to the MLIR builders (:mod:`.private_jax`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kitty_jax.pallas_kernels.private_jax import arith, ir, llvm, mosaic_utils, scf

THREADS = 128  # a Mosaic thread is a warpgroup


# ---------------------------------------------------------------- launching
def launch(
    emit: Callable,
    out_types: Sequence[jax.ShapeDtypeStruct],
    *,
    blocks: int,
    smem_bytes: int,
    name: str,
    cluster: int = 1,
):
    """A kernel of ``blocks`` blocks of 128 threads whose body is ``emit(addresses, smem)``; ``cluster`` neighbouring
    blocks, a divisor of ``blocks``, run at once and may read one another's shared memory.

    ``addresses`` are the i64 global addresses of the operands, then of the outputs; ``smem`` is the i32 address of the
    block's shared memory.
    """

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def whole_kernel(ctx, *memory):
            *arrays, smem = [mosaic_utils.memref_ptr(m) for m in memory]
            addresses = [Value(llvm.ptrtoint(_i64_type(), a)) for a in arrays]
            emit(addresses, Value(llvm.ptrtoint(_i32_type(), smem)))

        whole_kernel(*refs)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(blocks // cluster,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("rank",) if cluster > 1 else (),
        scratch_types=[plgpu.SMEM((-(-smem_bytes // 4),), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


# ---------------------------------------------------------------- values
def _operator(integer: Callable, floating: Callable | None = None) -> Callable:
    """A binary operator of :class:`Value`; a Python number on the right takes the type of the left."""

    def emit(self: Value, other: Value | float) -> Value:
        operation = floating if self.type == "f32" else integer
        return Value(operation(self.raw, self.like(other).raw))

    return emit


def _comparison(predicate: str) -> Callable:
    return _operator(lambda a, b: arith.cmpi(arith.CmpIPredicate[predicate], a, b))


class Value:
    """A number of each thread: i1, i32, i64 or f32.

    Operators emit the operation; a Python number takes the type of the other operand. Integers are unsigned in ``//``,
    ``%`` and ``>>``, signed in comparisons. A comparison is an i1, which :func:`select`, :func:`when` and
    :func:`choose` take: a Python ``if`` on it is an error.
    """

    __slots__ = ("raw",)
    __hash__ = None

    def __init__(self, raw: ir.Value):
        self.raw = raw

    @property
    def type(self) -> str:
        return str(self.raw.type)

    def like(self, x: Value | float) -> Value:
        """``x``, or the constant ``x`` of this value's type."""
        return x if isinstance(x, Value) else {"i32": i32, "i64": i64, "f32": f32}[self.type](x)

    __add__ = __radd__ = _operator(arith.addi, arith.addf)
    __mul__ = __rmul__ = _operator(arith.muli, arith.mulf)
    __sub__ = _operator(arith.subi, arith.subf)
    __floordiv__, __mod__ = _operator(arith.divui), _operator(arith.remui)
    __and__, __or__, __xor__ = _operator(arith.andi), _operator(arith.ori), _operator(arith.xori)
    __lshift__, __rshift__ = _operator(arith.shli), _operator(arith.shrui)
    __lt__, __eq__, __ne__ = _comparison("slt"), _comparison("eq"), _comparison("ne")
    below = _comparison("ult")  # unsigned <

    def __rsub__(self, other: float) -> Value:
        return self.like(other) - self

    def __gt__(self, other: Value | int) -> Value:
        return self.like(other) < self

    def __bool__(self):
        raise TypeError("a kernel's value has no truth while the kernel is written: use select, when or choose")


def _i32_type():
    return ir.IntegerType.get_signless(32)


def _i64_type():
    return ir.IntegerType.get_signless(64)


def i32(x: int) -> Value:
    """A 32-bit constant; values from 2**31 wrap."""
    return Value(arith.constant(_i32_type(), ir.IntegerAttr.get(_i32_type(), x - (1 << 32) if x >= 1 << 31 else x)))


def i64(x: int) -> Value:
    return Value(arith.constant(_i64_type(), ir.IntegerAttr.get(_i64_type(), x)))


def f32(x: float) -> Value:
    return Value(arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x)))


def asm(text: str, outs: str, args: Sequence[Value] = (), *, pure: bool = True):
    """Inline PTX. ``outs`` has a letter for each result: r 32 bits, f float32. No result: None; one: a value; more: a
    list."""
    types = {"r": _i32_type, "f": ir.F32Type.get}
    letter = {"i32": "r", "i64": "l", "f32": "f"}
    constraints = ",".join([f"={o}" for o in outs] + [letter[a.type] for a in args])
    results = [types[o]() for o in outs]
    if not outs:
        result = ir.Type.parse("!llvm.void")
    else:
        result = results[0] if len(outs) == 1 else llvm.StructType.get_literal(results)
    effects = not pure or not outs
    out = llvm.inline_asm(result, [a.raw for a in args], text, constraints, has_side_effects=effects)
    if len(outs) <= 1:
        return Value(out) if outs else None
    return [Value(llvm.extractvalue(kind, out, [i])) for i, kind in enumerate(results)]


def minimum(a: Value, b: Value | int) -> Value:
    """The smaller of two signed integers."""
    return _operator(arith.minsi)(a, b)


def maximum(a: Value, b: Value | int) -> Value:
    """The larger of two signed integers."""
    return _operator(arith.maxsi)(a, b)


def min_unsigned(a: Value, b: Value | int) -> Value:
    return _operator(arith.minui)(a, b)


def select(condition: Value, a: Value | float, b: Value | float) -> Value:
    """``a`` where the i1 is true, else ``b``; one of them may be a Python number."""
    a, b = (a, a.like(b)) if isinstance(a, Value) else (b.like(a), b)
    return Value(arith.select(condition.raw, a.raw, b.raw))


def address(base: Value, index: Value, stride: int = 1) -> Value:
    """The i64 address ``base + index * stride`` for an unsigned i32 index and a stride in bytes."""
    return base + Value(arith.extui(_i64_type(), index.raw)) * stride


def word(condition: Value) -> Value:
    """1 where the i1 is true, else 0."""
    return Value(arith.extui(_i32_type(), condition.raw))


# ---------------------------------------------------------------- control flow
@contextlib.contextmanager
def when(condition: Value):
    """The body runs where the i1 is true."""
    branch = scf.IfOp(condition.raw)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def choose(condition: Value, then: Callable[[], Sequence[Value]], otherwise: Sequence[Value]) -> list[Value]:
    """``then()`` where the i1 is true, else the values ``otherwise``."""
    branch = scf.IfOp(condition.raw, [x.raw.type for x in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([x.raw for x in then()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([x.raw for x in otherwise])
    return [Value(x) for x in branch.results]


def loop(
    start: Value, stop: Value | int, step: int, init: Sequence[Value], body: Callable[..., Sequence[Value]]
) -> list[Value]:
    """``for i in range(start, stop, step): state = body(i, *state)``, not unrolled; returns the last state."""
    bounds = [start.like(x).raw for x in (start, stop, step)]
    op = scf.ForOp(*bounds, [x.raw for x in init])
    with ir.InsertionPoint(op.body):
        asm('.pragma "nounroll";', "")
        state = body(Value(op.induction_variable), *(Value(x) for x in op.inner_iter_args))
        scf.yield_([x.raw for x in state])
    return [Value(x) for x in op.results]
