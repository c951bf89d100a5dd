"""`evaluate.py gsm8k`: accuracy on GSM8K, and agreement with the full-precision run's own answers."""

from __future__ import annotations

import argparse

from kitty_jax.inference.detokenize import encode_prompts
from kitty_jax.research.tasks import gsm8k
from scripts.task_runs import (
    Checkpoint,
    Item,
    add_item_arguments,
    answer_items,
    caches_of,
    digest,
    protocol_of,
    write_summary,
)

HELP = "GSM8K with the packed cache: accuracy, and agreement with full precision's own answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_item_arguments(parser, "GSM8K (scripts/fetch_demo.py --what gsm8k)")


def run(arguments: argparse.Namespace) -> None:
    caches_of(arguments.cache), protocol_of(arguments)  # refused before anything is read
    problems = {str(p.number): p for p in gsm8k.load_problems(arguments.file, arguments.offset, arguments.items)}
    checkpoint = Checkpoint(arguments)
    chat = checkpoint.wants_chat(arguments.prompt)
    prompt = gsm8k.chat_prompt if chat else gsm8k.few_shot_prompt
    ids = encode_prompts(checkpoint.tokenizer, [prompt(p.question) for p in problems.values()], chat=chat)
    items = [Item(name, p.number, row) for (name, p), row in zip(problems.items(), ids, strict=True)]

    def row_of(item, got) -> dict:
        answer, wanted = gsm8k.extract_answer(got.text), problems[item.name].answer
        return {"answer": answer.value, "from": answer.source, "wanted": wanted, "correct": answer.value == wanted}

    settings = {
        "task": "gsm8k",
        "data": digest(arguments.file.read_bytes()),
        "prompt": f"{'chat' if chat else 'text'} {digest(prompt('').encode())}",
    }
    rows = answer_items(arguments, checkpoint, items, settings, row_of, () if chat else gsm8k.STOPS)
    write_summary(arguments.out, rows)
