"""HumanEval: problems from a JSON Lines file, prompts, and the program that a completion makes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kitty_jax.research.tasks.gsm8k import read_records, select

INSTRUCTION = (
    "Complete this Python function. Give the whole function and the imports that it needs in one ```python block.\n\n"
)
# What a model that continues the file writes after the function: the next thing at the left margin.
STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\n#", "\n@", "\n```")

_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_FIELDS = ("task_id", "prompt", "entry_point", "test")


@dataclasses.dataclass(frozen=True)
class Task:
    """A function to write: its beginning, its name, and the text of a ``check(candidate)``."""

    task_id: str
    prompt: str
    entry_point: str
    test: str


def load_tasks(path: Path, offset: int = 0, items: int | None = None) -> list[Task]:
    """Tasks of a file in the format of HumanEval. Arguments and errors as :func:`.gsm8k.load_problems`."""
    records = read_records(path, _FIELDS)
    return select([Task(*(record[f] for f in _FIELDS)) for record in records], path, offset, items)


def chat_prompt(task: Task) -> str:
    """The user's turn, for models that follow instructions."""
    return f"{INSTRUCTION}```python\n{task.prompt.strip()}\n```"


def program_of(task: Task, text: str, chat: bool) -> str:
    """The program to test: the task's prompt and its completion, or the function that a reply gives.

    A reply's program is the last block of code that defines the function; the task's prompt stands before it, for its
    imports and helper functions. A block without the definition, or a reply without a block, continues the prompt.

    Args:
        task: the task.
        text: what the model wrote.
        chat: whether it was asked for a reply.
    """
    if not chat:
        return task.prompt + text
    text = text.rpartition("</think>")[2]
    blocks = _FENCE.findall(text) or [text]
    defines = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(task.entry_point)}\s*\(", re.MULTILINE)
    whole = [block for block in blocks if defines.search(block)]
    if whole:
        return f"{_without_stub(task)}\n\n{whole[-1]}\n"
    return task.prompt + blocks[-1]


def test_program(task: Task, program: str) -> str:
    """The program with the task's test and the call of it."""
    return f"{program}\n\n{task.test}\n\ncheck({task.entry_point})\n"


# pytest would take its name for a test's where a test module imports it.
test_program.__test__ = False


def _without_stub(task: Task) -> str:
    """The prompt up to the line that begins the function to write."""
    match = re.search(rf"^def\s+{re.escape(task.entry_point)}\s*\(", task.prompt, re.MULTILINE)
    return task.prompt[: match.start()] if match else task.prompt
