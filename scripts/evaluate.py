"""Evaluate caches: one subcommand per evaluation.

    python scripts/evaluate.py text --model PATH --file TEXT --tokens 4096 --cache kitty --cache kitty-pro --json OUT

A subcommand NAME is a module `eval_NAME.py` beside this file with ``HELP`` (one line), ``add_arguments(parser)`` and
``run(arguments)``. It is found by its name; nothing needs to be registered.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from scripts.command_line import Parser, run_command


def subcommands() -> dict[str, ModuleType]:
    """The evaluations beside this file, by the name of their subcommand."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("eval_*.py"))
    return {n.removeprefix("eval_").replace("_", "-"): importlib.import_module(f"scripts.{n}") for n in names}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("evaluate.py", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in subcommands().items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


if __name__ == "__main__":
    sys.exit(main())
