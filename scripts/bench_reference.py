"""Time of one decode step of attention on the reference path, by tokens cached: does it grow no faster than linearly?

    python scripts/bench_reference.py --cache kitty-pro --batch 1

Prints, for each number of cached tokens, the median and the spread (10th to 90th percentile) of a step, and its ratio
to what a straight line from the smallest size through the origin would give: up to 1 is linear or better. The state's
capacity is the same in all rows, so a step that worked through the whole capacity would show as a constant time.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.attention import Step, attend_token
from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.quantized_cache import append_chunk, flush
from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.state import KVShape, init_state


def decode(state, q, k, v, implementation):
    """One token in every layer: (output of the last layer, state)."""
    before = state.lengths
    state, num_new = reserve(state, jnp.ones_like(before))
    step = Step(before, num_new, state.page_table, implementation)
    layers, out = [], q
    for layer in state.layers:
        out, layer = attend_token(step, layer, out, k, v)
        layers.append(layer)
    state = dataclasses.replace(state, layers=tuple(layers), lengths=before + num_new)
    return out, flush(state, before, implementation, after=out)


def fill(state, keys, values):
    """A chunk [B, T, K, D] into every layer."""
    before = state.lengths
    state, num_new = reserve(state, jnp.full_like(before, keys.shape[1]))
    layers = tuple(append_chunk(x, keys, values, before, num_new, state.page_table) for x in state.layers)
    return dataclasses.replace(state, layers=layers, lengths=before + num_new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default="kitty-pro", help=f"{', '.join(CACHE_NAMES)}, or NAME:FIELD=VALUE")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="tokens cached")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each size")
    parser.add_argument("--implementation", default="xla", choices=["xla", "mosaic", "auto"])
    args = parser.parse_args()
    sizes = sorted(args.tokens)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    shape = KVShape(args.layers, args.kv_heads, args.head_dim, dtype)
    capacity = max(sizes) + args.steps + 16
    new = [random(args.batch, 1, n, args.head_dim) for n in (args.heads, args.kv_heads, args.kv_heads)]
    chunk = [random(args.batch, 512, args.kv_heads, args.head_dim) for _ in range(2)]
    step = jax.jit(decode, donate_argnums=0, static_argnums=4)
    grow = jax.jit(fill, donate_argnums=0)

    print(
        f"{args.cache}, {args.layers} layers, {args.implementation}, {jax.devices()[0].device_kind}, {dtype.__name__}:"
    )
    print(f"{'tokens':>8} {'median ms':>10} {'10 % to 90 %':>16} {'ratio to linear':>16}")
    base = None
    for size in sizes:
        state = init_state(caches_from_spec(args.cache), shape, batch=args.batch, capacity=capacity)
        for _ in range(size // 512):
            state = grow(state, *chunk)
        if size % 512:
            state = grow(state, *(x[:, : size % 512] for x in chunk))
        for _ in range(3):
            out, state = step(state, *new, args.implementation)
        times = []
        for _ in range(args.steps):
            jax.block_until_ready((out, state))
            start = time.perf_counter()
            out, state = step(state, *new, args.implementation)
            jax.block_until_ready((out, state))
            times.append(1e3 * (time.perf_counter() - start))
        low, median, high = np.percentile(times, [10, 50, 90])
        base = base or median / size
        print(f"{size:8} {median:10.3f} {low:7.3f} to {high:5.3f} {median / (base * size):16.2f}")


if __name__ == "__main__":
    main()
