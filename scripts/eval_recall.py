"""`evaluate.py recall`: does a model find a fact in a long text, with each cache? Exact match by length and depth."""

from __future__ import annotations

import argparse
import functools
import itertools
from pathlib import Path

from kitty_jax.research.tasks import recall
from kitty_jax.research.tasks.comparison import wilson
from scripts.command_line import whole
from scripts.tables import markdown, write_json
from scripts.task_runs import Checkpoint, add_model_arguments, caches_of, say
from scripts.texts import read_text

HELP = "Passkey and needle in a haystack over lengths and depths, exact match, greedy."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--task", choices=recall.TASKS, default="passkey", help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="text to hide the needle in, or a folder of *.txt; needle needs it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], metavar="N", help="in tokens")
    parser.add_argument(
        "--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="X", help="0: start, 1: end"
    )
    parser.add_argument("--trials", type=whole(1), default=4, help="for each length and depth (default: %(default)s)")
    parser.add_argument("--new-tokens", type=whole(1), default=12, help="read for the answer (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="put text and question into the chat template")
    parser.add_argument(
        "--one-prompt",
        action="store_true",
        help="prefill text and question together: the first token of the answer is then computed in full precision",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")


def run(arguments: argparse.Namespace) -> None:
    if arguments.task == "needle" and arguments.file is None:
        raise ValueError("--task needle needs --file, a text to hide it in (scripts/fetch_demo.py --what essays)")
    caches = caches_of(arguments.cache)
    text = None if arguments.file is None else read_text(arguments.file)
    checkpoint = Checkpoint(arguments)
    encode = functools.cache(checkpoint.encode)
    maker = recall.Cases(encode, recall.sentences_of(text), *ends_of_a_message(checkpoint, arguments.chat))
    lengths, depths = sorted(set(arguments.lengths)), sorted(set(arguments.depths))
    cases = [
        maker.make(arguments.task, length, depth, arguments.seed + trial)
        for length, depth, trial in itertools.product(lengths, depths, range(arguments.trials))
    ]
    recall.shape_of(cases, checkpoint.config.max_position, arguments.new_tokens)
    results = {name: {"items": [], "cells": []} for name in caches}
    rows = []
    for (name, cache), length in itertools.product(caches.items(), lengths):
        group = [case for case in cases if case.length == length]
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
        items = []
        for case, text in zip(group, map(checkpoint.decode, answers), strict=True):
            tokens, correct = len(case.context) + len(case.question), recall.matches(text, case.answer)
            row = {"length": length, "tokens": tokens, "depth": case.depth, "wanted": case.answer}
            items.append({**row, "text": text, "correct": correct})
        by_depth = {d: share([item for item in items if item["depth"] == d]) for d in depths}
        result, all_of = results[name], share(items)
        result["items"] += items
        result["cells"] += [{"length": length, "depth": d, **by_depth[d]} for d in depths]
        say(f"{name}, {length} tokens: {all_of['correct']} of {all_of['trials']}")
        shares = [f"{100 * by_depth[d]['accuracy']:.0f}" for d in depths]
        rows.append([name, length, *shares, f"{100 * all_of['accuracy']:.0f} % of {all_of['trials']}"])
    for result in results.values():
        result |= share(result["items"])
        result["interval"] = list(wilson(result["correct"], result["trials"]))
    setup = {n: getattr(arguments, n) for n in ("task", "trials", "new_tokens", "chat", "one_prompt", "seed")}
    write_json(arguments.json, {"setup": setup, "caches": results})
    print(markdown(["cache", "tokens", *(f"depth {d:g}" for d in depths), "all"], rows))


def share(items: list[dict]) -> dict:
    """How many answers there are, and how many are right."""
    right = sum(item["correct"] for item in items)
    return {"trials": len(items), "correct": right, "accuracy": right / len(items)}


def ends_of_a_message(checkpoint: Checkpoint, chat: bool) -> tuple[list[int], list[int]]:
    """(ids before the text, ids between question and answer): of the chat template, or a bos where there is one."""
    tokenizer = checkpoint.tokenizer
    if not chat:
        return list(tokenizer("")["input_ids"]), []
    checkpoint.wants_chat("chat")
    mark = "the text goes here"
    messages = [{"role": "user", "content": mark}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, found, after = whole.partition(mark)
    if not found:
        raise ValueError("the chat template does not give the user's text back; leave out --chat")
    return checkpoint.encode(before), checkpoint.encode(after)
