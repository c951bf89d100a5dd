"""`evaluate.py gsm8k`: accuracy on GSM8K, and agreement with the full-precision run's own answers."""

from __future__ import annotations

import argparse

from kitty_jax.research.tasks import gsm8k
from scripts.task_runs import ItemTask, add_item_arguments, answer_items, digest, write_summary

HELP = "GSM8K with the packed cache: accuracy, and agreement with full precision's own answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_item_arguments(parser, "GSM8K (scripts/fetch_demo.py --what gsm8k)")


def prompt_of(question: str, chat: bool) -> str:
    return gsm8k.chat_prompt(question) if chat else gsm8k.few_shot_prompt(question)


def row_of(problem: gsm8k.Problem, text: str, chat: bool) -> dict:
    answer, wanted = gsm8k.extract_answer(text), problem.answer
    return {"answer": answer.value, "from": answer.source, "wanted": wanted, "correct": answer.value == wanted}


TASK = ItemTask(
    name="gsm8k",
    load=gsm8k.load_problems,
    key=lambda problem: str(problem.number),
    prompt=lambda problem, chat: prompt_of(problem.question, chat),
    prompt_settings=lambda chat: f"{'chat' if chat else 'text'} {digest(prompt_of('', chat).encode())}",
    row=row_of,
    stops=gsm8k.STOPS,
)


def run(arguments: argparse.Namespace) -> None:
    write_summary(arguments.out, answer_items(arguments, TASK))
