"""Where the time of a decode step goes on a GPU: kernels by total time, and what is left between them.

    python scripts/profile_decode.py --model-shape qwen3-8b --cache kitty-pro --batch 249 --length 8192
    python scripts/profile_decode.py --model-shape qwen3-8b --layers 8 --cache full --batch 45 --length 64 --length 8192

A state of random pages is stepped as in bench_generate.py, once timed without the profiler and once under it
(``jax.profiler``, CUPTI). ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` switches CUDA graphs off.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.steps import functional
from kitty_jax.models.registry import random_model
from scripts.bench_decode import DecodeLoop
from scripts.command_line import CACHES, Parser, run_command, whole
from scripts.model_shapes import read_shape

NUMBERED = re.compile(r"[._]\d+")
Event = tuple[str, float, float]  # name, start and end in ns


def main(argv: list[str] | None = None) -> int:
    parser = Parser("profile_decode.py", __doc__)
    parser.add_argument("--model-shape", default="qwen3-8b", help="a name, or a path (default: %(default)s)")
    parser.add_argument("--layers", type=whole(1), help="fewer layers than the model has")
    parser.add_argument("--cache", default="kitty-pro", help=f"{CACHES} (default: %(default)s)")
    parser.add_argument("--batch", type=whole(1), default=32, help="default: %(default)s")
    parser.add_argument("--capacity", type=whole(1), default=8256, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--length", type=whole(1), action="append", help="cached tokens; repeatable (default: 8192)")
    parser.add_argument("--steps", type=whole(1), default=8, help="of a window (default: %(default)s)")
    parser.add_argument("--top", type=whole(1), default=20, help="kernels to print (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON object a length")
    return run_command(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    config = read_shape(options.model_shape, options.layers)
    cache = caches_from_spec(options.cache)
    loop = DecodeLoop(functional(random_model(config)), cache, options.batch, options.capacity)
    loop.compile()
    loop.fill()
    for length in options.length or [8192]:
        row = profile(loop, length, options.steps)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{options.cache} batch {options.batch}, {row['length']} tokens, {config.num_layers} layers: "
            f"{row['step_us']:.0f} us [{row['low_us']:.0f}-{row['high_us']:.0f}] a step; profiled, "
            f"{row['launches']:.0f} launches, busy {row['busy_us']:.0f} us, idle {row['idle_us']:.0f} us"
        )
        for kernel in row["kernels"][: options.top]:
            print(f"{kernel['us']:10.1f} us {kernel['calls']:7.1f} x  {kernel['kernel'][:90]}", flush=True)


def profile(loop: DecodeLoop, length: int, steps: int) -> dict:
    """The figures of one length."""
    start = loop.quiet_start(min(length, loop.capacity - steps), steps)
    median, low, high = (seconds * 1e6 / steps for seconds in loop.windows(start, steps, 5))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            loop.window(start, steps)
        events = device_events(folder)
    if not events:
        raise RuntimeError("the profile holds no GPU events: a GPU and CUPTI are needed")
    busy, span = busy_ns(events), max(end for _, _, end in events) - events[0][1]
    row = {"length": start, "step_us": median, "low_us": low, "high_us": high, "launches": len(events) / steps}
    row |= {"busy_us": busy / 1e3 / steps, "idle_us": (span - busy) / 1e3 / steps}
    return row | {"kernels": kernel_rows(events, steps)}


def device_events(folder: str) -> list[Event]:
    """Everything that the GPU ran, from a trace folder, by start."""
    file = max(Path(folder).rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU:0") for line in plane.lines]
    streams = [line for line in lines if line.name.startswith("Stream")]
    events = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events]
    return sorted(events, key=lambda e: e[1])


def busy_ns(events: list[Event]) -> float:
    """Length of the union of the events' times; ``events`` by start."""
    total, until = 0.0, float("-inf")
    for _, start, end in events:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernel_rows(events: list[Event], steps: int) -> list[dict]:
    """A row per kernel (numbers in names taken out), largest total first: calls and us a step."""
    calls, time = collections.Counter(), collections.Counter()
    for name, start, end in events:
        name = NUMBERED.sub("", name)
        calls[name] += 1
        time[name] += end - start
    return [{"kernel": n, "calls": calls[n] / steps, "us": t / 1e3 / steps} for n, t in time.most_common()]


if __name__ == "__main__":
    sys.exit(main())
