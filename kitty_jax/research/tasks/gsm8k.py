"""GSM8K: problems from a JSON Lines file, prompts that ask for a chain of thought, and the answers in what comes."""

from __future__ import annotations

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path

MARK = "####"
INSTRUCTION = (
    "Solve the following problem. Reason step by step, and end with a line that holds #### and then the final number "
    "alone.\n\n"
)
STOPS = ("\nQuestion:",)  # what a model that continues the list of examples writes next

# Written for this project: none is from the data set.
EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "A bakery fills 6 trays with 8 rolls each and sells 29 of the rolls. How many rolls are left?",
        "The bakery has 6 * 8 = 48 rolls. After selling 29 it has 48 - 29 = 19.\n#### 19",
    ),
    (
        "Nadia reads 14 pages on each of 5 days and 20 pages on the sixth. The book has 120 pages. How many are left?",
        "In 5 days she reads 14 * 5 = 70 pages, and with the sixth day 70 + 20 = 90. There are 120 - 90 = 30 left.\n"
        "#### 30",
    ),
    (
        "A ticket costs $12, and a child's ticket half as much. What do 2 adults and 3 children pay?",
        "A child's ticket costs 12 / 2 = 6 dollars. The adults pay 2 * 12 = 24 dollars, the children 3 * 6 = 18. "
        "Together that is 24 + 18 = 42 dollars.\n#### 42",
    ),
    (
        "A pump empties a pool of 900 liters in 45 minutes. How long does it take for 300 liters?",
        "It pumps 900 / 45 = 20 liters a minute. 300 liters take 300 / 20 = 15 minutes.\n#### 15",
    ),
    (
        "Omar has 3 times as many stamps as Lea. Lea has 17 more than Kim, who has 8. How many stamps has Omar?",
        "Lea has 8 + 17 = 25 stamps. Omar has 3 * 25 = 75.\n#### 75",
    ),
    (
        "A coat of $80 is reduced by 25 percent. What does it cost after a further $5 is taken off?",
        "25 percent of 80 dollars are 20 dollars, so it costs 80 - 20 = 60 dollars. With 5 dollars off it is "
        "60 - 5 = 55 dollars.\n#### 55",
    ),
    (
        "A train has 7 cars. 4 of them seat 60 people, the others 45. How many people can sit in the train?",
        "The 4 cars seat 4 * 60 = 240 people. The other 7 - 4 = 3 cars seat 3 * 45 = 135. Together 240 + 135 = 375.\n"
        "#### 375",
    ),
    (
        "Ivo earns $15 an hour and works 6 hours on each of 4 days. He spends a third of it. How much is left?",
        "He works 6 * 4 = 24 hours and earns 24 * 15 = 360 dollars. A third of it is 360 / 3 = 120 dollars, so "
        "360 - 120 = 240 dollars are left.\n#### 240",
    ),
)

_NUMBER = re.compile(r"-?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem, its number in the file, and the right answer."""

    number: int
    question: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The number that a text gives as its answer, in plain digits, and where it stood: "mark", "last number" or
    "none"."""

    value: str | None
    source: str


def load_problems(path: Path, offset: int = 0, items: int | None = None) -> list[Problem]:
    """Problems from a JSON Lines file with "question" and "answer", the latter ending in ``#### N``.

    Args:
        path: the file.
        offset: problems to pass over.
        items: how many after those; all by default.

    Raises:
        ValueError: a line is not of that form, or there are not that many problems.
    """
    problems = []
    for number, record in enumerate(read_records(path, ("question", "answer"))):
        right = extract_answer(record["answer"])
        if right.source != "mark":
            got = record["answer"]
            raise ValueError(f"{path}, record {number + 1}: wanted an answer that ends in '{MARK} N', got {got!r:.60}")
        problems.append(Problem(number, record["question"], right.value))
    return select(problems, path, offset, items)


def read_records(path: Path, fields: tuple[str, ...]) -> list[dict]:
    """The objects of a JSON Lines file, each with the text fields named."""
    if not path.is_file():
        raise ValueError(f"no file {path}; scripts/fetch_demo.py fetches the data of gsm8k and humaneval")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        missing = [f for f in fields if not isinstance(record, dict) or not isinstance(record.get(f), str)]
        if missing:
            raise ValueError(f"{path}, line {number}: wanted text fields {', '.join(fields)}; missing {missing}")
        records.append(record)
    return records


def select(problems: list, path: Path, offset: int, items: int | None) -> list:
    """``items`` of the problems after the first ``offset``."""
    if offset < 0 or (items is not None and items < 1):
        raise ValueError(f"wanted offset 0 or more and items 1 or more, got offset {offset}, items {items}")
    chosen = problems[offset : None if items is None else offset + items]
    if not chosen or (items is not None and len(chosen) < items):
        wanted = "problems" if items is None else f"{items} problems"
        raise ValueError(f"{path} has {len(problems)} problems; wanted {wanted} from number {offset} on")
    return chosen


def few_shot_prompt(question: str) -> str:
    """The eight examples and the question, for models that continue text."""
    shots = [f"Question: {q}\nAnswer: {a}" for q, a in EXAMPLES]
    return "\n\n".join([*shots, f"Question: {question}\nAnswer:"])


def chat_prompt(question: str) -> str:
    """The user's turn, without examples, for models that follow instructions."""
    return INSTRUCTION + question


def extract_answer(text: str) -> Answer:
    """The number after the last ``####``, else the last number of the text.

    What stands before ``</think>`` is not looked at. ``$``, thousands separators and trailing zeros do not count:
    "1,250.00" is "1250".
    """
    text = text.rpartition("</think>")[2]
    before, mark, after = text.rpartition(MARK)
    if mark and (match := _NUMBER.search(after.partition("\n")[0])):
        return Answer(_plain_number(match.group()), "mark")
    numbers = _NUMBER.findall(before + " " + after)
    return Answer(_plain_number(numbers[-1]), "last number") if numbers else Answer(None, "none")


def _plain_number(text: str) -> str:
    # A model may write hundreds of digits, more than Decimal's operations keep: only its reading and writing are used.
    plain = format(Decimal(re.sub(r"[$,\s]", "", text)), "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
