"""Decode steps on one GPU and on several, the KV heads and weights split over them, same batch and length.

    python scripts/bench_mesh.py --layers 8 --batch 64 --length 16384 --ways 1,2

Prints microseconds of a step for each number of devices (median, lowest and highest of several windows of steps) and
the speedup over the first. Weights are random, the cache is full of random numbers. One process; a number of devices
that is not there is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.state import KVState, init_state
from kitty_jax.cache.steps import FunctionalModel, decode_step, functional
from kitty_jax.models.registry import random_model
from kitty_jax.models.sharding import check_mesh, make_mesh
from scripts.bench_state import random_state
from scripts.model_shapes import read_shape


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", default="qwen3-8b", help="a name, or the path of a config.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cache", action="append", help="NAME or NAME:FIELD=VALUE; may be repeated; default kitty-pro")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=16384, help="cached tokens of each sequence")
    parser.add_argument("--ways", default="1,2", help="sizes of the 'model' axis, comma-separated")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    config = read_shape(options.model_shape, options.layers)
    for cache in options.cache or ["kitty-pro"]:
        first = None
        for ways in map(int, options.ways.split(",")):
            if ways > len(jax.devices()):
                raise SystemExit(f"bench_mesh.py: {ways} devices asked for, there are {len(jax.devices())}")
            low, median, high = measure(config, cache, ways, options)
            first = first or median
            row = {"cache": cache, "devices": ways, "us": median * 1e6, "low_us": low * 1e6, "high_us": high * 1e6}
            row |= {"speedup": first / median, "device": jax.devices()[0].device_kind, "batch": options.batch}
            print(json.dumps(row | {"length": options.length, "layers": options.layers}), flush=True)
    return 0


def measure(config, cache: str, ways: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """(lowest, median, highest) seconds of a step."""
    mesh = make_mesh(1, ways, jax.devices()[:ways])
    check_mesh(mesh, config)
    model = functional(random_model(config, mesh=mesh))
    capacity = options.length + 2 * options.steps
    make = functools.partial(
        init_state, caches_from_spec(cache), config, batch=options.batch, capacity=capacity, mesh=mesh
    )
    state = random_state(make)
    tokens = jax.random.randint(jax.random.key(1), (options.batch,), 0, config.vocab_size, jnp.int32)
    lengths = np.full(options.batch, options.length, np.int32)
    times = []
    for turn in range(options.repeats + 2):
        state = dataclasses.replace(state, lengths=jax.device_put(lengths, state.lengths.sharding))
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state, tokens = _steps(model, state, tokens, np.int32(options.steps))
        tokens.block_until_ready()
        if turn > 1:
            times.append((time.perf_counter() - begin) / options.steps)
    return min(times), float(np.median(times)), max(times)


@functools.partial(jax.jit, donate_argnums=1)
def _steps(model: FunctionalModel, state: KVState, tokens: jax.Array, steps: jax.Array):
    def body(_, carry):
        state, tokens = carry
        logits, state = decode_step(model, state, tokens)
        return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.fori_loop(0, steps, body, (state, tokens))


if __name__ == "__main__":
    sys.exit(main())
