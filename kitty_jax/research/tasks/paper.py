"""The paper's tables (arXiv 2511.18643): which methods and tasks they hold, what the paper reports, and ours beside it.

The paper's own figures are those that this project has a source for: the mean of four tasks (its Table 3) and AIME (its
Table 4), as quoted by the project's design notes and, independently, by a public summary of the paper's version 1. Its
figures by task are not at hand, and neither is the exact layout of Tables 1 and 2: those here are the two ablations of
its section 3, bits of keys against bits of values, and channels by magnitude against channels at random.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitty_jax.research.tasks.intervals import accuracy_interval
from kitty_jax.research.tasks.results import read_results

SOURCE = "arXiv 2511.18643v1, sampled at temperature 0.6 and repeated 3 to 10 times; +- is not given here"


@dataclasses.dataclass(frozen=True)
class Task:
    """A column. ``command`` is the subcommand of evaluate.py: its own task, or "lm-eval" with the harness's name.

    ``metric`` and ``filter`` say which of the harness's numbers counts.
    """

    title: str
    command: str
    name: str
    metric: str = "exact_match"
    filter: str = "none"


TASKS: dict[str, Task] = {
    "gsm8k": Task("GSM8K", "gsm8k", "gsm8k"),
    "math": Task("MATH-Algebra", "lm-eval", "minerva_math_algebra", "math_verify"),
    "humaneval": Task("HumanEval", "humaneval", "humaneval"),
    "gpqa": Task("GPQA-Diamond", "lm-eval", "gpqa_diamond_cot_n_shot", filter="flexible-extract"),
    "aime24": Task("AIME24", "lm-eval", "aime24"),
    "aime25": Task("AIME25", "lm-eval", "aime25"),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows (caches, as evaluate.py names them) and columns (keys of TASKS)."""

    title: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]


_FOUR = ("gsm8k", "math", "humaneval", "gpqa")
_MAIN = ("full", "kivi2", "kivi2-sink", "kitty", "kitty-pro")
TABLES: dict[int, Table] = {
    1: Table(
        "Bits of keys and of values", ("full", "kivi2", "kivi2-sink", "k2v4", "k4v2", "kivi4:sink=32", "kivi4"), _FOUR
    ),
    2: Table(
        "How many channels are boosted, and how they are chosen",
        (
            "full",
            "kivi2-sink",
            *(f"kitty:boost={b},selection={s}" for b in (0.125, 0.25, 0.5) for s in ("random", "magnitude")),
            "k4v2",
        ),
        ("gsm8k", "math"),
    ),
    3: Table("Four tasks", _MAIN, _FOUR),
    4: Table("AIME, up to 32,768 new tokens", _MAIN, ("aime24", "aime25")),
}

# Model -> method -> column -> per cent; "mean" is over the four tasks of Table 3.
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "qwen3-8b": {
        "full": {"mean": 77.15, "aime24": 71.67, "aime25": 66.00},
        "kivi2": {"mean": 61.39, "aime24": 57.00, "aime25": 52.33},
        "kivi2-sink": {"mean": 69.80, "aime24": 67.67, "aime25": 57.67},
        "kitty": {"mean": 74.97, "aime24": 70.67, "aime25": 59.67},
        "kitty-pro": {"mean": 76.18},
    },
    "llama3.1-8b": {"full": {"mean": 53.70}, "kitty": {"mean": 51.84}, "kitty-pro": {"mean": 52.59}},
    "llama3.3-70b": {
        "full": {"mean": 73.89},
        "kivi2-sink": {"mean": 73.56},
        "kitty": {"mean": 73.53},
        "kitty-pro": {"mean": 73.86},
    },
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """An accuracy, its 95 % interval, items, and answers (items times repeats)."""

    accuracy: float
    interval: tuple[float, float]
    items: int
    answers: int


def cell_of(by_item: Mapping[Any, Sequence[float]]) -> Cell:
    """From the outcomes (0 or 1) of each item's answers."""
    outcomes = [[bool(x) for x in answers] for answers in by_item.values()]
    answers = sum(map(len, outcomes))
    accuracy = sum(map(sum, outcomes)) / answers
    return Cell(accuracy, accuracy_interval(outcomes), len(outcomes), answers)


def cell_of_rows(rows: Sequence[Mapping[str, Any]]) -> Cell:
    """From the rows of a results file of evaluate.py, with "item" and "correct"."""
    by_item: dict[Any, list[float]] = {}
    for row in rows:
        by_item.setdefault(row["item"], []).append(row["correct"])
    return cell_of(by_item)


def cell_of_samples(task: Task, repeats: Sequence[Mapping[str, Any]]) -> Cell:
    """From the harness's samples of one or more passes over a task: the files of `evaluate.py lm-eval`.

    Raises:
        ValueError: the samples do not hold the task's metric.
    """
    by_item: dict[Any, list[float]] = {}
    filters = set()
    for passed in repeats:
        for sample in passed["samples"].get(task.name, []):
            filters.add(sample.get("filter", "none"))
            if task.metric in sample and sample.get("filter", "none") == task.filter:
                by_item.setdefault(sample["doc_id"], []).append(float(sample[task.metric]))
    if not by_item:
        raise ValueError(
            f"no samples of {task.name} with {task.metric},{task.filter}; filters there: {sorted(filters)}"
        )
    return cell_of(by_item)


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """The mean over tasks, whose items are independent: the distances to the intervals' ends add up in squares."""
    mean = sum(c.accuracy for c in cells) / len(cells)
    below = math.hypot(*(c.accuracy - c.interval[0] for c in cells)) / len(cells)
    above = math.hypot(*(c.interval[1] - c.accuracy for c in cells)) / len(cells)
    return Cell(mean, (mean - below, mean + above), sum(c.items for c in cells), sum(c.answers for c in cells))


def markdown(table: Table, cells: Mapping[tuple[str, str], Cell | None], paper: str | None = None) -> str:
    """The table: per cent with 95 % intervals; the paper's in brackets where it has one; n the answers of a task."""
    heads = [TASKS[t].title for t in table.tasks]
    lines = ["| method | " + " | ".join([*heads, "mean"]) + " |", "|---" * (len(heads) + 2) + "|"]
    for method in table.methods:
        known = PAPER.get(paper or "", {}).get(method, {})
        row = [cells.get((method, task)) for task in table.tasks]
        texts = [_text(cell, known.get(task)) for cell, task in zip(row, table.tasks, strict=True)]
        there = [cell for cell in row if cell is not None]
        whole = mean_cell(there) if len(there) == len(row) else None
        of_paper = known.get("mean") if table.tasks == _FOUR else None
        if table.tasks == ("aime24", "aime25") and {*table.tasks} <= known.keys():
            of_paper = sum(known[t] for t in table.tasks) / 2
        lines.append(f"| {method} | " + " | ".join([*texts, _text(whole, of_paper)]) + " |")
    if paper:
        lines += ["", f"In brackets: the paper's for {paper} ({SOURCE})."]
    return "\n".join(lines)


def _text(cell: Cell | None, paper: float | None) -> str:
    ours = "-"
    if cell is not None:
        low, high = (100 * x for x in cell.interval)
        ours = f"{100 * cell.accuracy:.1f} ({low:.1f} to {high:.1f}), n = {cell.answers}"
    return ours if paper is None else f"{ours} [{paper:.2f}]"


def read_cell(out: Path, task: Task, file: str) -> Cell | None:
    """What the results folder of paper_tables.py holds of a task and a method; None where there is nothing."""
    if task.command != "lm-eval":
        path = out / task.name / f"{file}.jsonl"
        if not path.is_file():
            return None
        rows = read_results(path)[1]
        programs = path.with_name(f"{file}.programs.jsonl")
        if task.command == "humaneval":
            if not programs.is_file():
                return None  # completions that were never run have no accuracy
            passed = {row["key"]: row["passed"] for row in read_results(programs)[1]}
            rows = [row | {"correct": passed[row["key"]]} for row in rows if row["key"] in passed]
        return cell_of_rows(rows) if rows else None
    passes = [json.loads(p.read_text()) for p in sorted((out / "lm_eval" / task.name).glob(f"{file}.[0-9]*.json"))]
    return cell_of_samples(task, passes) if passes else None
