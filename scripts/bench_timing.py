"""Timing on a GPU for the benchmarks: chains of calls, and the copy bandwidth that everything is held against."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

CACHE_BYTES = 100e6  # a call's operands come round again after this many bytes: twice the L2 of an H200


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds a call: median and range over the repeats."""

    median: float
    low: float
    high: float


def time_chained(step: Callable, carry, operands, *, calls: int = 16, span: float = 0.02, repeats: int = 15) -> Time:
    """Time of ``carry = step(i, carry, operands)``.

    One executable holds ``calls`` of them, each taking the one before's result. It is queued as often as takes about
    ``span`` seconds (five times at least), and once: the difference leaves dispatch and the last synchronization out.
    """

    @jax.jit
    def run(carry, operands):
        for i in range(calls):
            carry = step(i, carry, operands)
        return carry

    def seconds(times: int) -> float:
        start, x = time.perf_counter(), carry
        for _ in range(times):
            x = run(x, operands)
        jax.block_until_ready(x)
        return time.perf_counter() - start

    seconds(2)
    long = max(5, 1 + math.ceil(span / max((seconds(5) - seconds(1)) / 4, 1e-5)))
    samples = sorted((seconds(long) - seconds(1)) / (calls * (long - 1)) for _ in range(repeats))
    return Time(float(np.median(samples)), samples[0], samples[-1])


@functools.cache
def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of copying 1 GiB."""
    x = jax.random.bits(jax.random.key(0), (1 << 28,), jnp.uint32)
    t = time_chained(lambda i, x, _: jax.lax.optimization_barrier(x + jnp.uint32(i + 1)), x, (), calls=4)
    return 2 * x.nbytes / t.median
