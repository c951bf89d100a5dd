"""Timing for the benchmarks: the spread of samples, chains of GPU calls, and the copy bandwidth as a yardstick."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

CACHE_BYTES = 100e6  # a call's operands come round again after this many bytes: twice the L2 of an H200


class Time(NamedTuple):
    """Seconds: median and range of several samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Time:
        samples = list(samples)
        return cls(statistics.median(samples), min(samples), max(samples))

    def columns(self, moved: int) -> dict[str, float]:
        """Table columns of a call that has to move ``moved`` bytes, against a copy of as many."""
        us = {name: round(seconds * 1e6, 1) for name, seconds in zip(("us", "us_low", "us_high"), self, strict=True)}
        rate, copy = moved / self.median, copy_bandwidth()
        shares = {"of_copy": round(rate / copy, 3), "x_floor": round(copy / rate, 2)}
        return {**us, "MB": round(moved / 1e6, 1), "GB_s": round(rate / 1e9), **shares}


def rotating_sets(size: float) -> int:
    """Sets of operands of ``size`` bytes that calls in a row need, so that none finds its own in the L2."""
    return max(1, math.ceil(CACHE_BYTES / size))


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
    return Time.of((seconds(long) - seconds(1)) / (calls * (long - 1)) for _ in range(repeats))


@functools.cache
def copy_bandwidth() -> float:
    """Bytes read plus bytes written a second of copying 1 GiB."""
    x = jax.random.bits(jax.random.key(0), (1 << 28,), jnp.uint32)
    t = time_chained(lambda i, x, _: jax.lax.optimization_barrier(x + jnp.uint32(i + 1)), x, (), calls=4)
    return 2 * x.nbytes / t.median
