"""Print what each cache costs in bytes, against bfloat16. Nothing is allocated.

    python scripts/cache_bytes.py [--model qwen3-8b] [--tokens 8192] [--batch 1] [--cache NAME ...]

The default is Qwen3-8B's shape. --layers, --kv-heads and --head-dim give any other.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed on a device

import jax.numpy as jnp

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.cache.state import KVShape
from kitty_jax.inference.memory import cache_bytes
from kitty_jax.models.registry import CONFIG_NAMES, config_from_name

DTYPES = ("bfloat16", "float16", "float32")
COLUMNS = ("payload", "metadata", "buffers", "total", "bf16/total", "bits/element", "in pages")


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 2 with one line on standard error for what cannot be."""
    parser = argparse.ArgumentParser(prog="cache_bytes.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help=f"one of {', '.join(CONFIG_NAMES)} (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--kv-heads", type=int, help="instead of the model's")
    parser.add_argument("--head-dim", type=int, help="instead of the model's")
    parser.add_argument("--tokens", type=int, default=8192, help="capacity of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of what stays in full precision (default: %(default)s)"
    )
    parser.add_argument("--cache", action="append", help=f"repeatable; all by default: {', '.join(CACHE_NAMES)}")
    options = parser.parse_args(argv)
    try:
        config = config_from_name(options.model)
        given = {"num_layers": options.layers, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
        sizes = {name: getattr(config, name) if value is None else value for name, value in given.items()}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes must be 1 or more, got {sizes}")
        shape = KVShape(**sizes, dtype=jnp.dtype(options.dtype))
        print(report(shape, options.cache or CACHE_NAMES, options.tokens, options.batch))
    except ValueError as error:
        print(f"cache_bytes.py: {error}", file=sys.stderr)
        return 2
    return 0


def report(shape: KVShape, names, tokens: int, batch: int) -> str:
    """The table for the caches ``names``."""
    lines = [
        f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads, head size {shape.head_dim}, {tokens} tokens, "
        f"batch {batch}, full precision in {shape.dtype.name}; sizes in MB (10^6 bytes)",
        row("cache", COLUMNS),
    ]
    for name in names:
        config = cache_from_spec(name)
        size = cache_bytes(config, shape, batch=batch, capacity=tokens)
        megabytes = [f"{x / 1e6:.2f}" for x in (size.payload, size.metadata, size.buffers, size.total)]
        pages = f"{config.page_format(shape.head_dim).bits_per_element:.2f}" if config.quantized else "-"
        lines.append(
            row(name.replace("_", "-"), [*megabytes, f"{size.ratio:.2f}", f"{size.bits_per_element:.2f}", pages])
        )
    lines.append(
        "bits/element: everything over what the capacity holds. in pages: quantized pages alone, with their metadata."
    )
    return "\n".join(lines)


def row(name: str, columns) -> str:
    return f"{name:<12}" + "".join(f"{column:>14}" for column in columns)


if __name__ == "__main__":
    sys.exit(main())
