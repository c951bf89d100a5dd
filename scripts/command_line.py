"""What command lines share: argument types, errors in one line with exit status 2, and what interruption does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.inference.memory import parse_bytes

CACHES = f"{', '.join(name.replace('_', '-') for name in CACHE_NAMES)}, NAME:FIELD=VALUE,... or @FILE"  # for help texts


class Parser(argparse.ArgumentParser):
    """An argument parser for :func:`run_command`: what is wrong is raised as ValueError. Help shows the docstring."""

    def __init__(self, prog: str, description: str, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog, description=description, **options)

    def error(self, message: str):
        raise ValueError(message)


def run_command(parser: Parser, run: Callable[[argparse.Namespace], int | None], argv: list[str] | None) -> int:
    """Parses ``argv``, runs the command and returns the exit status.

    That is what ``run`` returns (None is 0); 2 with one line on standard error for what cannot be; 130 after an
    interruption; 0 where the reader of the output has gone.
    """
    try:
        return run(parser.parse_args(argv)) or 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def whole(low: int) -> Callable[[str], int]:
    """The argument type of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more, got {text}")
        return number

    return parse


def whole_numbers(text: str) -> list[int]:
    """The argument type of whole numbers from 1 on, separated by commas."""
    return [whole(1)(item) for item in text.split(",")]


def memory(text: str) -> int:
    """The argument type of amounts of memory, such as 80GB; in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
