"""Plan what fits into a device's memory: the largest batch, the longest sequence, or given requests. Nothing is
allocated.

    python scripts/plan.py --model-shape qwen3-8b --budget 80GB --length 8192
    python scripts/plan.py --model-shape llama3-70b --requests 32x128000 --budget 80GB --model-ways 8
    python scripts/plan.py --model-shape qwen3-32b --cache kitty-pro --batch 16 --budget 141GB --parts

Shapes are names or the path of a checkpoint or config.json; weights are counted with them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed on a device

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.inference.memory import format_bytes, parse_bytes
from kitty_jax.inference.memory_plan import RESERVE, KVPlan
from kitty_jax.models.registry import CONFIG_NAMES
from scripts.model_shapes import read_shape, weight_shapes

DEFAULT_CACHES = ("full", "kitty", "kitty-pro")
DEFAULT_LENGTH = 8192
COLUMNS = ("sequences", "tokens", "a sequence", "cache", "of bf16", "free", "bf16/cache")


def main(argv: list[str] | None = None) -> int:
    """Prints a table or JSON; 2 with one line on standard error for what cannot be."""
    options = parser().parse_args(argv)
    try:
        config = read_shape(options.model_shape, options.layers)
        plans = [(name, plan(config, name, options)) for name in options.cache or DEFAULT_CACHES]
    except (ValueError, OSError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(
            json.dumps([{"model_shape": options.model_shape, "cache": name, **made.to_json()} for name, made in plans])
        )
        return 0
    print(report(options.model_shape, plans))
    for name, made in plans if options.parts else ():
        print(f"\n{name}: {made}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="plan.py", description=__doc__.split("\n\n")[0].replace("\n", " "))
    add = made.add_argument
    add("--model-shape", default="qwen3-8b", help=f"{', '.join(CONFIG_NAMES)}, or a path (default: %(default)s)")
    add("--layers", type=int, help="instead of the model's")
    add(
        "--cache",
        action="append",
        help=f"repeatable: {', '.join(CACHE_NAMES)}, NAME:FIELD=VALUE or @FILE (default: {' '.join(DEFAULT_CACHES)})",
    )
    add("--length", type=int, help=f"tokens of a sequence: plans the largest batch (default: {DEFAULT_LENGTH})")
    add("--batch", type=int, help="sequences: plans the greatest length, or with --length just that batch")
    add("--requests", help="lengths of requests to hold at once, such as 32x128000,4x8192")
    add("--budget", type=parse_size, help="memory of one device to use, such as 80GB or 80GiB")
    add("--reserve", type=float, help=f"fraction of it to keep free (default: {RESERVE})")
    add("--workspace", type=parse_size, help="what to keep free, instead of a fraction")
    add("--data", type=int, default=1, help="devices that share the sequences (default: %(default)s)")
    add("--model-ways", type=int, default=1, help="devices that share KV heads and weights (default: %(default)s)")
    add("--parts", action="store_true", help="print the parts of each cache as well")
    add("--json", action="store_true", help="a JSON list instead of the table, in bytes")
    return made


def parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def plan(config, cache: str, options: argparse.Namespace) -> KVPlan:
    """The plan that the options ask for, of one cache."""
    cache = caches_from_spec(cache)
    for name in ("length", "batch", "budget", "data", "model_ways"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    memory = {
        "budget": options.budget,
        "weights": weight_shapes(config, options.data, options.model_ways),
        "reserve": options.reserve,
        "workspace": options.workspace,
        "data": options.data,
        "model": options.model_ways,
    }
    batch, length = options.batch, options.length
    if options.requests is not None:
        if length is not None or batch is not None:
            raise ValueError("--requests states lengths and their number: leave --length and --batch out")
        return KVPlan.for_requests(config, cache, parse_requests(options.requests), **memory)
    if options.budget is None or (batch is not None and length is not None):
        batch = options.data if batch is None else batch
        return KVPlan.for_batch(
            config, cache, batch=batch, length=DEFAULT_LENGTH if length is None else length, **memory
        )
    if batch is None and length is None:
        length = DEFAULT_LENGTH
    return KVPlan.for_budget(config, cache, batch=batch, length=length, **memory)


def parse_requests(text: str) -> list[int]:
    """ "2x100,50" -> [100, 100, 50]."""
    lengths = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x)?\s*(\d+)\s*", item)
        if not match:
            raise ValueError(f"--requests takes lengths, or COUNTxLENGTH, separated by commas, got {item!r}")
        lengths += [int(match[2])] * int(match[1] or 1)
    return lengths


def report(model: str, plans: list[tuple[str, KVPlan]]) -> str:
    """The table; sizes are those of one device."""
    first = plans[0][1]
    mesh = f", each of {first.devices} devices ({first.data} data x {first.model} model)" if first.devices > 1 else ""
    budget = "no budget" if first.budget is None else f"budget {format_bytes(first.budget)}"
    lines = [
        f"{model}: {first.shape.num_layers} layers, {first.shape.num_kv_heads} KV heads, head size "
        f"{first.shape.head_dim}; {budget}, weights {format_bytes(first.weights)}, kept free "
        f"{format_bytes(first.workspace)}{mesh}",
        row("cache", COLUMNS),
    ]
    for name, made in plans:
        free = "-" if made.free is None else format_bytes(made.free)
        sizes = (made.per_sequence["total"], made.parts["total"], made.bf16 // made.devices)
        lines.append(
            row(
                name,
                [f"{made.batch:,}", f"{made.length:,}", *map(format_bytes, sizes), free, f"{made.ratio:.2f}"],
            )
        )
    missing = [name for name, made in plans if not made.fits]
    if missing:
        lines.append(f"does not fit: {', '.join(missing)} (free is what is missing, below 0)")
    return "\n".join(lines)


def row(name: str, columns) -> str:
    return f"{name:<16}" + "".join(f"{column:>13}" for column in columns)


if __name__ == "__main__":
    sys.exit(main())
