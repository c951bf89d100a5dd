"""`evaluate.py humaneval`: pass@1 on HumanEval. Programs that the model wrote run only when asked for."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from kitty_jax.research.tasks import humaneval, programs
from kitty_jax.research.tasks.results import open_results
from scripts.task_runs import (
    ItemTask,
    Progress,
    add_item_arguments,
    answer_items,
    digest,
    file_name,
    say,
    write_summary,
)

HELP = "HumanEval with the packed cache: completions, and pass@1 where --run-programs lets the programs run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_item_arguments(parser, "HumanEval (scripts/fetch_demo.py --what humaneval)")
    group = parser.add_argument_group("programs")
    group.add_argument(
        "--run-programs",
        action="store_true",
        help="run the programs that the model wrote, on this machine, in processes with limits of time and memory; "
        "without it they are only written down. Limits are no wall: use a container for models you do not trust",
    )
    group.add_argument("--seconds", type=float, default=10.0, help="of a program (default: %(default)s)")
    group.add_argument("--memory-mb", type=int, default=2048, help="of a program (default: %(default)s)")


TASK = ItemTask(
    name="humaneval",
    load=humaneval.load_tasks,
    key=lambda task: task.task_id,
    prompt=lambda task, chat: humaneval.chat_prompt(task) if chat else task.prompt,
    prompt_settings=lambda chat: f"chat {digest(humaneval.INSTRUCTION.encode())}" if chat else "text",
    row=lambda task, text, chat: {"program": humaneval.program_of(task, text, chat)},
    stops=humaneval.STOPS,
)


def run(arguments: argparse.Namespace) -> None:
    limits = programs.Limits(arguments.seconds, arguments.memory_mb)
    rows = answer_items(arguments, TASK)
    if not arguments.run_programs:
        say(f"programs are in {arguments.out}; the same command with --run-programs runs them")
        return
    tasks = {task.task_id: task for task in humaneval.load_tasks(arguments.file)}
    for name, answers in rows.items():
        outcomes = arguments.out / f"{file_name(name)}.programs.jsonl"
        rows[name] = run_programs(outcomes, Progress(f"{name}, programs"), answers, tasks, limits)
    write_summary(arguments.out, rows)


def run_programs(path: Path, progress: Progress, rows: list[dict], tasks: dict, limits: programs.Limits) -> list[dict]:
    """The rows with "correct": whether the row's program passes its task's test. Outcomes are kept in a file."""
    out = []
    with open_results(path, {"task": "humaneval programs", **dataclasses.asdict(limits)}) as results:
        for number, row in enumerate(rows, 1):
            source = humaneval.test_program(tasks[row["item"]], row["program"])
            program = digest(source.encode())
            if row["key"] not in results.rows:
                outcome = dataclasses.asdict(programs.run_program(source, limits))
                results.append(row["key"], {"program": program, **outcome})
            elif results.rows[row["key"]]["program"] != program:
                raise ValueError(f"{path} is of other programs than {row['key']}'s; delete it")
            out.append({**row, "correct": results.rows[row["key"]]["passed"]})
            progress(number, len(rows))
    return out
