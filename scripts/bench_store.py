"""The benchmark ``store`` of bench_kernels.py: quantize-and-pack and page dequantization, in bytes moved once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from kitty_jax.pallas_kernels.dequantize.operation import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages
from scripts.bench_timing import CACHE_BYTES, Time, copy_bandwidth, time_chained


@dataclasses.dataclass(frozen=True)
class Case:
    """``op`` on ``pages`` pages of ``heads`` KV heads each; ``slots`` is W, ``boosted`` of keys, ``bits`` of values,
    ``shrink`` the factors of ranges to try, ``metadata`` how scale and min are stored."""

    op: str
    what: str
    pages: int
    heads: int = 8
    head_dim: int = 128
    boosted: int = 32
    bits: int = 2
    slots: int = 128
    dtype: str = "bfloat16"
    shrink: tuple[float, ...] = (1.0,)
    metadata: str = "float16"

    @property
    def fmt(self) -> PageFormat:
        return PageFormat(head_dim=self.head_dim, boosted=self.boosted, value_bits=self.bits, metadata=self.metadata)

    @property
    def is_keys(self) -> bool:
        return self.op.endswith("keys")

    @property
    def words(self) -> int:
        return self.fmt.key_words if self.is_keys else self.fmt.value_words

    @property
    def token_bytes(self) -> int:
        """Bytes of the full-precision pages."""
        return self.pages * self.heads * 128 * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Bytes of full-precision pages and of records, each moved once."""
        return self.token_bytes + 4 * self.pages * self.heads * self.words


CASES = [
    Case("store_keys", "decode step, 256 sequences", 256),
    Case("store_values", "decode step, 256 sequences", 256, slots=256),
    Case("store_values", "decode step, 256 sequences, shrink 0.8", 256, slots=256, shrink=(0.8,)),
    Case("store_values", "decode step, 256 sequences, best of 3 shrinks", 256, slots=256, shrink=(1.0, 0.9, 0.8)),
    Case("store_keys", "decode step, 256 sequences, fixed8", 256, metadata="fixed8"),
    Case("store_values", "decode step, 256 sequences, fixed8", 256, slots=256, metadata="fixed8"),
    Case("store_keys", "prefill, 32 x 8,192 tokens", 2048),
    Case("store_keys", "prefill, 32 x 8,192 tokens", 2048, boosted=16),
    Case("store_keys", "prefill, 32 x 8,192 tokens, K4", 2048, boosted=128),
    Case("store_values", "prefill, 32 x 8,192 tokens", 2048),
    Case("store_values", "prefill, 32 x 8,192 tokens, V4", 2048, bits=4),
    Case("store_keys", "prefill, 32 x 8,192 tokens, D = 64", 2048, head_dim=64, boosted=16),
    Case("store_values", "prefill, 32 x 8,192 tokens, D = 64", 2048, head_dim=64, boosted=16),
    Case("dequantize_keys", "32 x 8,192 tokens", 2048),
    Case("dequantize_values", "32 x 8,192 tokens", 2048),
]


def operation(case: Case, implementation: str) -> Callable:
    """(pool, pages, ids) -> pool, or -> pages for a dequantization."""
    fmt = case.fmt
    if case.op == "store_keys":
        return lambda pool, x, ids: store_key_pages(
            pool, x, ids, fmt, shrink=case.shrink, implementation=implementation
        )
    if case.op == "store_values":
        starts = jnp.arange(case.pages, dtype=jnp.int32) * 128 % case.slots
        return lambda pool, x, ids: store_value_pages(
            pool, x, starts, ids, fmt, shrink=case.shrink, implementation=implementation
        )
    side = "keys" if case.is_keys else "values"
    return lambda pool, x, ids: dequantize_pages(
        pool, ids, fmt, side, dtype=jnp.dtype(case.dtype), implementation=implementation
    )


def inputs(case: Case):
    """Rotating full-precision pages, a pool of records of them, a permutation of its ids."""
    sets = max(1, int(-(-CACHE_BYTES // case.token_bytes))) if case.op.startswith("store") else 1
    shape = (case.pages, case.heads, case.slots, case.head_dim)
    x = [jax.random.normal(jax.random.key(i), shape, jnp.dtype(case.dtype)) for i in range(sets)]
    pool = jnp.zeros((case.pages, case.heads, case.words), jnp.uint32)
    ids = jax.random.permutation(jax.random.key(9), case.pages).astype(jnp.int32)
    if case.op.startswith("dequantize"):
        store = dataclasses.replace(case, op="store_keys" if case.is_keys else "store_values")
        pool = jax.jit(operation(store, "auto"))(pool, x[0], ids)
    return pool, x, ids


def check(case: Case, pool, x, ids) -> None:
    """The kernel equals the reference on the first pages."""
    part = dataclasses.replace(case, pages=min(case.pages, 64))
    few = part.pages
    if case.op.startswith("store"):
        ids, pool = jnp.where(ids[:few] < few, ids[:few], few), pool[:few]
    else:
        ids = ids[:few]
    got, want = (jax.jit(operation(part, which))(pool, x[0][:few], ids) for which in ("mosaic", "xla"))
    if not bool(jnp.array_equal(got, want)):
        raise AssertionError(f"the kernel differs from the reference: {case}")


def measure(case: Case, implementation: str) -> Time:
    """Time of a call; the kernel is checked first."""
    pool, x, ids = inputs(case)
    if implementation == "mosaic":
        check(case, pool, x, ids)
    op = operation(case, implementation)

    def store(i, pool, operands):
        x, ids = operands
        return op(pool, x[i % len(x)], ids)

    def dequantize(i, carry, operands):
        # Each call reads other pages, from the call before's result on: equal calls would become one.
        pool, ids = operands
        out, first = carry
        first = (first + i + (out[0, 0, 0, 0] > 1e30).astype(jnp.int32)) % case.pages
        return op(pool, None, jnp.roll(ids, first)), first

    calls = 16 if case.pages < 1024 else 6
    if case.op.startswith("store"):
        return time_chained(store, pool, (x, ids), calls=calls)
    return time_chained(dequantize, (op(pool, None, ids), jnp.int32(0)), (pool, ids), calls=calls)


def bench_store(args: argparse.Namespace) -> Iterator[dict]:
    """Quantize-and-pack and page dequantization, against the bytes they must move."""
    bandwidth = copy_bandwidth()
    for case in CASES:
        if args.only not in f"{case.op} {case.what}":
            continue
        for implementation in ("mosaic", "xla") if args.xla and "decode" in case.what else ("mosaic",):
            t = measure(case, implementation)
            rate = case.bytes / t.median
            yield {
                "op": case.op,
                "case": case.what,
                "implementation": implementation,
                "D": case.head_dim,
                "C": case.boosted if case.is_keys else "",
                "bits": "" if case.is_keys else case.bits,
                "us": round(t.median * 1e6, 1),
                "us_low": round(t.low * 1e6, 1),
                "us_high": round(t.high * 1e6, 1),
                "MB": round(case.bytes / 1e6, 1),
                "GB_s": round(rate / 1e9),
                "of_copy": round(rate / bandwidth, 3),
                "x_floor": round(bandwidth / rate, 2),
            }


def store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--xla", action="store_true", help="time the reference too, on the cases of a decode step")
    parser.add_argument("--only", default="", help="cases whose operation or description holds this")
