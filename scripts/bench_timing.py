"""Timing on a GPU for the benchmarks: chains of calls, and the copy bandwidth that everything is held against."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

CACHE_BYTES = 200e6  # a call's operands come round again after this many bytes: four times the L2 of an H200


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds a call: median and range over the repeats."""

    median: float
    low: float
    high: float


def time_chained(step: Callable, carry, operands, *, few: int = 8, many: int = 40, repeats: int = 9) -> Time:
    """Time of ``carry = step(i, carry, operands)``, the difference of chains of ``many`` and ``few`` calls."""

    def chain(n: int):
        @jax.jit
        def run(carry, operands):
            for i in range(n):
                carry = step(i, carry, operands)
            return carry

        jax.block_until_ready(run(carry, operands))
        return run

    def seconds(run) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(carry, operands))
        return time.perf_counter() - start

    short, long = chain(few), chain(many)
    seconds(long)
    samples = sorted((seconds(long) - seconds(short)) / (many - few) for _ in range(repeats))
    return Time(float(np.median(samples)), samples[0], samples[-1])


@functools.cache
def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of copying 1 GiB."""
    x = jax.random.bits(jax.random.key(0), (1 << 28,), jnp.uint32)
    t = time_chained(lambda i, x, _: jax.lax.optimization_barrier(x + jnp.uint32(i)), x, (), few=2, many=12)
    return 2 * x.nbytes / t.median
