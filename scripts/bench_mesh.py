"""Decode steps on one GPU and on several, the KV heads and weights split over them, same batch and length.

    python scripts/bench_mesh.py --layers 8 --batch 64 --length 16384 --ways 1,2

Prints microseconds of a step for each number of devices (median, lowest and highest of several windows of steps) and
the speedup over the first. Weights are random, the cache is full of random numbers. One process; a number of devices
that is not there is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.steps import functional
from kitty_jax.models.registry import random_model
from kitty_jax.models.sharding import check_mesh, make_mesh
from scripts.bench_decode import DecodeLoop
from scripts.command_line import CACHES, Parser, run_command, whole, whole_numbers
from scripts.model_shapes import read_shape


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_mesh.py", __doc__)
    parser.add_argument("--model-shape", default="qwen3-8b", help="a name, or a path (default: %(default)s)")
    parser.add_argument("--layers", type=whole(1), default=8, help="default: %(default)s")
    parser.add_argument("--cache", action="append", help=f"repeatable: {CACHES} (default: kitty-pro)")
    parser.add_argument("--batch", type=whole(1), default=64, help="default: %(default)s")
    parser.add_argument("--length", type=whole(1), default=16384, help="cached tokens (default: %(default)s)")
    parser.add_argument("--ways", type=whole_numbers, default="1,2", help="sizes of the mesh (default: %(default)s)")
    parser.add_argument("--steps", type=whole(1), default=8, help="of a window (default: %(default)s)")
    parser.add_argument("--repeats", type=whole(1), default=7, help="windows (default: %(default)s)")
    return run_command(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    config, devices = read_shape(options.model_shape, options.layers), jax.devices()
    if max(options.ways) > len(devices):
        raise ValueError(f"{max(options.ways)} devices asked for, there are {len(devices)}")
    sizes = {name: getattr(options, name) for name in ("batch", "length", "layers")}
    for cache in options.cache or ["kitty-pro"]:
        first = None
        for ways in options.ways:
            mesh = make_mesh(1, ways, devices[:ways])
            check_mesh(mesh, config)
            model = functional(random_model(config, mesh=mesh))
            capacity = options.length + 2 * options.steps
            loop = DecodeLoop(model, caches_from_spec(cache), options.batch, capacity, mesh)
            loop.fill()
            loop.compile()
            median, low, high = (
                x * 1e6 / options.steps for x in loop.windows(options.length, options.steps, options.repeats)
            )
            first = first or median
            row = {"cache": cache, "devices": ways, "us": median, "low_us": low, "high_us": high}
            print(json.dumps({**row, "speedup": first / median, "device": devices[0].device_kind, **sizes}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
