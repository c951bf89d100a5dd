"""Measures whole generations: largest batch in a memory budget, peak memory, tokens a second; and steps at equal batch.

    python scripts/bench_generate.py --cache kitty-pro --cache full --phases generate --reserve 0.03 --json OUT.json
    python scripts/bench_generate.py --baseline hf-dynamic --baseline hf-static --phases generate
    python scripts/bench_generate.py --phases equal --equal-batch 32 --lengths 1024,32768 --equal-layers 18
    python scripts/bench_generate.py --saved OUT.json --figure OUT.png

Weights are random, in the model's shape. Our caches (`full` is the bfloat16 one, with cuDNN's attention) run in JAX;
the Hugging Face ones need torch. The batch is the largest that KVPlan finds for the budget (Hugging Face: that does not
run out of memory); a measured peak above the budget is an error: give a larger --reserve, or fewer --prefill-tokens, as
most of the workspace is the prompt step's. Steps are timed at several lengths of states that are made at those lengths;
trapezoids between them give the time of all steps. Every configuration is a process of its own with a time limit, and
rows are printed, and saved, as they are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.cache.steps import FunctionalModel, functional
from kitty_jax.inference.memory_plan import KVPlan
from kitty_jax.inference.prompts import BUCKET
from kitty_jax.models.hf_config import config_from_hf, config_to_hf
from kitty_jax.models.registry import CONFIG_NAMES, random_model
from scripts.bench_decode import DecodeLoop, Prompts
from scripts.bench_generate_table import document, figure, saved, tables
from scripts.command_line import CACHES, Parser, memory, run_command, whole, whole_numbers
from scripts.model_shapes import read_shape
from scripts.tables import write_json

PHASES = ("generate", "equal")
BASELINES = ("hf-dynamic", "hf-static")
Runner = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


# ---------------------------------------------------------------- the command
def main(argv: list[str] | None = None, run: Runner | None = None) -> int:
    """Measures and prints: 0, 1 if a configuration failed, 2 for wrong options.

    run: request -> rows; by default a process of its own.
    """
    return run_command(_parser(), functools.partial(_command, run=run or run_process), argv)


def _parser() -> Parser:
    made = Parser("bench_generate.py", __doc__)
    add = made.add_argument
    add("--model-shape", default="qwen3-8b", help=f"{', '.join(CONFIG_NAMES)}, or a path (default: %(default)s)")
    add("--layers", type=whole(1), help="instead of the model's")
    add("--cache", action="append", default=[], help=f"of ours, repeatable: {CACHES} (default: kitty-pro, full)")
    add("--baseline", action="append", default=[], choices=BASELINES, help="repeatable (default: none)")
    add("--phases", type=_phases, default=PHASES, help="of generate,equal (default: both)")
    add("--budget", type=memory, default="80GB", help="memory of the generation (default: %(default)s)")
    add("--reserve", type=float, default=0.1, help="fraction that the plan keeps free (default: %(default)s)")
    add("--batches", type=_batches, default="max", help="of the generation, such as 8,32,max (default: %(default)s)")
    add("--prompt", type=whole(1), default=64, help="prompt tokens (default: %(default)s)")
    add("--new", type=whole(1), default=8192, help="new tokens (default: %(default)s)")
    add("--sample-lengths", type=whole_numbers, help="where to time the generation (default: 5 lengths of it)")
    add("--prefill-tokens", type=whole(BUCKET), default=8192, help="of our prompt steps (default: %(default)s)")
    add("--no-prefill", action="store_true", help="leave the prompt out: one compilation less")
    add("--equal-batch", type=whole(1), default=32, help="batch of the equal phase (default: %(default)s)")
    add("--lengths", type=whole_numbers, default="1024,4096,8192", help="tokens of the equal phase (%(default)s)")
    add("--equal-layers", type=whole(1), help="layers of the equal phase, where all of them would not fit")
    add("--steps", type=whole(1), default=8, help="decode steps in a timed window (default: %(default)s)")
    add("--repeats", type=whole(1), default=5, help="windows at a length (default: %(default)s)")
    add("--hf-compile", action="store_true", help="torch.compile the Hugging Face model")
    add("--hf-python", default=sys.executable, help="the Python with torch and transformers (default: this one)")
    add("--limit", type=float, default=300, help="seconds for a configuration (default: %(default)s)")
    add("--saved", type=Path, action="append", help="tables and figure of such a JSON file; several become one")
    add("--json", type=Path, help="write everything here, again after every row")
    add("--figure", type=Path, help="draw memory and throughput by batch here (PNG)")
    return made


def _phases(text: str) -> list[str]:
    phases = text.split(",")
    if set(phases) - set(PHASES):
        raise argparse.ArgumentTypeError(f"takes {' and '.join(PHASES)}, separated by commas, got {text!r}")
    return phases


def _batches(text: str) -> list[str | int]:
    return [item if item == "max" else whole(1)(item) for item in text.split(",")]


def _command(options: argparse.Namespace, run: Runner) -> int:
    if options.saved:
        return _report(saved(options.saved), options.figure)
    setup, requests = plan_requests(options)
    rows: list[dict[str, Any]] = []
    for request in requests:
        for row in run(request):
            rows.append({"method": request["method"], "asked": request["asked"], **row})
            print(readable(rows[-1]), flush=True)
            if options.json:
                write_json(options.json, document(setup, rows))
    return _report(document(setup, rows), options.figure)


def _report(made: dict[str, Any], picture: Path | None) -> int:
    print(f"\n{tables(made)}")
    if picture:
        figure(picture, made)
    return int(any(not s["complete"] for s in made["summary"]))


def plan_requests(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(setup, requests), all of it plain JSON: the options, and for each process its ``method``, the batch as
    ``asked`` and its ``phases``. ``sample_lengths`` are in the order of measuring.
    """
    if not 0 <= options.reserve < 1:
        raise ValueError(f"--reserve is a fraction of the budget, from 0 up to but not 1, got {options.reserve}")
    if options.new <= options.steps * (options.repeats + 1):
        raise ValueError(f"--new {options.new} is too short for {options.repeats} windows of {options.steps} steps")
    caches = options.cache or ([] if options.baseline else ["kitty-pro", "full"])
    for name in caches:
        caches_from_spec(name)
    capacity = options.prompt + options.new
    lengths = options.sample_lengths or (options.prompt, capacity // 8, capacity // 4, capacity // 2)
    setup = {k: v for k, v in vars(options).items() if k not in ("cache", "baseline", "saved", "json", "figure")}
    setup |= {"model": options.model_shape, "config": config_to_hf(read_shape(options.model_shape, options.layers))}
    setup |= {"capacity": capacity, "sample_lengths": in_order(lengths, capacity)}
    requests = []
    for method in [*caches, *options.baseline]:
        for number, asked in enumerate(options.batches if "generate" in options.phases else ["max"]):
            phases = options.phases if number == 0 else ["generate"]
            requests.append({**setup, "method": method, "asked": str(asked), "phases": phases})
    return setup, requests


def in_order(lengths, last: int) -> list[int]:
    """Lengths to sample up to ``last``: the end of the generation first, where memory is short, then its start, so that
    two samples already give an integral, then what lies between. The end stands for lengths within a sixteenth of it.
    """
    return [last, *sorted({n for n in lengths if n < last - last // 16})]


def readable(row: dict[str, Any]) -> str:
    """A row on a line: seconds of samples as ms, bytes as GB."""
    cells = []
    for name, value in row.items():
        if name.endswith("_bytes"):
            cells.append(f"{name.removesuffix('_bytes')} {value / 1e9:.3f} GB")
        elif name.endswith("_s") and row["kind"] == "sample":
            cells.append(f"{name.removesuffix('_s')} {value * 1e3:.3f} ms")
        elif name not in ("method", "phase", "kind", "asked"):
            cells.append(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}")
    return f"{row['method']:<12} {row.get('phase', ''):<8} {row['kind']:<8} {', '.join(cells)}"


# ---------------------------------------------------------------- a process of its own
def run_process(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a child process; a last one of kind "error" if it failed or was stopped at the time limit."""
    script = Path(__file__).resolve()
    command = [sys.executable, str(script), "--measure"]
    if request["method"] in BASELINES:
        command = [request["hf_python"], str(script.with_name("bench_generate_hf.py"))]
    defaults = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # growing caches fragment without it
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # XLA refuses both names
        defaults["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    try:
        yield from read_rows([*command, json.dumps(request)], request["limit"], {**defaults, **os.environ})
    except OSError as error:  # the others are measured all the same
        yield {"kind": "error", "error": f"did not start: {error}"}


def read_rows(command: list[str], limit: float, environment: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Runs a command and yields the JSON objects with a ``kind`` that it prints, a line each, as they come; whatever
    else libraries print is passed over."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        deadline = time.monotonic() + limit
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and "kind" in row:
                    yield row
            status = process.wait()
        finally:
            timer.cancel()
            process.stdout.close()
            process.kill()
            process.wait()
        if status and time.monotonic() >= deadline:
            yield {"kind": "error", "error": f"stopped at the time limit of {limit:.0f} s"}
        elif status:
            errors.seek(0)
            text = errors.read()[-2000:].strip() or "it printed no message"
            yield {"kind": "error", "error": f"ended with status {status}: {text}"}


# ---------------------------------------------------------------- our caches
def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All phases of a request with one of our caches, as rows (:mod:`scripts.bench_generate_table`).

    Raises:
        RuntimeError: the generation's peak memory is above the budget.
    """
    asked = SimpleNamespace(**request)
    config, cache, model = config_from_hf(asked.config), caches_from_spec(asked.method), None
    yield {"kind": "start", "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for phase in asked.phases:
        layers = (asked.equal_layers if phase == "equal" else None) or config.num_layers
        if model is None or model.config.num_layers != layers:
            model = None  # its memory is needed
            model = functional(random_model(dataclasses.replace(config, num_layers=layers)))
            jax.block_until_ready(model.params)
        for row in (_generation if phase == "generate" else _equal_batch)(asked, model, cache):
            yield {"phase": phase, "layers": layers, **row}


def _generation(asked: SimpleNamespace, model: FunctionalModel, cache) -> Iterator[dict[str, Any]]:
    """The whole generation at its largest batch, or at a given one."""
    sizes = {"length": asked.capacity, "budget": asked.budget, "weights": model.params, "reserve": asked.reserve}
    if asked.asked == "max":
        plan = KVPlan.for_budget(model.config, cache, **sizes)
    else:
        plan = KVPlan.for_batch(model.config, cache, batch=int(asked.asked), **sizes)
    row = {"kind": "plan", "batch": plan.batch, "weights_bytes": plan.weights, "cache_bytes": plan.parts["total"]}
    yield row | {"sequence_bytes": plan.per_sequence["total"], "budget_bytes": plan.budget}
    loop = DecodeLoop(model, cache, plan.batch, asked.capacity)
    yield loop.compile()
    prompts = None if asked.no_prefill else Prompts(loop, asked.prompt, asked.prefill_tokens)
    if prompts:
        yield from prompts.compile()
    loop.fill()
    if prompts:
        yield prompts.sample(min(asked.repeats, 3))
    first, *others = asked.sample_lengths
    row = loop.sample(first, asked.steps, asked.repeats)
    yield _memory_row(plan)
    yield row
    for length in others:
        yield loop.sample(length, asked.steps, asked.repeats)


def _memory_row(plan: KVPlan) -> dict[str, Any]:
    """The most memory that this process has ever held; nothing of it where the device does not tell."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is None:
        return {"kind": "memory"}
    if peak > plan.budget:
        raise RuntimeError(
            f"{plan.batch} sequences take up to {peak / 1e9:.2f} GB, the budget is {plan.budget / 1e9:.2f} GB; give a "
            "larger --reserve, or fewer --prefill-tokens"
        )
    return {"kind": "memory", "peak_bytes": peak, "beyond_bytes": peak - plan.weights - plan.parts["total"]}


def _equal_batch(asked: SimpleNamespace, model: FunctionalModel, cache) -> Iterator[dict[str, Any]]:
    """Steps at a batch that all methods share. The budget is not asked here: what fits the device is compared."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = {"batch": asked.equal_batch, "budget": limit, "weights": model.params, "reserve": 0.04}
    fitting = []
    for length in sorted(asked.lengths):
        plan = KVPlan.for_batch(model.config, cache, length=length + asked.steps, **sizes)
        if plan.fits:
            fitting.append(length)
        else:
            yield {"kind": "skipped", "length": length, "why": f"does not fit: {-plan.free} bytes more"}
    if fitting:
        loop = DecodeLoop(model, cache, asked.equal_batch, max(fitting) + asked.steps)
        yield loop.compile()
        loop.fill()
        for length in fitting:
            yield loop.sample(length, asked.steps, asked.repeats)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # the child
        jax.config.update("jax_enable_compilation_cache", False)  # a cold start is one
        for made in measure(json.loads(sys.argv[2])):
            print(json.dumps(made), flush=True)
    else:
        sys.exit(main())
