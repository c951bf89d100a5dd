"""`evaluate.py gsm8k`: accuracy on GSM8K, and agreement with the full-precision run's own answers."""

from __future__ import annotations

import argparse

HELP = "GSM8K with the packed cache: accuracy, and agreement with full precision's own answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from scripts.task_runs import add_item_arguments, add_model_arguments, add_protocol_arguments

    add_model_arguments(parser)
    add_item_arguments(parser, "GSM8K (scripts/fetch_demo.py --what gsm8k)")
    add_protocol_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from kitty_jax.inference.detokenize import encode_prompts
    from kitty_jax.research.tasks import gsm8k
    from kitty_jax.research.tasks.comparison import compare, summarize, table
    from scripts.task_runs import Checkpoint, Item, answer_items, caches_of, digest, protocol_of, write_json

    caches, protocol = caches_of(arguments.cache), protocol_of(arguments)
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
    stops = () if chat else gsm8k.STOPS
    rows = answer_items(arguments, checkpoint, caches, items, protocol, settings, row_of, stops)
    results = {}
    for name in caches:
        results[name] = summarize(rows[name]) | {"no_answer": sum(r["answer"] is None for r in rows[name])}
        if name != "full":
            results[name]["against_full"] = compare(rows["full"], rows[name])
    write_json(arguments.out / "summary.json", results)
    print(table(results))
    return 0
