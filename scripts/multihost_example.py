"""Generates on several hosts: the same program on each, one mesh over the devices of all.

    python scripts/multihost_example.py --coordinator host0:1234 --processes 2 --process 0 --model PATH  # on host0
    python scripts/multihost_example.py --coordinator host0:1234 --processes 2 --process 1 --model PATH  # on the other

PATH is a checkpoint, the same on every host; without it a tiny random model is used. Sequences are split over the hosts
("data"), KV heads and weights over the devices of each ("model"). Every host gets all results; the first one prints
them, a JSON object a line. Two processes on the CPU of one machine, two devices each:

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
    python scripts/multihost_example.py --coordinator localhost:1234 --processes 2 --process 1 &
    python scripts/multihost_example.py --coordinator localhost:1234 --processes 2 --process 0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp

from kitty_jax import Engine, Request, generate
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.sharding import make_mesh
from scripts.command_line import Parser, run_command, whole

SIZES = {"vocab_size": 96, "embed_dim": 64, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = dataclasses.replace(config_from_name("qwen3-0.6b"), num_layers=2, dtype=jnp.float32, **SIZES)
PROMPTS = [[5, 11, 90, 3, 3, 41], [7], list(range(20, 65)), list(range(70))]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("multihost_example.py", __doc__)
    parser.add_argument("--coordinator", required=True, help="address of the first host, and a free port there")
    parser.add_argument("--processes", type=whole(1), required=True, help="how many there are")
    parser.add_argument("--process", type=whole(0), required=True, help="which one this is, from 0")
    parser.add_argument("--model", help="a checkpoint (default: random weights)")
    parser.add_argument("--cache", default="kitty-pro")
    parser.add_argument("--new", type=whole(1), default=100, help="new tokens")
    return run_command(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    # Before anything else of JAX. Across the CPUs of several processes gloo carries what is exchanged.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    try:
        mesh = make_mesh(data=jax.process_count(), model=jax.local_device_count())
        model = load_model(options.model, mesh=mesh) if options.model else random_model(TINY, mesh=mesh)
        result = generate(model, PROMPTS, cache=options.cache, max_new_tokens=options.new, mesh=mesh)
        # The same prompts twice over, a sequence a host at a time.
        engine = Engine(model, cache=options.cache, slots=jax.process_count(), capacity=70 + options.new, mesh=mesh)
        served = engine.run([Request(ids, options.new) for ids in PROMPTS * 2])
        if jax.process_index() == 0:
            for tokens in (*result.sequences(), *(x.tokens for x in served)):
                print(json.dumps(tokens), flush=True)
    finally:
        jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(main())
