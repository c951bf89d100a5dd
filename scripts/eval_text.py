"""`evaluate.py text`: what each cache costs on a text."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.models.checkpoint import load_model
from kitty_jax.research.metrics import START, evaluate_text
from kitty_jax.research.scoring import SCORINGS
from scripts.tables import markdown, write_json
from scripts.task_runs import add_checkpoint_arguments
from scripts.texts import read_tokens

HELP = "What each cache costs on a text, teacher-forced: NLL, perplexity, KL, top-1 agreement, attention error, bits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser, dtype="float32")
    parser.add_argument("--file", type=Path, required=True, help="UTF-8 text, or a folder whose *.txt are joined")
    parser.add_argument("--tokens", type=int, default=4096, help="of it, from its start (default: %(default)s)")
    parser.add_argument(
        "--start", type=int, default=START, help="first position of KL, agreement and errors (default: %(default)s)"
    )
    parser.add_argument(
        "--scoring",
        choices=SCORINGS,
        default="simulation",
        help="one pass of the simulation, or the packed cache itself (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, required=True, help="the results: an object with one entry per cache")


def run(arguments: argparse.Namespace) -> None:
    caches = {name: caches_from_spec(name) for name in arguments.cache}  # before the model loads: names may be wrong
    tokens = read_tokens(arguments.model, arguments.file, arguments.tokens, arguments.start)
    results = evaluate_text(
        load_model(arguments.model, dtype=arguments.dtype),
        tokens,
        caches,
        start=arguments.start,
        scoring=arguments.scoring,
        progress=lambda line: print(line, flush=True),
        on_row=lambda rows: write_json(arguments.json, rows),
    )
    header = ["cache", "bits", "with buffers", "NLL", "perplexity", "KL", "top-1 agreement", "attention error"]
    digits = {"bits": 2, "bits_with_buffers": 2, "nll": 4, "ppl": 3, "kl": 4, "top1": 3, "error": 3}
    rows = []
    for name, row in results.items():
        figures = {**row, "error": statistics.fmean(row["attn_rel_err"])}
        rows.append([name, *(f"{figures[key]:.{places}f}" for key, places in digits.items())])
    print(markdown(header, rows))
