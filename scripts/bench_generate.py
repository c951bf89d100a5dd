"""Measures whole generations: largest batch in a memory budget, peak memory, tokens a second; and steps at equal batch.

    python scripts/bench_generate.py --json OUT.json --figure OUT.png
    python scripts/bench_generate.py --cache kitty-pro --cache full --baseline hf-dynamic --baseline hf-static
    python scripts/bench_generate.py --phases equal --equal-batch 32 --lengths 1024,32768 --equal-layers 24
    python scripts/bench_generate.py --model-shape qwen3-32b --budget 130GB --phases generate --limit 500
    python scripts/bench_generate.py --model-shape qwen3-0.6b --layers 2 --new 512 --quick --budget 1GB

Weights are random, in the model's shape. Our caches (`full` is the bfloat16 one, with cuDNN's attention) run in JAX;
the Hugging Face ones need torch, the quantized one its backend as well. The batch is the largest that KVPlan finds for
the budget, and is then held against the measured peak memory, with fewer sequences if that is above the budget. Steps
are timed at several lengths of states that are made at those lengths; trapezoids between them give the time of all
steps. Every configuration is a process of its own with a time limit, and rows are printed, and saved, as they are
measured. A larger batch may fit with a smaller --reserve; most of the workspace is the prompt step's, which
--prefill-tokens bounds. --plan says what would be tried and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.inference.memory import format_bytes, parse_bytes
from kitty_jax.inference.memory_plan import KVPlan
from kitty_jax.inference.prompts import BUCKET
from kitty_jax.models.registry import CONFIG_NAMES, config_from_hf, config_to_hf
from scripts.bench_generate_common import PHASES, Request
from scripts.bench_generate_table import document, figure, saved, tables, write_json
from scripts.model_shapes import read_shape, weight_shapes

BASELINES = ("hf-dynamic", "hf-static", "hf-quantized")
CHILDREN = {True: "bench_generate_hf.py", False: "bench_generate_ours.py"}
ATTEMPTS = 4  # of smaller and smaller batches
Runner = Callable[[Request, float, str], Iterator[dict[str, Any]]]


def main(argv: list[str] | None = None, run: Runner | None = None) -> int:
    """Measures and prints. 0; 1 if a configuration failed; 2, with one line on standard error, for wrong options.

    run: (request, seconds, python) -> rows; by default a process of its own.
    """
    options = parser().parse_args(argv)
    try:
        if options.saved:
            return report(saved(options.saved), options.figure)
        requests, setup = plan_requests(options)
    except (ValueError, OSError) as error:
        print(f"bench_generate.py: {error}", file=sys.stderr)
        return 2
    if options.plan:
        try:
            print("\n".join(planned(asked, request) for asked, request in requests))
        except ValueError as error:
            print(f"bench_generate.py: {error}", file=sys.stderr)
            return 2
        return 0
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.total_limit

    def took(row: dict[str, Any]) -> None:
        rows.append(row)
        print(readable(row), flush=True)
        if options.json:
            write_json(options.json, setup, rows)

    for index, (asked, request) in enumerate(requests):
        for row in attempts(asked, request, options, deadline, run or run_process):
            took({"run": f"{index}.{row.pop('attempt')}", "method": request.method, "asked": asked, **row})
    return report(document(setup, rows), options.figure)


def report(made: dict[str, Any], picture: Path | None) -> int:
    """Prints the tables, draws the figure; 1 if a configuration failed."""
    print(f"\n{tables(made)}")
    failed = any(not s["complete"] for s in made["summary"])
    if picture:
        try:
            figure(picture, made)
        except (ImportError, ValueError) as error:
            more = "; figures need `pip install .[plots]`" if isinstance(error, ImportError) else ""
            print(f"bench_generate.py: no figure: {error}{more}", file=sys.stderr)
            failed = True
    return int(failed)


def planned(asked: str, request: Request) -> str:
    """What the generation of a configuration would be, in a line; nothing is allocated."""
    head = f"{request.method:<12} {asked:<4}"
    if request.method in BASELINES:
        return f"{head} finds its batch by trying"
    config = config_from_hf(request.model)
    memory = {"budget": request.budget, "weights": weight_shapes(config), "reserve": request.reserve}
    sizes = {"length": request.capacity, **memory}
    if request.batch is None:
        plan = KVPlan.for_budget(config, caches_from_spec(request.method), **sizes)
    else:
        plan = KVPlan.for_batch(config, caches_from_spec(request.method), batch=request.batch, **sizes)
    parts = {"weights": plan.weights, "cache": plan.parts["total"], "workspace": plan.workspace, "left": plan.free}
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"{head} {plan.batch} sequences of {request.capacity:,} tokens: {text}"


def attempts(
    asked: str, request: Request, options: argparse.Namespace, deadline: float, run: Runner
) -> Iterator[dict[str, Any]]:
    """The rows of a configuration: again with fewer sequences as long as its largest batch is too large."""
    for attempt in range(ATTEMPTS):
        limit = min(options.limit, deadline - time.monotonic())
        if limit <= 0:
            yield {"kind": "error", "attempt": attempt, "error": "not started: the total time limit has passed"}
            return
        plan: dict[str, Any] = {}
        phase, fewer = "", None
        python = options.hf_python if request.method in BASELINES else sys.executable
        for row in run(request, limit, python):
            yield {"attempt": attempt, **row}
            phase = row.get("phase", phase)
            if row["kind"] == "plan":
                plan = row
            if row.get("fits") is False:
                over = row["peak_bytes"] - row["budget_bytes"]
                fewer = plan["batch"] - max(1, -(-over // plan["sequence_bytes"]))
            elif row.get("out_of_memory") and plan and phase == "generate":
                fewer = plan["batch"] * 15 // 16
        if fewer is None:
            return
        if fewer < 1 or attempt == ATTEMPTS - 1 or asked != "max":
            batch = plan["batch"]
            yield {"kind": "error", "attempt": attempt, "error": f"{batch} sequences take more than the budget"}
            return
        request = dataclasses.replace(request, batch=fewer)


def run_process(request: Request, limit: float, python: str) -> Iterator[dict[str, Any]]:
    """The rows of a child process; a last one of kind "error" if it failed or was stopped at the time limit."""
    baseline = request.method in BASELINES
    script = Path(__file__).resolve().parent / CHILDREN[baseline]
    environment = dict(os.environ)
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # growing caches fragment without it
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    try:
        yield from read_rows([python, str(script), request.to_json()], limit, environment)
    except OSError as error:  # the others are measured all the same
        yield {"kind": "error", "error": f"did not start: {error}"}


def read_rows(command: list[str], limit: float, environment: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Runs a command and yields the JSON objects it prints, a line each, as they come."""
    stopped = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)

        def stop() -> None:
            stopped.set()
            process.kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        told = False
        try:
            for line in process.stdout:
                if (row := _row(line)) is not None:
                    told = told or row["kind"] == "error"
                    yield row
            status = process.wait()
        finally:
            timer.cancel()
            process.stdout.close()
            if process.poll() is None:
                process.kill()
                process.wait()
        if stopped.is_set():
            yield {"kind": "error", "error": f"stopped at the time limit of {limit:.0f} s"}
        elif status and not told:
            errors.seek(0)
            text = errors.read()[-2000:].strip() or "it printed no message"
            yield {"kind": "error", "error": f"ended with status {status}: {text}"}


def _row(line: str) -> dict[str, Any] | None:
    """The row on a line of a child's output; None for whatever else libraries print."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row else None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_generate.py", description=__doc__.split("\n\n")[0])
    add = made.add_argument
    add("--model-shape", default="qwen3-8b", help=f"{', '.join(CONFIG_NAMES)}, or a path (default: %(default)s)")
    add("--layers", type=int, help="instead of the model's")
    names = ", ".join(CACHE_NAMES)
    add("--cache", action="append", help=f"of ours, repeatable: {names}, NAME:FIELD=VALUE (default: kitty-pro, full)")
    add("--baseline", action="append", choices=BASELINES, help="repeatable (default: none)")
    add("--phases", default=",".join(PHASES), help="of generate,equal (default: both)")
    add("--budget", type=_size, default="80GB", help="memory of the generation (default: %(default)s)")
    add("--reserve", type=float, default=0.1, help="fraction that the plan keeps free (default: %(default)s)")
    add("--batches", default="max", help="batches of the generation, such as 8,32,max (default: %(default)s)")
    add("--prompt", type=int, default=64, help="prompt tokens (default: %(default)s)")
    add("--new", type=int, default=8192, help="new tokens (default: %(default)s)")
    add("--sample-lengths", type=_lengths, help="where to time the generation (default: 5 lengths of it)")
    add("--prefill-tokens", type=int, default=8192, help="of our prompt steps, padding included (default: %(default)s)")
    add("--no-prefill", action="store_true", help="leave the prompt out: one compilation less")
    add("--equal-batch", type=int, default=32, help="batch of the equal phase (default: %(default)s)")
    add("--lengths", type=_lengths, default="1024,4096,8192", help="tokens of the equal phase (default: %(default)s)")
    add("--equal-layers", type=int, help="layers of the equal phase, where all of them would not fit")
    add("--equal-exact", action="store_true", help="a cache and a compilation for each of --lengths")
    add("--steps", type=int, default=8, help="decode steps in a timed window (default: %(default)s)")
    add("--repeats", type=int, default=5, help="windows at a length (default: %(default)s)")
    add("--quick", action="store_true", help="both ends of the generation only, 2 repeats")
    add("--hf-compile", action="store_true", help="torch.compile the Hugging Face model")
    add("--hf-backend", default="quanto", help="of hf-quantized: quanto or hqq (default: %(default)s)")
    add("--hf-python", default=sys.executable, help="the Python with torch and transformers (default: this one)")
    add("--limit", type=float, default=300, help="seconds for a configuration (default: %(default)s)")
    add("--total-limit", type=float, default=float("inf"), help="seconds for all of them (default: none)")
    add("--plan", action="store_true", help="print what would be tried, and measure nothing")
    add("--saved", type=Path, action="append", help="tables and figure of such a JSON file; several become one")
    add("--json", type=Path, help="write everything here, again after every row")
    add("--figure", type=Path, help="draw memory and throughput by batch here (PNG)")
    return made


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"lengths are whole numbers separated by commas, got {text!r}") from error


def plan_requests(options: argparse.Namespace) -> tuple[list[tuple[str, Request]], dict[str, Any]]:
    """What to measure, as (batch as asked for, request), and the setup that the JSON file states."""
    model = config_to_hf(read_shape(options.model_shape, options.layers))
    phases = tuple(options.phases.split(","))
    if not phases or set(phases) - set(PHASES):
        raise ValueError(f"--phases takes {' and '.join(PHASES)}, separated by commas, got {options.phases!r}")
    for name in ("prompt", "new", "equal_batch", "steps", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(options, name)}")
    if options.prefill_tokens < BUCKET:
        raise ValueError(f"--prefill-tokens must be {BUCKET} or more, got {options.prefill_tokens}")
    if not 0 <= options.reserve < 1:
        raise ValueError(f"--reserve is a fraction of the budget, from 0 up to but not 1, got {options.reserve}")
    if options.new <= options.steps * (options.repeats + 1):
        raise ValueError(f"--new {options.new} is too short for {options.repeats} windows of {options.steps} steps")
    caches = options.cache or ([] if options.baseline else ["kitty-pro", "full"])
    for name in caches:
        caches_from_spec(name)
    capacity = options.prompt + options.new
    default = (options.prompt, capacity // 8, capacity // 4, capacity // 2, capacity)
    lengths = (options.prompt, capacity) if options.quick else options.sample_lengths or default
    common = {
        "model": model,
        "budget": options.budget,
        "prompt": options.prompt,
        "new": options.new,
        "lengths": lengths,
        "equal_batch": options.equal_batch,
        "equal_lengths": options.lengths,
        "equal_layers": options.equal_layers,
        "equal_exact": options.equal_exact,
        "steps": options.steps,
        "repeats": min(options.repeats, 2) if options.quick else options.repeats,
        "reserve": options.reserve,
        "prefill": not options.no_prefill,
        "prefill_tokens": options.prefill_tokens,
        "compiled": options.hf_compile,
        "backend": options.hf_backend,
    }
    batches = options.batches.split(",")
    if wrong := [b for b in batches if b != "max" and not (b.isdecimal() and int(b))]:
        raise ValueError(f"--batches takes numbers and max, separated by commas, got {wrong[0]!r}")
    requests = []
    for method in [*caches, *(options.baseline or [])]:
        for turn, asked in enumerate(batches if "generate" in phases else batches[:1]):
            own = phases if turn == 0 else ("generate",)
            batch = None if asked == "max" else int(asked)
            requests.append((asked, Request(method=method, batch=batch, phases=own, **common)))
    setup = {**common, "model": options.model_shape, "config": model, "phases": phases, "batches": batches}
    return requests, setup


def readable(row: dict[str, Any]) -> str:
    """A row on a line: seconds as ms, bytes as GB."""
    head = f"{row['method']:<12} {row.get('phase', ''):<8} {row['kind']:<8}"
    cells = []
    for name, value in row.items():
        if name in ("method", "phase", "kind", "run", "asked"):
            continue
        if name.endswith("_bytes") or name == "reserved":
            cells.append(f"{name.removesuffix('_bytes')} {value / 1e9:.3f} GB")
        elif name.endswith("_s") and row["kind"] == "sample":
            cells.append(f"{name.removesuffix('_s')} {value * 1e3:.3f} ms")
        else:
            cells.append(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}")
    return f"{head} {', '.join(cells)}"


if __name__ == "__main__":
    sys.exit(main())
