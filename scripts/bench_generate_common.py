"""What both sides of bench_generate.py share: the request, the rows, and the arithmetic over samples. No JAX, no torch.

A child process gets a :class:`Request` and prints rows, a JSON object a line, each as soon as it is measured:

    start    device, versions                          plan     batch, cache_bytes, weights_bytes, sequence_bytes
    compile  what, trace_s, lower_s, compile_s         memory   peak_bytes, beyond_bytes, fits
    prefill  seconds                                   sample   wanted, length, step_s, base_s, low_s, high_s, flush_s
    skipped  why                                       error    error, out_of_memory

Rows of a phase carry ``phase`` ("generate" or "equal"), ``batch`` and ``layers``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PHASES = ("generate", "equal")


@dataclasses.dataclass(frozen=True)
class Request:
    """One configuration to measure, all of it plain JSON.

    Attributes:
        method: a cache name or spec (:mod:`kitty_jax.cache.spec`), or "hf-dynamic", "hf-static" or "hf-quantized".
        model: the model's config.json.
        budget: bytes of device memory for the generation.
        batch: sequences of the generation; None for the largest that the budget holds.
        prompt, new: tokens of the prompt and generated tokens of a sequence.
        lengths: cached tokens at which a step of the generation is timed.
        phases: of PHASES.
        equal_batch, equal_lengths: of the comparison at equal batch.
        equal_layers: layers of the model there; None for all.
        equal_exact: a cache, and a compilation, for each of those lengths instead of one that holds the longest.
        steps: decode steps in a timed window; repeats: windows.
        reserve: fraction of the budget that the plan keeps free.
        prefill: whether the prompt is run and timed.
        prefill_tokens: most prompt tokens of our prompt steps, padding included; fewer need less workspace.
        compiled: torch.compile the Hugging Face model.
        backend: of the Hugging Face quantized cache.
    """

    method: str
    model: dict[str, Any]
    budget: int
    batch: int | None = None
    prompt: int = 64
    new: int = 8192
    lengths: tuple[int, ...] = (64, 1024, 2048, 4096, 8192)
    phases: tuple[str, ...] = PHASES
    equal_batch: int = 32
    equal_lengths: tuple[int, ...] = (1024, 4096, 8192)
    equal_layers: int | None = None
    equal_exact: bool = False
    steps: int = 8
    repeats: int = 5
    reserve: float = 0.1
    prefill: bool = True
    prefill_tokens: int = 8192
    compiled: bool = False
    backend: str = "quanto"

    @property
    def capacity(self) -> int:
        """Tokens that a sequence's cache holds in the end."""
        return self.prompt + self.new

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def in_order(lengths: Iterable[int], last: int) -> list[int]:
    """Lengths to sample up to ``last``: the end of the generation first, where memory is short, then its start, so that
    two samples already give an integral, then what lies between. The end stands for lengths within a sixteenth of it.
    """
    lengths = sorted({n for n in lengths if n < last - last // 16} | {last})
    return [lengths[-1], *lengths[:-1]]


def spread(seconds: Iterable[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return median, ordered[0], ordered[-1]


def integrate(samples: Iterable[tuple[float, float]], first: float, last: float) -> float:
    """The integral from ``first`` to ``last`` of the line through (length, seconds of a step) samples: trapezoids
    between them, and the outermost sample's value beyond.

    Raises ValueError without samples.
    """
    points = sorted(samples)
    if not points:
        raise ValueError("no samples to integrate")

    def at(x: float) -> float:
        if x <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
        return points[-1][1]

    corners = [first, *(x for x, _ in points if first < x < last), last]
    return sum((at(x0) + at(x1)) / 2 * (x1 - x0) for x0, x1 in itertools.pairwise(corners))


def generation_seconds(prompt: int, new: int, prefill: float, samples: Iterable[tuple[float, float]]) -> float:
    """Seconds of a whole generation: the prompt, which gives the first new token, and a step for each other one."""
    return prefill + integrate(samples, prompt, prompt + new - 1)


def run_child(measure: Callable[[Request], Iterator[dict]], out_of_memory: Callable[[Exception], bool]) -> int:
    """The main of a child process: the request is its argument; prints the rows. 1 if it ended in an error."""
    request = Request.from_json(sys.argv[1])
    try:
        for row in measure(request):
            print(json.dumps(row), flush=True)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        row = {"kind": "error", "error": text[:2000], "out_of_memory": out_of_memory(error)}
        print(json.dumps(row), flush=True)
        return 1
    return 0
