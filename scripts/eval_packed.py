"""`evaluate.py packed`: the packed cache itself on a text, against full precision and the one-pass simulation."""

from __future__ import annotations

import argparse
import time

HELP = "The packed cache on a text: KL from full precision, and how far the one-pass simulation is from it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from scripts import eval_text

    eval_text.add_arguments(parser)
    parser.set_defaults(tokens=1024)


def run(arguments: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp

    from kitty_jax.cache.spec import caches_from_spec
    from kitty_jax.models.checkpoint import load_model
    from kitty_jax.research.metrics import compare_hidden
    from kitty_jax.research.packed_scoring import packed_hidden
    from kitty_jax.research.simulation import simulated_attention, simulated_caches
    from scripts.eval_text import read_tokens
    from scripts.task_runs import write_json

    caches = {name: caches_from_spec(name) for name in arguments.cache}
    tokens = jnp.array(read_tokens(arguments.model, arguments.file, arguments.tokens, arguments.start), jnp.int32)
    model = load_model(arguments.model, dtype=arguments.dtype)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    simulate = jax.jit(simulated_attention)

    def recording(cache, q, k, v):
        return simulate(cache, q, k, v)[0], (q, k, v)

    def simulated(cache) -> tuple[jax.Array, tuple]:
        hidden, inputs = model(tokens[None], positions, simulated_caches(cache, model.config.num_layers), recording)
        return hidden[0], inputs

    full, results = simulated("full")[0], {}
    for name, cache in caches.items():
        clock = time.perf_counter()
        packed = packed_hidden(model, tokens[None], cache)[0]
        row = compare_hidden(model, full, packed, tokens, arguments.start)
        in_one_pass, inputs = simulated(cache)
        row["simulated_kl"] = compare_hidden(model, full, in_one_pass, tokens, arguments.start)["kl"]
        for kind, other in (
            ("own_inputs", packed),
            ("same_inputs", packed_hidden(model, tokens[None], cache, inputs=inputs)[0]),
        ):
            between = compare_hidden(model, in_one_pass, other, tokens, arguments.start)
            row[f"kl_to_simulation_{kind}"], row[f"top1_with_simulation_{kind}"] = between["kl"], between["top1"]
        row["seconds"] = time.perf_counter() - clock
        results[name] = row
        print(f"{name}: KL {row['kl']:.4f} packed, {row['simulated_kl']:.4f} simulated ({row['seconds']:.0f} s)")
        for kind in ("same_inputs", "own_inputs"):
            kl, top1 = row[f"kl_to_simulation_{kind}"], row[f"top1_with_simulation_{kind}"]
            print(
                f"    packed and simulation on {kind.replace('_', ' ')}: KL {kl:.1e}, same top token {top1:.4f}",
                flush=True,
            )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.json, results)
    return 0
