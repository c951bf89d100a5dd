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
from collections.abc import Collection, Sequence
from pathlib import Path

from kitty_jax.research.tasks.comparison import accuracy_interval, by_item
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


def cell_of(outcomes: Collection[Sequence[float]]) -> Cell:
    """From the outcomes (0 or 1) of each item's answers."""
    outcomes = [[bool(x) for x in answers] for answers in outcomes]
    answers = sum(map(len, outcomes))
    return Cell(sum(map(sum, outcomes)) / answers, accuracy_interval(outcomes), len(outcomes), answers)


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """The mean over tasks, whose items are independent: the distances to the intervals' ends add up in squares."""
    mean = sum(c.accuracy for c in cells) / len(cells)
    below = math.hypot(*(c.accuracy - c.interval[0] for c in cells)) / len(cells)
    above = math.hypot(*(c.interval[1] - c.accuracy for c in cells)) / len(cells)
    return Cell(mean, (mean - below, mean + above), sum(c.items for c in cells), sum(c.answers for c in cells))


def paper_mean(model: str, method: str, tasks: tuple[str, ...]) -> float | None:
    """The paper's mean over a table's tasks, where it is known."""
    known = PAPER.get(model, {}).get(method, {})
    if tasks == _FOUR:
        return known.get("mean")
    return sum(known[t] for t in tasks) / len(tasks) if {*tasks} <= known.keys() else None


def read_cell(out: Path, task: Task, file: str) -> Cell | None:
    """What the results folder of paper_tables.py holds of a task and a method; None where there is nothing.

    Raises:
        ValueError: the harness's samples do not hold the task's metric.
    """
    rows = _harness_rows(out, task, file) if task.command == "lm-eval" else _own_rows(out, task, file)
    return cell_of(by_item(rows).values()) if rows else None


def _own_rows(out: Path, task: Task, file: str) -> list[dict]:
    path = out / task.name / f"{file}.jsonl"
    rows = read_results(path)[1] if path.is_file() else []
    if task.command != "humaneval":
        return rows
    programs = path.with_name(f"{file}.programs.jsonl")  # completions that were never run have no accuracy
    passed = {row["key"]: row["passed"] for row in read_results(programs)[1]} if programs.is_file() else {}
    return [row | {"correct": passed[row["key"]]} for row in rows if row["key"] in passed]


def _harness_rows(out: Path, task: Task, file: str) -> list[dict]:
    rows, filters = [], set()
    for path in sorted((out / "lm_eval" / task.name).glob(f"{file}.[0-9]*.json")):
        for sample in json.loads(path.read_text())["samples"].get(task.name, []):
            name = sample.get("filter", "none")
            filters.add(name)
            if task.metric in sample and name == task.filter:
                rows.append({"item": sample["doc_id"], "correct": float(sample[task.metric])})
    if filters and not rows:
        raise ValueError(
            f"no samples of {task.name} with {task.metric},{task.filter}; filters there: {sorted(filters)}"
        )
    return rows
