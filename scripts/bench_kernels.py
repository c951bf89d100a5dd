"""Measures the GPU kernels: checks them against their references, then prints time, bandwidth and the ratio to a
baseline.

    python scripts/bench_kernels.py decode            # the table of decode attention
    python scripts/bench_kernels.py decode --json     # the same, a JSON object a line
    python scripts/bench_kernels.py decode --shape 32,32768 --sweep-splits 1,2,4
    python scripts/bench_kernels.py store --xla       # quantize-and-pack, the reference too

Times are those of one call in a chain of calls inside one executable, each taking the one before's result: the
difference of a long and a short chain, so that dispatch cancels. Operands rotate through more memory than the L2 cache
holds, and hold random numbers. Rows are printed as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.decode_attention.kernel import decode_attention_mosaic
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.decode_attention.shape import KernelShape
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV, PageFormat
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages
from scripts.bench_data import random_records
from scripts.bench_timing import Time, copy_bandwidth, rotating_sets, time_chained
from scripts.command_line import Parser, run_command, whole

KITTY_PRO, KITTY, PRO_64 = PageFormat(boosted=32), PageFormat(boosted=16), PageFormat(head_dim=64, boosted=16)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_kernels.py", __doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    decode = commands.add_parser("decode", prog=parser.prog, description=bench_decode.__doc__)
    decode.add_argument("--shape", action="append", type=_sizes, help="B,tokens or B,tokens,K,Q; repeatable")
    decode.add_argument("--head-dim", type=whole(1), default=128, help="of --shape")
    decode.add_argument("--boosted", type=whole(0), default=32, help="of --shape")
    decode.add_argument("--new", type=whole(1), default=1, help="new tokens a sequence, of --shape")
    decode.add_argument("--sweep-splits", type=_sizes, default="0", help="such as 1,2,4; 0 is the kernel's choice")
    decode.add_argument("--no-check", action="store_true", help="leave the comparison with the reference out")
    decode.add_argument("--no-baseline", action="store_true", help="leave cuDNN out")
    decode.set_defaults(bench=bench_decode)
    store = commands.add_parser("store", prog=parser.prog, description=bench_store.__doc__)
    store.add_argument("--xla", action="store_true", help="time the reference too, on the cases of a decode step")
    store.add_argument("--only", default="", help="cases whose operation or description holds this")
    store.set_defaults(bench=bench_store)
    for command in (decode, store):
        command.add_argument("--json", action="store_true", help="a JSON object a row")
    return run_command(parser, _run, argv)


def _sizes(text: str) -> list[int]:
    return [whole(0)(item) for item in text.split(",")]


def _run(options: argparse.Namespace) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise RuntimeError(f"the kernels need an NVIDIA GPU, and JAX's default device is {device.platform}")
    head = {"device": device.device_kind, "jax": jax.__version__, "copy_GB_s": round(copy_bandwidth() / 1e9)}
    print(json.dumps(head), flush=True)
    header: list[str] = []
    for row in options.bench(options):
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        if header != list(row):
            header = list(row)
            print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)


# ---------------------------------------------------------------- decode attention
@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """A row of the table: B sequences of ``tokens`` tokens each."""

    batch: int
    tokens: int
    kv_heads: int = 8
    group: int = 4
    fmt: PageFormat = KITTY_PRO
    sink: int = 32
    window: int = 128
    new: int = 1

    @property
    def bytes_read(self) -> int:
        """Pages and full-precision tokens once, and q and the output."""
        n, page, row = self.tokens - self.sink, self.fmt.page, 2 * self.fmt.head_dim
        n_k, n_v = n // page, max(n - self.window, 0) // page
        pages = 4 * (n_k * self.fmt.key_words + n_v * self.fmt.value_words)
        dense = row * (2 * self.sink + n % page + n - n_v * page + 2 * self.new)
        return self.batch * self.kv_heads * (pages + dense + 2 * row * self.group * self.new)


DECODE_SHAPES = [
    DecodeShape(32, 32768),
    DecodeShape(32, 32768, fmt=KITTY),
    DecodeShape(32, 32768, fmt=PRO_64),
    *(DecodeShape(b, n) for b, n in ((8, 32768), (1, 131072), (128, 4096), (256, 2048), (32, 4096), (32, 1024))),
    *(DecodeShape(b, n) for b, n in ((8, 1024), (4, 1024), (1, 16384), (1, 4096), (1, 1024))),
]
CHECKS = [  # shape and splits
    (DecodeShape(3, 1000, 2), 1),
    (DecodeShape(2, 2000, 2, fmt=PageFormat(head_dim=64, boosted=8)), 3),
    (DecodeShape(2, 700, 2, fmt=KITTY, new=3), 2),
]


def bench_decode(options: argparse.Namespace) -> Iterator[dict]:
    """Decode attention against cuDNN on a bfloat16 cache."""
    for shape, splits in () if options.no_check else CHECKS:
        error = check_decode(shape, splits)
        print(f"check {shape} splits={splits}: relative error {error:.1e}", file=sys.stderr, flush=True)
        if not error < 1e-3:
            raise RuntimeError("the kernel disagrees with the reference: nothing was measured")
    fmt = PageFormat(head_dim=options.head_dim, boosted=options.boosted)
    given = [DecodeShape(*sizes, fmt=fmt, new=options.new) for sizes in options.shape or ()]
    for shape in given or DECODE_SHAPES:
        cudnn = None if options.no_baseline else time_cudnn(shape)
        for splits in options.sweep_splits:
            yield decode_row(shape, splits, cudnn)


def check_decode(shape: DecodeShape, splits: int) -> float:
    """Relative error of the kernel against the float32 reference."""
    (inputs,) = decode_inputs(shape, 1, seed=1)
    inputs = dataclasses.replace(inputs, q=inputs.q.astype(jnp.float32))
    scale = shape.fmt.head_dim**-0.5
    want = np.asarray(jax.jit(decode_reference)(inputs), np.float64)
    got = np.asarray(jax.jit(lambda x: decode_attention_mosaic(x, scale, splits)[0])(inputs), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def decode_reference(x: DecodeInputs) -> jax.Array:
    """The pure reference of the kernel."""
    arrays = (x.q, x.new_keys, x.new_values, x.kv, x.page_table, x.lengths, x.num_new)
    return decode_attention(*arrays, implementation="xla")


def decode_row(shape: DecodeShape, splits: int, cudnn: Time | None) -> dict:
    """Times the kernel; a row of the table."""
    sets, scale = rotating_sets(shape.bytes_read), shape.fmt.head_dim**-0.5
    inputs = decode_inputs(shape, sets)

    def step(i: int, q: jax.Array, inputs: list[DecodeInputs]) -> jax.Array:
        return decode_attention_mosaic(dataclasses.replace(inputs[i % sets], q=q), scale, splits)[0]

    time = time_chained(step, inputs[0].q, inputs, calls=_calls(sets, 4 * shape.bytes_read))
    row = {"B": shape.batch, "tokens": shape.tokens, "K": shape.kv_heads, "Q": shape.group, "T": shape.new}
    row |= {"D": shape.fmt.head_dim, "C": shape.fmt.boosted, "splits": KernelShape.of(inputs[0], scale, splits).splits}
    row |= time.columns(shape.bytes_read)
    if cudnn:
        row |= {"cudnn_us": round(cudnn.median * 1e6, 1), "speedup": round(cudnn.median / time.median, 2)}
    return row


def _calls(sets: int, size: float) -> int:
    """Calls of an executable: enough that every set of operands is used and that dispatch takes less time than they
    do."""
    return max(sets, 4 if size > 1e9 else 16)


def decode_inputs(shape: DecodeShape, sets: int, seed: int = 0) -> list[DecodeInputs]:
    """Inputs for ``sets`` calls: one pool and one q that they share; tables, buffers and new tokens of each."""
    first, tables = _decode_inputs(shape, sets, seed)
    buffers = {name: getattr(first.kv, name) for name in BUFFERS}
    inputs = []
    for i in range(sets):  # small calls need many sets: one program, called again and again, and not one of all sets
        (new_keys, new_values, own), table = _of_set((first.new_keys, first.new_values, buffers), tables, i)
        kv = dataclasses.replace(first.kv, **own)
        inputs.append(DecodeInputs(first.q, new_keys, new_values, kv, table, first.lengths, first.num_new))
    return inputs


@jax.jit
def _of_set(arrays, tables: jax.Array, i: int):
    return jax.tree.map(lambda x: jnp.roll(x, i, -1), arrays), tables[i]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode_inputs(shape: DecodeShape, sets: int, seed: int) -> tuple[DecodeInputs, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    b, k, d, page = shape.batch, shape.kv_heads, shape.fmt.head_dim, shape.fmt.page
    pages = -(-shape.tokens // page)
    pool = b * pages * sets

    def normal(*dims, scale=0.5):
        return scale * jax.random.normal(next(keys), dims, jnp.bfloat16)

    records = random_records(next(keys), shape.fmt, pool, k)
    tables = jax.random.permutation(next(keys), pool).reshape(sets, b, pages).astype(jnp.int32)
    buffers = (normal(b, k, n, d) for n in (shape.sink, shape.sink, page, shape.window + page))
    new = (normal(b, shape.new, k, d) for _ in range(2))
    q = normal(b, shape.new, k * shape.group, d, scale=1)
    lengths = (jnp.full((b,), n, jnp.int32) for n in (shape.tokens, shape.new))
    return DecodeInputs(q, *new, LayerKV(*records, *buffers, fmt=shape.fmt), tables[0], *lengths), tables


def time_cudnn(shape: DecodeShape) -> Time:
    """jax.nn.dot_product_attention on a bfloat16 cache of the same tokens."""
    b, k, d = shape.batch, shape.kv_heads, shape.fmt.head_dim
    size = 4 * b * shape.tokens * k * d
    sets = rotating_sets(size)

    @functools.partial(jax.jit, static_argnums=1)
    def normal(seed: int, dims: tuple[int, ...]):
        return jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16)

    caches = [normal(i, (b, shape.tokens, k, d)) for i in range(2 * sets)]
    q = normal(2 * sets, (b, shape.new, k * shape.group, d))
    lengths = jnp.full((b,), shape.tokens, jnp.int32)

    def step(i: int, q, caches):
        keys, values = caches[2 * (i % sets) :][:2]
        return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths, implementation="cudnn")

    return time_chained(step, q, caches, calls=_calls(sets, size))


# ---------------------------------------------------------------- quantize-and-pack
@dataclasses.dataclass(frozen=True)
class StoreCase:
    """``pages`` pages of ``kv_heads`` KV heads each, of the side ("keys" or "values"); ``slots`` is the size of the
    buffer they are read from, ``shrink`` the factors of ranges to try."""

    side: str
    what: str
    pages: int
    fmt: PageFormat = KITTY_PRO
    slots: int = 128
    shrink: tuple[float, ...] = (1.0,)
    kv_heads: int = 8

    @property
    def record_words(self) -> int:
        return self.fmt.key_words if self.side == "keys" else self.fmt.value_words

    @property
    def token_bytes(self) -> int:
        """Bytes of the full-precision pages."""
        return 2 * self.pages * self.kv_heads * self.fmt.page * self.fmt.head_dim


DECODE_STEP, PREFILL = ("decode step, 256 sequences", 256), ("prefill, 32 x 8,192 tokens", 2048)
STORE_CASES = [
    StoreCase("keys", *DECODE_STEP),
    StoreCase("values", *DECODE_STEP, slots=256),
    StoreCase("values", *DECODE_STEP, slots=256, shrink=(0.8,)),
    StoreCase("values", *DECODE_STEP, slots=256, shrink=(1.0, 0.9, 0.8)),
    *(StoreCase("keys", *PREFILL, fmt=fmt) for fmt in (KITTY_PRO, KITTY, PageFormat(boosted=128), PRO_64)),
    *(StoreCase("values", *PREFILL, fmt=fmt) for fmt in (KITTY_PRO, PageFormat(boosted=32, value_bits=4), PRO_64)),
]


def bench_store(options: argparse.Namespace) -> Iterator[dict]:
    """Quantize-and-pack, against the bytes that it must move."""
    for case in STORE_CASES:
        if options.only not in f"{case.side} {case.what}":
            continue
        for implementation in ("mosaic", "xla") if options.xla and case.pages == 256 else ("mosaic",):
            time = time_store(case, implementation)
            row = {"op": f"store_{case.side}", "case": case.what, "implementation": implementation}
            row |= {"D": case.fmt.head_dim, "C": case.fmt.boosted, "value bits": case.fmt.value_bits}
            row["shrink"] = "/".join(map(str, case.shrink))
            yield row | time.columns(case.token_bytes + 4 * case.pages * case.kv_heads * case.record_words)


def time_store(case: StoreCase, implementation: str) -> Time:
    """Time of a call; the kernel's first records are checked."""
    shape = (case.pages, case.kv_heads, case.slots, case.fmt.head_dim)
    buffers = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(rotating_sets(case.token_bytes))
    ]
    pool = jnp.zeros((case.pages, case.kv_heads, case.record_words), jnp.uint32)
    ids = jax.random.permutation(jax.random.key(9), case.pages).astype(jnp.int32)
    if implementation == "mosaic":
        few = min(case.pages, 64)
        some = (pool[:few], buffers[0][:few], jnp.minimum(ids[:few], few))  # ids from `few` on store nothing
        got, want = (jax.jit(functools.partial(store, case, which))(*some) for which in ("mosaic", "xla"))
        if not bool(jnp.array_equal(got, want)):
            raise RuntimeError(f"the kernel differs from the reference: {case}")

    def step(i, pool, operands):
        buffers, ids = operands
        return store(case, implementation, pool, buffers[i % len(buffers)], ids)

    return time_chained(step, pool, (buffers, ids), calls=16 if case.pages < 1024 else 6)


def store(case: StoreCase, implementation: str, pool: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Quantizes a page of each buffer in ``x`` into record ``ids`` of the pool."""
    options = {"shrink": case.shrink, "implementation": implementation}
    if case.side == "keys":
        return store_key_pages(pool, x, ids, case.fmt, **options)
    starts = jnp.arange(len(ids), dtype=jnp.int32) * case.fmt.page % case.slots
    return store_value_pages(pool, x, starts, ids, case.fmt, **options)


if __name__ == "__main__":
    sys.exit(main())
