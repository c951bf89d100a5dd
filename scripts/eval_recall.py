"""`evaluate.py recall`: does a model find a fact in a long text, with each cache? Exact match by length and depth."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Passkey and needle in a haystack over lengths and depths, exact match, greedy."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kitty_jax.research.tasks.recall import TASKS
    from scripts.task_runs import add_model_arguments

    add_model_arguments(parser)
    parser.add_argument("--task", choices=TASKS, default="passkey", help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="text to hide the needle in, or a folder of *.txt; needle needs it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], metavar="N", help="in tokens")
    parser.add_argument(
        "--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="X", help="0: start, 1: end"
    )
    parser.add_argument("--trials", type=int, default=4, help="for each length and depth (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=12, help="read for the answer (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="put text and question into the chat template")
    parser.add_argument(
        "--one-prompt",
        action="store_true",
        help="prefill text and question together: the first token of the answer is then computed in full precision",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")


def run(arguments: argparse.Namespace) -> int:
    from kitty_jax.inference.prompts import check_whole
    from kitty_jax.research.tasks import recall
    from scripts.task_runs import Checkpoint, caches_of, say, write_json
    from scripts.texts import read_text

    for name in ("trials", "new_tokens", "batch"):
        check_whole(f"--{name.replace('_', '-')}", getattr(arguments, name), 1)
    if arguments.task == "needle" and arguments.file is None:
        raise ValueError("--task needle needs --file, a text to hide it in (scripts/fetch_demo.py --what essays)")
    caches = caches_of(arguments.cache)
    text = None if arguments.file is None else read_text(arguments.file)
    checkpoint = Checkpoint(arguments)
    start, turn = ends_of_a_turn(checkpoint, arguments.chat)
    maker = recall.Cases(checkpoint_encode(checkpoint), recall.sentences_of(text), start, turn)
    cases = [
        maker.make(arguments.task, length, depth, arguments.seed + trial)
        for length in sorted(set(arguments.lengths))
        for depth in sorted(set(arguments.depths))
        for trial in range(arguments.trials)
    ]
    recall.shape_of(cases, checkpoint.config.max_position, arguments.new_tokens)
    results = {}
    for name, cache in caches.items():
        items = []
        for length in sorted({c.length for c in cases}):
            group = [c for c in cases if c.length == length]
            answers = recall.ask(
                checkpoint.model,
                group,
                cache,
                new_tokens=arguments.new_tokens,
                batch=min(arguments.batch, len(group)),
                shape=recall.shape_of(group),
                one_prompt=arguments.one_prompt,
                implementation=arguments.implementation,
            )
            for case, ids in zip(group, answers, strict=True):
                text = checkpoint.decode(ids)
                items.append(
                    {
                        "length": length,
                        "tokens": len(case.context) + len(case.question),
                        "depth": case.depth,
                        "wanted": case.answer,
                        "text": text,
                        "correct": recall.matches(text, case.answer),
                    }
                )
            right = [i["correct"] for i in items if i["length"] == length]
            say(f"{name}, {length} tokens: {sum(right)} of {len(right)}")
        results[name] = figures(items)
    setup = {n: getattr(arguments, n) for n in ("task", "trials", "new_tokens", "chat", "one_prompt", "seed")}
    write_json(arguments.json, {"setup": setup, "caches": results})
    print(table(results))
    return 0


def checkpoint_encode(checkpoint):
    def encode(text: str) -> list[int]:
        return list(checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def ends_of_a_turn(checkpoint, chat: bool) -> tuple[list[int], list[int]]:
    """(ids before the text, ids between question and answer): of the chat template, or a bos where there is one."""
    tokenizer = checkpoint.tokenizer
    if not chat:
        return list(tokenizer("")["input_ids"]), []
    checkpoint.wants_chat("chat")
    mark = "the text goes here"
    turn = [{"role": "user", "content": mark}]
    before, found, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition(
        mark
    )
    if not found:
        raise ValueError("the chat template does not give the user's text back; leave out --chat")
    encode = checkpoint_encode(checkpoint)
    return encode(before), encode(after)


def figures(items: list[dict]) -> dict:
    """Accuracy, its interval, cells by length and depth, and the items."""
    from kitty_jax.research.tasks.intervals import wilson

    def cell(rows: list[dict]) -> dict:
        right = sum(r["correct"] for r in rows)
        return {"trials": len(rows), "correct": right, "accuracy": right / len(rows)}

    places = sorted({(i["length"], i["depth"]) for i in items})
    cells = [
        {"length": n, "depth": d, **cell([i for i in items if (i["length"], i["depth"]) == (n, d)])} for n, d in places
    ]
    whole = cell(items)
    interval = list(wilson(whole["correct"], whole["trials"]))
    return {**whole, "interval": interval, "cells": cells, "items": items}


def table(results: dict[str, dict]) -> str:
    """Accuracy by cache, length and depth as a Markdown table."""
    depths = sorted({cell["depth"] for row in results.values() for cell in row["cells"]})
    lines = ["| cache | tokens | " + " | ".join(f"depth {d:g}" for d in depths) + " | all |"]
    lines.append("|---" * (len(depths) + 3) + "|")
    for name, row in results.items():
        for length in sorted({cell["length"] for cell in row["cells"]}):
            cells = [c for c in row["cells"] if c["length"] == length]
            right, count = sum(c["correct"] for c in cells), sum(c["trials"] for c in cells)
            shares = " | ".join(f"{100 * c['accuracy']:.0f}" for c in cells)
            lines.append(f"| {name} | {length} | {shares} | {100 * right / count:.0f} % of {count} |")
    return "\n".join(lines)
