"""Write a .gguf file or a Hugging Face directory as a Hugging Face directory, in another dtype if asked to.

    python scripts/convert.py SRC DST [--dtype float32|bfloat16|float16] [--max-shard-gb 2] [--no-tokenizer] [--force]

One weight file is in memory at a time. What it writes is read by `kitty_jax.models.checkpoint.load_model` and by
transformers.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

if __name__ == "__main__":  # not where a test imports it
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed on a device

from kitty_jax.models.checkpoint import DTYPES
from kitty_jax.models.export import DEFAULT_SHARD_BYTES, convert_checkpoint
from scripts.command_line import Parser, run_command


def main(argv: list[str] | None = None) -> int:
    parser = Parser("convert.py", __doc__)
    add, default = parser.add_argument, DEFAULT_SHARD_BYTES / 1e9
    add("source", type=Path, help="a .gguf file or a Hugging Face model directory")
    add("destination", type=Path, help="the directory to write")
    add("--dtype", choices=DTYPES, help="dtype of every tensor (default: as stored; float32 from .gguf)")
    what = "largest weight file, and so the memory needed, in 10^9 bytes (default: %(default)g)"
    add("--max-shard-gb", type=_gigabytes, default=default, help=what)
    add("--no-tokenizer", action="store_true", help="write no tokenizer files")
    add("--force", action="store_true", help="write into a directory that is not empty, replacing its checkpoint")
    return run_command(parser, convert, argv)


def convert(options: argparse.Namespace) -> None:
    written = convert_checkpoint(
        options.source,
        options.destination,
        dtype=options.dtype,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
        tokenizer=not options.no_tokenizer,
        force=options.force,
        progress=_show if sys.stderr.isatty() else None,
    )
    print(f"{options.destination}: {', '.join(written)}")
    if not options.no_tokenizer and not any(name.startswith(("tokenizer.json", "vocab.json")) for name in written):
        print("note: the source has no tokenizer files, so none were written", file=sys.stderr)


def _gigabytes(text: str) -> float:
    """The value of --max-shard-gb: at least one byte, and a number of bytes that an int can hold."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value * 1e9 < math.inf:
        raise argparse.ArgumentTypeError(f"wanted a finite number of 10^9 bytes, at least 1e-9, got {text!r}")
    return value


def _show(done: int, total: int, name: str) -> None:
    end = "\n" if done == total else ""
    print(f"\r{100 * done / max(total, 1):5.1f} %  {name:<60}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
