"""The paper's tables for a model of your own: one command runs what is missing, and prints the table.

    python scripts/paper_tables.py --table 3 --model PATH --out results/qwen3-8b --paper qwen3-8b
    python scripts/paper_tables.py --table 3 --model PATH --out results/qwen3-8b --dry-run    # the commands alone
    python scripts/paper_tables.py --table 3 --out results/qwen3-8b --report                  # what is there alone

GSM8K and HumanEval run through this project's evaluations on local files, the others through lm_eval, which fetches
their data (docs/tasks.md). A run that was cut short is taken up where it stopped. Options that follow `--` go to every
command: `-- --temperature 0 --max-new-tokens 512`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.research.tasks import paper
from kitty_jax.research.tasks.paper import PAPER, TABLES, TASKS, Cell, Table
from scripts.command_line import Parser, run_command
from scripts.tables import markdown, percent, write_json
from scripts.task_runs import file_name

ROOT = Path(__file__).resolve().parents[1]
FILES = {"gsm8k": ".cache/gsm8k/test.jsonl", "humaneval": ".cache/humaneval/HumanEval.jsonl"}


def parser() -> Parser:
    out = Parser("paper_tables.py", __doc__)
    out.add_argument("--table", type=int, choices=sorted(TABLES), required=True)
    out.add_argument("--model", type=Path, help="a .gguf file or a Hugging Face model directory")
    out.add_argument("--out", type=Path, required=True, help="folder for the results of all tables of this model")
    out.add_argument("--method", action="append", metavar="CACHE", help="in place of the table's own, several times")
    out.add_argument("--task", action="append", choices=sorted(TASKS), help="in place of the table's own")
    out.add_argument("--items", type=int, metavar="N", help="first N items of each task (default: all)")
    out.add_argument("--batch", type=int, default=16, help="sequences at a time (default: %(default)s)")
    for task, path in FILES.items():
        out.add_argument(f"--{task}-file", type=Path, default=ROOT / path, help=f"(default: {path})")
    out.add_argument("--run-programs", action="store_true", help="run HumanEval's programs on this machine")
    out.add_argument("--paper", choices=sorted(PAPER), help="put the paper's figures for this model beside ours")
    how = out.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    how.add_argument("--report", action="store_true", help="print the table of what is there and run nothing")
    out.add_argument("more", nargs="*", metavar="-- OPTION", help="options for every command")
    return out


def table_of(options: argparse.Namespace) -> Table:
    """The table with the methods and tasks that the options ask for; `full` is always among the methods.

    Raises:
        ValueError: an unknown cache.
    """
    table = TABLES[options.table]
    methods = tuple(dict.fromkeys(("full", *(options.method or table.methods))))
    for method in methods:
        cache_from_spec(method)
    return dataclasses.replace(table, methods=methods, tasks=tuple(options.task or table.tasks))


def commands(options: argparse.Namespace, table: Table) -> dict[str, list[str]]:
    """The command of evaluate.py for each task of a table."""
    caches = [word for method in table.methods if method != "full" for word in ("--cache", method)]
    out = {}
    for key in table.tasks:
        task = TASKS[key]
        words = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), task.command, "--model", str(options.model)]
        of_harness = task.command == "lm-eval"
        if of_harness:
            words += ["--tasks", task.name, "--out", str(options.out / "lm_eval")]
        else:
            words += ["--file", str(getattr(options, f"{key}_file")), "--out", str(options.out / task.name)]
        words += ["--run-programs"] if key == "humaneval" and options.run_programs else []
        words += [] if options.items is None else ["--limit" if of_harness else "--items", str(options.items)]
        out[key] = [*words, "--batch", str(options.batch), *caches, *options.more]
    return out


def text_of(table: Table, cells: dict[tuple[str, str], Cell | None], model: str | None) -> str:
    """The table: per cent with 95 % intervals; the paper's in brackets where it has one; n the answers of a task."""

    def text(cell: Cell | None, of_paper: float | None) -> str:
        ours = "-"
        if cell is not None:
            ours = f"{100 * cell.accuracy:.1f} ({percent(cell.interval)}), n = {cell.answers}"
        return ours if of_paper is None else f"{ours} [{of_paper:.2f}]"

    rows = []
    for method in table.methods:
        known = PAPER.get(model or "", {}).get(method, {})
        row = [cells[method, task] for task in table.tasks]
        mean = None if None in row else paper.mean_cell(row)
        texts = [text(cell, known.get(task)) for cell, task in zip(row, table.tasks, strict=True)]
        rows.append([method, *texts, text(mean, paper.paper_mean(model or "", method, table.tasks))])
    out = markdown(["method", *(TASKS[t].title for t in table.tasks), "mean"], rows)
    return out + (f"\n\nIn brackets: the paper's for {model} ({paper.SOURCE})." if model else "")


def run(options: argparse.Namespace, execute: Callable[[Sequence[str]], int]) -> int:
    """-> exit status: 1 where a task's command failed; the table has what there is all the same."""
    table = table_of(options)
    failed = []
    if not options.report:
        if options.model is None:
            raise ValueError("--model is needed, but for --report")
        for key, words in commands(options, table).items():
            print(shlex.join(words), file=sys.stdout if options.dry_run else sys.stderr, flush=True)
            if not options.dry_run and execute(words):
                failed.append(TASKS[key].title)
    if options.dry_run:
        return 0
    cells = {(m, t): paper.read_cell(options.out, TASKS[t], file_name(m)) for m in table.methods for t in table.tasks}
    if all(cell is None for cell in cells.values()):
        raise ValueError(f"{options.out} has no results of table {options.table}")
    plain = [{"method": m, "task": t, **dataclasses.asdict(cell)} for (m, t), cell in cells.items() if cell is not None]
    write_json(options.out / f"table{options.table}.json", {"title": table.title, "cells": plain})
    print(f"Table {options.table}: {table.title}\n\n{text_of(table, cells, options.paper)}")
    if failed:
        print(f"paper_tables.py: failed, see above: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(argv: list[str] | None = None, execute: Callable[[Sequence[str]], int] = subprocess.call) -> int:
    return run_command(parser(), lambda options: run(options, execute), argv)


if __name__ == "__main__":
    sys.exit(main())
