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
from scripts.bench_generate_common import spread
from scripts.bench_generate_ours import Loop
from scripts.model_shapes import read_shape

NUMBERED = re.compile(r"[._]\d+")


def device_events(folder: str) -> list[tuple[str, float, float]]:
    """(name, start, end) in ns of everything that the GPU ran, from a trace folder, by start."""
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    events = []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                events += [(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return sorted(events, key=lambda e: e[1])


def busy_ns(events: list[tuple[str, float, float]]) -> float:
    """Length of the union of the events' times; ``events`` by start."""
    total, until = 0.0, float("-inf")
    for _, start, end in events:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def table(events: list[tuple[str, float, float]], steps: int) -> list[dict]:
    """A row per kernel (numbers in names taken out), largest total first: calls and us a step."""
    calls, time = collections.Counter(), collections.Counter()
    for name, start, end in events:
        name = NUMBERED.sub("", name)
        calls[name] += 1
        time[name] += end - start
    return [{"kernel": n, "calls": calls[n] / steps, "us": t / 1e3 / steps} for n, t in time.most_common()]


def profile(loop: Loop, length: int, steps: int) -> dict:
    """The figures of one length."""
    start = loop.quiet_start(min(length, loop.capacity - steps), steps)
    loop.window(start, steps)
    median, low, high = (x / steps for x in spread(loop.window(start, steps) - loop.overhead for _ in range(5)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            loop.window(start, steps)
        events = device_events(folder)
    if not events:
        raise SystemExit("the profile holds no GPU events: a GPU and CUPTI are needed")
    span = max(e[2] for e in events) - events[0][1]
    return {
        "length": start,
        "step_us": median * 1e6,
        "low_us": low * 1e6,
        "high_us": high * 1e6,
        "launches": len(events) / steps,
        "busy_us": busy_ns(events) / 1e3 / steps,
        "idle_us": (span - busy_ns(events)) / 1e3 / steps,
        "kernels": table(events, steps),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", default="qwen3-8b", help="a name, or a path of a config.json")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--cache", default="kitty-pro", help="NAME or NAME:FIELD=VALUE")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=8256, help="tokens of a sequence's cache")
    parser.add_argument("--length", type=int, action="append", help="cached tokens; may repeat (default 8192)")
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--top", type=int, default=20, help="kernels to print")
    parser.add_argument("--json", action="store_true", help="a JSON object a length")
    args = parser.parse_args(argv)
    config = read_shape(args.model_shape, args.layers)
    loop = Loop(functional(random_model(config)), caches_from_spec(args.cache), args.batch, args.capacity)
    loop.compile()
    loop.fill()
    for length in args.length or [8192]:
        row = profile(loop, length, args.steps)
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{args.cache} batch {args.batch}, {row['length']} tokens, {config.num_layers} layers: "
            f"{row['step_us']:.0f} us [{row['low_us']:.0f}-{row['high_us']:.0f}] a step; profiled, "
            f"{row['launches']:.0f} launches, busy {row['busy_us']:.0f} us, idle {row['idle_us']:.0f} us"
        )
        for kernel in row["kernels"][: args.top]:
            print(f"{kernel['us']:10.1f} us {kernel['calls']:7.1f} x  {kernel['kernel'][:90]}", flush=True)


if __name__ == "__main__":
    main()
