"""Plan what fits into a device's memory, and what each cache costs. Nothing is allocated.

    python scripts/plan.py                                                    # bytes of 8,192 tokens, against bfloat16
    python scripts/plan.py --model-shape qwen3-8b --budget 80GB --length 8192                 # the largest batch
    python scripts/plan.py --model-shape qwen3-32b --cache kitty-pro --batch 16 --budget 141GB --parts  # the length
    python scripts/plan.py --model-shape llama3-70b --requests 32x128000 --budget 80GB --model-ways 8

Shapes are names or the path of a checkpoint or config.json; weights are counted with them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed on a device

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.inference.memory import format_bytes
from kitty_jax.inference.memory_plan import RESERVE, KVPlan
from kitty_jax.models.registry import CONFIG_NAMES
from scripts.command_line import CACHES, Parser, memory, run_command, whole
from scripts.model_shapes import read_shape, weight_shapes
from scripts.tables import markdown

DEFAULT_CACHES = ("full", "kitty", "kitty-pro")
DEFAULT_LENGTH = 8192
COLUMNS = ("cache", "sequences", "tokens", "a sequence", "all", "bf16", "bf16 / all", "bits", "bits of pages", "free")


def main(argv: list[str] | None = None) -> int:
    """Prints a table or JSON; 2 with one line on standard error for what cannot be."""
    parser = Parser("plan.py", __doc__)
    add = parser.add_argument
    add("--model-shape", default="qwen3-8b", help=f"{', '.join(CONFIG_NAMES)}, or a path (default: %(default)s)")
    add("--layers", type=whole(1), help="instead of the model's")
    add("--cache", action="append", help=f"repeatable: {CACHES} (default: {' '.join(DEFAULT_CACHES)})")
    add("--length", type=whole(1), help=f"tokens of a sequence: plans the largest batch (default: {DEFAULT_LENGTH})")
    add("--batch", type=whole(1), help="sequences: plans the greatest length, or with --length just that batch")
    add("--requests", type=_requests, help="lengths of requests to hold at once, such as 32x128000,4x8192")
    add("--budget", type=memory, help="memory of one device to use, such as 80GB or 80GiB")
    add("--reserve", type=float, help=f"fraction of it to keep free (default: {RESERVE})")
    add("--workspace", type=memory, help="what to keep free, instead of a fraction")
    add("--data", type=whole(1), default=1, help="devices that share the sequences (default: %(default)s)")
    add("--model-ways", type=whole(1), default=1, help="devices that share KV heads and weights (default: %(default)s)")
    add("--parts", action="store_true", help="print the parts of each cache as well")
    add("--json", action="store_true", help="a JSON list instead of the table, in bytes")
    return run_command(parser, _run, argv)


def _requests(text: str) -> list[int]:
    """ "2x100,50" -> [100, 100, 50]."""
    lengths = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x)?\s*(\d+)\s*", item)
        if not match:
            raise argparse.ArgumentTypeError(f"takes lengths, or COUNTxLENGTH, separated by commas, got {item!r}")
        lengths += [int(match[2])] * int(match[1] or 1)
    return lengths


def _run(options: argparse.Namespace) -> None:
    config = read_shape(options.model_shape, options.layers)
    plans = [(name, plan(config, name, options)) for name in options.cache or DEFAULT_CACHES]
    if options.json:
        print(json.dumps([{"model_shape": options.model_shape, "cache": name, **p.to_json()} for name, p in plans]))
        return
    print(report(options.model_shape, plans))
    for name, made in plans if options.parts else ():
        print(f"\n{name}: {made}")


def plan(config, cache: str, options: argparse.Namespace) -> KVPlan:
    """The plan of one cache that the options ask for."""
    weights = weight_shapes(config, options.data, options.model_ways)
    keep = {"reserve": options.reserve, "workspace": options.workspace}
    kept = {"budget": options.budget, "weights": weights, **keep, "data": options.data, "model": options.model_ways}
    caches, batch, length = caches_from_spec(cache), options.batch, options.length
    if options.requests is not None:
        if length is not None or batch is not None:
            raise ValueError("--requests states lengths and their number: leave --length and --batch out")
        return KVPlan.for_requests(config, caches, options.requests, **kept)
    if options.budget is None or (batch is not None and length is not None):
        return KVPlan.for_batch(config, caches, batch=batch or options.data, length=length or DEFAULT_LENGTH, **kept)
    if batch is None and length is None:
        length = DEFAULT_LENGTH
    return KVPlan.for_budget(config, caches, batch=batch, length=length, **kept)


def report(model: str, plans: list[tuple[str, KVPlan]]) -> str:
    """The table; sizes are those of one device."""
    first = plans[0][1]
    mesh = f", each of {first.devices} devices ({first.data} data x {first.model} model)" if first.devices > 1 else ""
    budget = "no budget" if first.budget is None else f"budget {format_bytes(first.budget)}"
    head = (
        f"{model}: {first.shape.num_layers} layers, {first.shape.num_kv_heads} KV heads, head size "
        f"{first.shape.head_dim}; {budget}, weights {format_bytes(first.weights)}, kept free "
        f"{format_bytes(first.workspace)}{mesh}"
    )
    rows = []
    for name, made in plans:
        sizes = map(format_bytes, (made.per_sequence["total"], made.parts["total"], made.bf16 // made.devices))
        pages = [c.page_format(made.shape.head_dim).bits_per_element for c in made.caches if c.quantized]
        bits = (f"{16 / made.ratio:.2f}", f"{statistics.mean(pages):.2f}" if pages else None)
        free = None if made.free is None else format_bytes(made.free)
        rows.append((name, f"{made.batch:,}", f"{made.length:,}", *sizes, f"{made.ratio:.2f}", *bits, free))
    notes = ["bits: an element of what the capacity holds, everything counted; of pages: with their metadata, alone."]
    if missing := [name for name, made in plans if not made.fits]:
        notes.append(f"does not fit: {', '.join(missing)} (free is what is missing, below 0)")
    return "\n".join([head, "", markdown(COLUMNS, rows), "", *notes])


if __name__ == "__main__":
    sys.exit(main())
