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

from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.sharding import check_mesh, make_mesh
from kitty_jax.pallas_kernels.store import store_key_pages, store_value_pages
from kitty_jax.placement import on_mesh, partition_specs
from kitty_jax.state import FullLayer, KVState, init_state
from kitty_jax.steps import FunctionalModel, decode_step, functional


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", default="qwen3-8b", help="a name of kitty_jax.models.registry")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cache", action="append", help="may be repeated; default kitty-pro")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=16384, help="cached tokens of each sequence")
    parser.add_argument("--ways", default="1,2", help="sizes of the 'model' axis, comma-separated")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    config = dataclasses.replace(config_from_name(options.model_shape), num_layers=options.layers, fused=True)
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
    make = functools.partial(init_state, cache, config, batch=options.batch, capacity=capacity, mesh=mesh)
    state = _fill(jax.jit(make)())
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


def _fill(state: KVState) -> KVState:
    """The state with random contents, each device making its own."""
    layers = []
    for layer in state.layers:
        specs = partition_specs(layer, heads=2 if isinstance(layer, FullLayer) else 1)
        layers.append(_fill_layer(state.mesh, layer, specs))
    return dataclasses.replace(state, layers=tuple(layers))


def _fill_layer(mesh, layer, specs):
    return jax.jit(lambda x: on_mesh(mesh, _random, (x,), (specs,), specs), donate_argnums=0)(layer)


def _random(layer):
    key = jax.random.key(0)

    def normal(x):
        rows = jax.random.normal(key, (4099, x.shape[-1]), jnp.float32).astype(x.dtype)
        return rows[jnp.arange(x.size // x.shape[-1], dtype=jnp.int32) % 4099].reshape(x.shape)

    if isinstance(layer, FullLayer):
        return FullLayer(normal(layer.keys), normal(layer.values))
    kv, fmt = layer.kv, layer.kv.fmt
    page = jax.random.normal(key, (61, kv.key_pages.shape[1], fmt.page, fmt.head_dim), jnp.float32)
    page = page.astype(kv.tail_keys.dtype)
    ids = jnp.arange(61, dtype=jnp.int32)
    keys, values = (jnp.zeros((61, *x.shape[1:]), x.dtype) for x in (kv.key_pages, kv.value_pages))
    keys = store_key_pages(keys, page, ids, fmt)
    values = store_value_pages(values, page[::-1], jnp.zeros_like(ids), ids, fmt)
    pool = jnp.arange(kv.key_pages.shape[0], dtype=jnp.int32) % 61
    buffers = {x: normal(getattr(kv, x)) for x in ("sink_keys", "sink_values", "tail_keys", "ring_values")}
    kv = dataclasses.replace(kv, key_pages=keys[pool], value_pages=values[pool], **buffers)
    return dataclasses.replace(layer, kv=kv)


if __name__ == "__main__":
    sys.exit(main())
