"""Measures the GPU kernels: checks them against their references, then prints time, bandwidth and the ratio to a
baseline.

    python scripts/bench_kernels.py decode            # the table of decode attention
    python scripts/bench_kernels.py decode --json     # the same, a JSON object a line
    python scripts/bench_kernels.py decode --shape 32,32768 --sweep-splits 1,2,4
    python scripts/bench_kernels.py store             # quantize-and-pack and page dequantization

A benchmark is a function in ``BENCHMARKS`` that takes the parsed arguments and yields rows (dictionaries); rows are
printed as they come. Times are those of one call in a chain of calls inside one executable, each taking the one
before's result: the difference of a long and a short chain, so that dispatch cancels. Operands rotate through more
memory than the L2 cache holds, and hold random numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.pallas_kernels.decode_attention.kernel import decode_attention_mosaic, make_plan
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.decode_attention.tuning import DecodeTuning, decode_tuning
from kitty_jax.pallas_kernels.metadata import Grid, grid_bytes
from kitty_jax.pallas_kernels.page_format import METADATA, LayerKV, PageFormat, join_record
from scripts.bench_store import bench_store, store_arguments
from scripts.bench_timing import CACHE_BYTES, Time, copy_bandwidth, time_chained

SCALE_RANGE = (0.05, 0.55)
BYTE_GRIDS = ((-9, 1), (-8, -14))  # step and base for about the same scales and mins in bytes


# ---------------------------------------------------------------- decode attention
KITTY_PRO, KITTY = PageFormat(boosted=32), PageFormat(boosted=16)


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
    def pages(self) -> int:
        return -(-self.tokens // self.fmt.page)

    @property
    def bytes_read(self) -> int:
        """Pages and full-precision tokens once, and q and the output."""
        n = self.tokens - self.sink
        n_k, n_v = n // self.fmt.page, max(n - self.window, 0) // self.fmt.page
        row = 2 * self.fmt.head_dim
        pages = 4 * (n_k * self.fmt.key_words + n_v * self.fmt.value_words)
        dense = row * (2 * self.sink + n % self.fmt.page + n - n_v * self.fmt.page + 2 * self.new)
        return self.batch * self.kv_heads * (pages + dense + 2 * row * self.group * self.new)


DECODE_SHAPES = [
    DecodeShape(32, 32768),
    DecodeShape(32, 32768, fmt=KITTY),
    DecodeShape(32, 32768, fmt=dataclasses.replace(KITTY_PRO, metadata="fixed8")),
    DecodeShape(1, 131072),
    DecodeShape(8, 32768),
    DecodeShape(128, 4096),
    DecodeShape(256, 2048),
    DecodeShape(32, 32768, fmt=PageFormat(head_dim=64, boosted=16)),
    DecodeShape(1, 1024),
    DecodeShape(1, 4096),
    DecodeShape(1, 16384),
    DecodeShape(4, 1024),
    DecodeShape(32, 1024),
    DecodeShape(32, 4096),
]


def random_records(key, fmt: PageFormat, pool: int, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Legal records of random bits: (key pages, value pages)."""
    keys = iter(jax.random.split(key, 9))
    batch = (pool, kv_heads)

    def parts(layout):
        out = {}
        for name, part in layout.items():
            shape = (*batch, part.count)
            if name in ("low", "high"):
                out[name] = jax.random.bits(next(keys), shape, jnp.uint32)
            elif part.dtype == jnp.uint8 and name in ("scale", "min"):
                out[name] = jax.random.randint(next(keys), shape, 0, 256, jnp.int32).astype(jnp.uint8)
            elif name == "grid":
                grids = grid_bytes(*(Grid(*jnp.int32(grid)) for grid in BYTE_GRIDS))
                out[name] = jnp.broadcast_to(grids, shape)
            elif name == "scale":
                low, high = SCALE_RANGE
                out[name] = jax.random.uniform(next(keys), shape, minval=low, maxval=high).astype(jnp.float16)
            elif name == "min":
                out[name] = (-1.5 * out["scale"].astype(jnp.float32)).astype(jnp.float16)
            elif name == "channels":
                order = jnp.argsort(jax.random.uniform(next(keys), (*batch, fmt.head_dim)), -1)[..., : part.count]
                out[name] = jnp.sort(order, -1).astype(jnp.uint8)
            else:
                out[name] = jnp.zeros(shape, jnp.int8)
        return join_record(out, layout)

    return parts(fmt.key_parts), parts(fmt.value_parts)


def decode_operands(shape: DecodeShape, sets: int, seed: int = 0):
    """q, and operands for ``sets`` calls: pools that they share, then tables, buffers and new tokens of each."""
    q, pages, tables, first, lengths, num_new = _decode_arrays(shape, sets, seed)
    # Small calls need many sets: two programs, called again and again, make them, and not one program of all.
    buffers = [[_shifted(x, i) for x in first] for i in range(sets)]
    return q, (pages, [_row(tables, i) for i in range(sets)], buffers, lengths, num_new)


@jax.jit
def _shifted(x: jax.Array, i: int) -> jax.Array:
    return jnp.roll(x, i, -1)


@jax.jit
def _row(x: jax.Array, i: int) -> jax.Array:
    return x[i]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode_arrays(shape: DecodeShape, sets: int, seed: int):
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    b, k, d = shape.batch, shape.kv_heads, shape.fmt.head_dim
    pool = b * shape.pages * sets

    def normal(*dims):
        return jax.random.normal(next(keys), dims, jnp.bfloat16)

    pages = random_records(next(keys), shape.fmt, pool, k)
    tables = jax.random.permutation(next(keys), pool).reshape(sets, b, shape.pages).astype(jnp.int32)
    slots = (shape.sink, shape.sink, shape.fmt.page, shape.window + shape.fmt.page)
    new = (b, shape.new, k, d)
    first = [*(0.5 * normal(b, k, x, d) for x in slots), 0.5 * normal(*new), 0.5 * normal(*new)]
    q = normal(b, shape.new, k * shape.group, d)
    lengths = jnp.full((b,), shape.tokens, jnp.int32)
    return q, pages, tables, first, lengths, jnp.full((b,), shape.new, jnp.int32)


def decode_step(shape: DecodeShape, sets: int, call: Callable) -> Callable:
    """The step of a chain that calls ``call`` with the i-th set of operands."""

    def step(i: int, q, operands):
        (key_pages, value_pages), tables, buffers, lengths, num_new = operands
        *kv, new_keys, new_values = buffers[i % sets]
        layer = LayerKV(key_pages, value_pages, *kv, fmt=shape.fmt)
        return call(q, new_keys, new_values, layer, tables[i % sets], lengths, num_new)

    return step


def check_decode(shape: DecodeShape, splits: int) -> float:
    """Relative error of the kernel against the float32 reference."""
    q, operands = decode_operands(shape, 1, 1)
    q = q.astype(jnp.float32)
    scale = shape.fmt.head_dim**-0.5
    reference = functools.partial(decode_attention, scale=scale, implementation="xla")
    kernel = functools.partial(decode_attention_mosaic, scale=scale, tuning=DecodeTuning(splits=splits))
    want, got = (
        np.asarray(jax.jit(functools.partial(decode_step(shape, 1, call), 0))(q, operands), np.float64)
        for call in (reference, kernel)
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def time_cudnn(shape: DecodeShape) -> Time | None:
    """jax.nn.dot_product_attention on a bfloat16 cache of the same tokens."""
    b, k, d = shape.batch, shape.kv_heads, shape.fmt.head_dim
    size = 4 * b * shape.tokens * k * d
    sets = max(1, int(-(-CACHE_BYTES // size)))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(seed: int, dims: tuple[int, ...]):
        return jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16)

    caches = [normal(i, (b, shape.tokens, k, d)) for i in range(2 * sets)]
    q = normal(2 * sets, (b, shape.new, k * shape.group, d))
    lengths = jnp.full((b,), shape.tokens, jnp.int32)

    def step(i: int, q, caches):
        j = 2 * (i % sets)
        return jax.nn.dot_product_attention(
            q, caches[j], caches[j + 1], key_value_seq_lengths=lengths, implementation="cudnn"
        )

    return time_chained(step, q, caches, calls=chain_length(sets, size))


def chain_length(sets: int, size: float) -> int:
    """Calls of an executable: enough that every set of operands has its turn and that dispatch takes less time than
    they do."""
    return max(sets, 4) if size > 1e9 else max(sets, 16)


def bench_decode(args: argparse.Namespace) -> Iterator[dict]:
    """Decode attention against cuDNN on a bfloat16 cache."""
    for shape, splits in (
        []
        if args.no_check
        else [
            (DecodeShape(3, 1000, 2), 1),
            (DecodeShape(2, 2000, 2, fmt=PageFormat(head_dim=64, boosted=8)), 3),
            (DecodeShape(2, 700, 2, fmt=KITTY, new=3), 2),
            (DecodeShape(3, 1000, 2, fmt=dataclasses.replace(KITTY_PRO, metadata="fixed8")), 1),
        ]
    ):
        error = check_decode(shape, splits)
        print(f"check {shape} splits={splits}: relative error {error:.1e}", file=sys.stderr, flush=True)
        if not error < 1e-3:
            raise SystemExit("the kernel disagrees with the reference: nothing was measured")
    shapes = DECODE_SHAPES
    if args.shape:
        shapes = [
            DecodeShape(
                *(int(x) for x in text.split(",")),
                fmt=PageFormat(head_dim=args.head_dim, boosted=args.boosted, metadata=args.metadata),
                new=args.new,
            )
            for text in args.shape
        ]
    for shape in shapes:
        tunings = [dataclasses.replace(decode_tuning(), splits=int(x)) for x in args.sweep_splits.split(",")]
        yield from bench_decode_shape(shape, tunings, not args.no_baseline)


def bench_decode_shape(shape: DecodeShape, tunings: list[DecodeTuning], baseline: bool) -> Iterator[dict]:
    cudnn = time_cudnn(shape) if baseline else None
    sets = max(1, int(-(-CACHE_BYTES // shape.bytes_read)))
    q, operands = decode_operands(shape, sets)
    scale = shape.fmt.head_dim**-0.5
    bandwidth = copy_bandwidth()
    for tuning in tunings:
        call = functools.partial(decode_attention_mosaic, scale=scale, tuning=tuning)
        t = time_chained(decode_step(shape, sets, call), q, operands, calls=chain_length(sets, 4 * shape.bytes_read))
        layer = LayerKV(*operands[0], *operands[2][0][:4], fmt=shape.fmt)
        rate = shape.bytes_read / t.median
        row = {
            "B": shape.batch,
            "tokens": shape.tokens,
            "K": shape.kv_heads,
            "Q": shape.group,
            "T": shape.new,
            "D": shape.fmt.head_dim,
            "C": shape.fmt.boosted,
            "metadata": shape.fmt.metadata,
            "splits": make_plan(q, layer, operands[1][0], scale, tuning).splits,
            "us": round(t.median * 1e6, 1),
            "us_low": round(t.low * 1e6, 1),
            "us_high": round(t.high * 1e6, 1),
            "MB": round(shape.bytes_read / 1e6, 1),
            "GB_s": round(rate / 1e9),
            "of_copy": round(rate / bandwidth, 3),
            "x_floor": round(bandwidth / rate, 2),
        }
        if cudnn:
            row |= {"cudnn_us": round(cudnn.median * 1e6, 1), "speedup": round(cudnn.median / t.median, 2)}
        yield row


# ---------------------------------------------------------------- command line
def decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", help="B,tokens or B,tokens,K,Q instead of the table; may repeat")
    parser.add_argument("--head-dim", type=int, default=128, help="of --shape")
    parser.add_argument("--boosted", type=int, default=32, help="of --shape")
    parser.add_argument("--metadata", choices=METADATA, default="float16", help="of --shape")
    parser.add_argument("--new", type=int, default=1, help="new tokens a sequence, of --shape")
    parser.add_argument("--sweep-splits", default="0", help="splits to time, e.g. 1,2,4; 0 is the tuning's choice")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with the reference out")
    parser.add_argument("--no-baseline", action="store_true", help="leave cuDNN out")


BENCHMARKS: dict[str, tuple[Callable, Callable]] = {
    "decode": (decode_arguments, bench_decode),
    "store": (store_arguments, bench_store),
}


def print_rows(rows: Iterator[dict], as_json: bool) -> None:
    header = None
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        if header != list(row):
            header = list(row)
            print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
        print("| " + " | ".join(str(x) for x in row.values()) + " |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, (add_arguments, function) in BENCHMARKS.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("--json", action="store_true", help="a JSON object a row")
        add_arguments(command)
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"the kernels need an NVIDIA GPU, and JAX's default device is {device.platform}")
    head = {"device": device.device_kind, "jax": jax.__version__, "copy_GB_s": round(copy_bandwidth() / 1e9)}
    print(json.dumps(head) if args.json else head, flush=True)
    print_rows(BENCHMARKS[args.benchmark][1](args), args.json)


if __name__ == "__main__":
    main()
