"""Evaluate caches: one subcommand per evaluation.

    python scripts/evaluate.py text --model PATH --file TEXT --tokens 4096 --cache kitty --cache kitty-pro --json OUT

A subcommand NAME is a module `eval_NAME.py` beside this file with ``HELP`` (one line), ``add_arguments(parser)`` and
``run(arguments)``, which returns the exit status. It is found by its name; nothing needs to be registered.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

PREFIX = "eval_"


def subcommands() -> dict[str, ModuleType]:
    """The evaluations beside this file, by the name of their subcommand."""
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith(PREFIX))
    return {n.removeprefix(PREFIX).replace("_", "-"): importlib.import_module(f"scripts.{n}") for n in names}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in subcommands().items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"evaluate.py {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
