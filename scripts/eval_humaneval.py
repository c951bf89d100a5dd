"""`evaluate.py humaneval`: pass@1 on HumanEval. Programs that the model wrote run only when asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "HumanEval with the packed cache: completions, and pass@1 where --run-programs lets the programs run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from scripts.task_runs import add_item_arguments, add_model_arguments, add_protocol_arguments

    add_model_arguments(parser)
    add_item_arguments(parser, "HumanEval (scripts/fetch_demo.py --what humaneval)")
    add_protocol_arguments(parser)
    group = parser.add_argument_group("programs")
    group.add_argument(
        "--run-programs",
        action="store_true",
        help="run the programs that the model wrote, on this machine, in processes with limits of time and memory; "
        "without it they are only written down. Limits are no wall: use a container for models you do not trust",
    )
    group.add_argument("--seconds", type=float, default=10.0, help="of a program (default: %(default)s)")
    group.add_argument("--memory-mb", type=int, default=2048, help="of a program (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from kitty_jax.inference.detokenize import encode_prompts
    from kitty_jax.research.tasks import humaneval
    from kitty_jax.research.tasks.comparison import compare, summarize, table
    from kitty_jax.research.tasks.programs import Limits
    from scripts.task_runs import Checkpoint, Item, answer_items, caches_of, digest, protocol_of, say, write_json

    caches, protocol = caches_of(arguments.cache), protocol_of(arguments)
    limits = Limits(arguments.seconds, arguments.memory_mb)
    tasks = {t.task_id: t for t in humaneval.load_tasks(arguments.file, arguments.offset, arguments.items)}
    checkpoint = Checkpoint(arguments)
    chat = checkpoint.wants_chat(arguments.prompt)
    texts = [humaneval.chat_prompt(t) if chat else t.prompt for t in tasks.values()]
    ids = encode_prompts(checkpoint.tokenizer, texts, chat=chat)
    items = [Item(name, arguments.offset + i, row) for i, (name, row) in enumerate(zip(tasks, ids, strict=True))]

    def row_of(item, got) -> dict:
        return {"program": humaneval.program_of(tasks[item.name], got.text, chat)}

    settings = {
        "task": "humaneval",
        "data": digest(arguments.file.read_bytes()),
        "prompt": f"chat {digest(humaneval.INSTRUCTION.encode())}" if chat else "text",
    }
    stops = () if chat else humaneval.STOPS
    rows = answer_items(arguments, checkpoint, caches, items, protocol, settings, row_of, stops)
    if not arguments.run_programs:
        say(f"programs are in {arguments.out}; the same command with --run-programs runs them")
        return 0
    results = {}
    for name in caches:
        passed = run_programs(arguments.out, name, rows[name], tasks, limits)
        rows[name] = [{**row, "correct": passed[row["key"]]} for row in rows[name]]
        results[name] = summarize(rows[name])
        if name != "full":
            results[name]["against_full"] = compare(rows["full"], rows[name])
    write_json(arguments.out / "summary.json", results)
    print(table(results))
    return 0


def run_programs(out: Path, cache: str, rows: list[dict], tasks: dict, limits) -> dict[str, bool]:
    """Whether each row's program passes its task's test, by key; outcomes are kept in a file beside the answers."""
    import dataclasses

    from kitty_jax.research.tasks import humaneval
    from kitty_jax.research.tasks.programs import run_program
    from kitty_jax.research.tasks.results import open_results
    from scripts.task_runs import Progress, digest, file_name

    progress = Progress(f"{cache}, programs")
    settings = {"task": "humaneval programs", **dataclasses.asdict(limits)}
    with open_results(out / f"{file_name(cache)}.programs.jsonl", settings) as results:
        for number, row in enumerate(rows, 1):
            source = humaneval.test_program(tasks[row["item"]], row["program"])
            program = digest(source.encode())
            if row["key"] not in results.rows:
                outcome = run_program(source, limits)
                results.append(row["key"], {"program": program, **dataclasses.asdict(outcome)})
            elif results.rows[row["key"]]["program"] != program:
                raise ValueError(f"{results.path} is of other programs than {row['key']}'s; delete it")
            progress(number, len(rows))
        return {row["key"]: results.rows[row["key"]]["passed"] for row in rows}
