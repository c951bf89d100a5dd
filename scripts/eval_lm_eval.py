"""`evaluate.py lm-eval`: tasks of EleutherAI's lm-evaluation-harness with each cache."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from kitty_jax.research.scoring import SCORINGS
from kitty_jax.research.tasks.protocol import PRESETS, Protocol
from kitty_jax.research.tasks.results import open_results
from scripts.tables import markdown, write_json
from scripts.task_runs import (
    REPEAT_SEEDS,
    Checkpoint,
    add_model_arguments,
    add_protocol_arguments,
    cache_settings,
    caches_of,
    changes_of,
    file_name,
    protocol_of,
    say,
)

HELP = "Tasks of lm_eval 0.4.13 with each cache; the paper's tasks by its protocol."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help=f"the paper's protocol: {', '.join(PRESETS)}; others keep their settings but for options of generation",
    )
    parser.add_argument("--include-path", type=Path, help="folder of task files (YAML) of your own")
    parser.add_argument("--out", type=Path, required=True, help="folder for answers, results and the summary")
    parser.add_argument("--limit", type=int, metavar="N", help="first N items of each task (default: all)")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples (default: the task's own)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="prompt and answer (default: the model's positions)"
    )
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="chat template (default: for AIME, as the authors)"
    )
    parser.add_argument("--scoring", choices=SCORINGS, default="simulation", help="of log-likelihoods")
    parser.add_argument(
        "--run-programs", action="store_true", help="let tasks run programs that the model wrote, on this machine"
    )
    add_protocol_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    import kitty_jax.research.lm_eval_adapter  # noqa: F401 (says what is missing)

    caches, changed = caches_of(arguments.cache), changes_of(arguments)
    if arguments.include_path is not None and not arguments.include_path.is_dir():
        raise ValueError(f"--include-path {arguments.include_path} is no folder")
    protocols = {
        task: protocol_of(arguments, PRESETS.get(task, Protocol())) if task in PRESETS or changed else None
        for task in arguments.tasks
    }
    manager = task_manager(arguments)
    if arguments.run_programs:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    checkpoint = Checkpoint(arguments)
    summary: dict[str, dict] = {}
    rows = []
    for task, protocol in protocols.items():
        for name, cache in caches.items():
            repeats = 1 if protocol is None else protocol.repeats
            runs = [run_task(arguments, checkpoint, manager, task, protocol, name, cache, r) for r in range(repeats)]
            summary.setdefault(task, {})[name] = means(runs)
            for metric, row in summary[task][name].items():
                if metric != "sample_len" and "stderr" not in metric:
                    spread = "" if row["sd"] is None else f"{row['sd']:.4f}"
                    rows.append([task, name, metric, f"{row['mean']:.4f}", spread, repeats])
    write_json(arguments.out / "summary.json", summary)
    print(markdown(["task", "cache", "metric", "mean", "sd over repeats", "repeats"], rows))


def task_manager(arguments: argparse.Namespace):
    """The harness's own, which knows all tasks that are asked for."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=arguments.include_path, include_defaults=False)
    if not set(arguments.tasks) <= set(manager.all_tasks):  # reading the harness's own thousands takes its time
        manager = TaskManager(include_path=arguments.include_path)
    unknown = [task for task in arguments.tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm_eval knows no task {', '.join(unknown)}; --include-path names a folder of your own")
    return manager


def run_task(arguments, checkpoint, manager, task: str, protocol: Protocol | None, name: str, cache, repeat: int):
    """The harness's results of one pass over a task, from the file of an earlier run where there is one."""
    import lm_eval

    from kitty_jax.research.lm_eval_adapter import KittyLM

    chat = arguments.chat if arguments.chat is not None else protocol is not None and protocol.chat
    seed = (arguments.seed + REPEAT_SEEDS * repeat) % 2**32
    generation = None
    if protocol is not None:
        generation = {"do_sample": not protocol.greedy, **protocol.settings()}
        generation["max_gen_toks"] = generation.pop("max_new_tokens")
    # What decides an answer to a prompt; limit and examples decide which prompts there are.
    answer_settings = checkpoint.settings() | {"task": task, "generation": generation, "seed": seed}
    answer_settings |= {"max_length": arguments.max_length, "cache": cache_settings(cache)}
    others = {n: getattr(arguments, n) for n in ("limit", "num_fewshot", "scoring", "run_programs")}
    settings = plain({**answer_settings, **others, "chat": chat})
    folder, stem = arguments.out / task, f"{file_name(name)}.{repeat}"
    target = folder / f"{stem}.json"
    if target.is_file():
        there = json.loads(target.read_text(encoding="utf-8"))
        if there["settings"] == settings:
            say(f"{task}, {name}, repeat {repeat}: in {target}")
            return there["results"]
    about = {"implementation": arguments.implementation}
    with open_results(folder / f"{stem}.answers.jsonl", answer_settings, about) as answers:
        model = KittyLM(
            checkpoint.model,
            checkpoint.tokenizer,
            cache,
            batch_size=arguments.batch,
            max_length=arguments.max_length,
            eos=checkpoint.eos,
            seed=seed,
            scoring=arguments.scoring,
            implementation=arguments.implementation,
            answers=answers,
        )
        got = lm_eval.simple_evaluate(
            model,
            tasks=[task],
            task_manager=manager,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            gen_kwargs=generation,
            apply_chat_template=chat,
            fewshot_as_multiturn=False,
            confirm_run_unsafe_code=arguments.run_programs,
            bootstrap_iters=0,
        )
    figures = {key: value for metrics in got["results"].values() for key, value in metrics.items()}
    results = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    write_json(target, {"settings": settings, "results": results, "samples": plain(got.get("samples", {}))})
    say(f"{task}, {name}, repeat {repeat}: " + ", ".join(f"{k} {v:.4f}" for k, v in results.items()))
    return results


def plain(value: Any) -> Any:
    """As it comes back from JSON, without what JSON cannot hold."""
    return json.loads(json.dumps(value, default=str))


def means(runs: list[dict]) -> dict[str, dict]:
    """Mean over the repeats of each metric, the repeats themselves, and their standard deviation."""
    out = {}
    for metric in runs[0]:
        values = [run[metric] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else None
        out[metric] = {"mean": statistics.fmean(values), "sd": spread, "repeats": values}
    return out
