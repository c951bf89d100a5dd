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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="convert.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a .gguf file or a Hugging Face model directory")
    parser.add_argument("destination", type=Path, help="the directory to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of every tensor (default: as stored; float32 from .gguf)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=_gigabytes,
        default=DEFAULT_SHARD_BYTES / 1e9,
        help="largest weight file, and so the memory needed, in 10^9 bytes (default: %(default)g)",
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer files")
    parser.add_argument(
        "--force", action="store_true", help="write into a directory that is not empty, replacing its checkpoint"
    )
    arguments = parser.parse_args(argv)
    try:
        written = convert_checkpoint(
            arguments.source,
            arguments.destination,
            dtype=arguments.dtype,
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
            tokenizer=not arguments.no_tokenizer,
            force=arguments.force,
            progress=_show if sys.stderr.isatty() else None,
        )
    except (ValueError, OSError) as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"{arguments.destination}: {', '.join(written)}")
    if not arguments.no_tokenizer and not any(name.startswith(("tokenizer.json", "vocab.json")) for name in written):
        print("note: the source has no tokenizer files, so none were written", file=sys.stderr)
    return 0


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
    print(
        f"\r{100 * done / max(total, 1):5.1f} %  {name:<60}",
        end="\n" if done == total else "",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
