"""`evaluate.py text`: what each cache costs on a text, by the one-pass simulation."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "What each cache costs on a text, teacher-forced: NLL, perplexity, KL, top-1 agreement, attention error, bits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face model directory")
    parser.add_argument(
        "--file",
        type=Path,
        required=True,
        help="UTF-8 text, or a folder whose *.txt are joined in sorted order by an empty line",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="how many tokens of it, from its start (default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="NAME",
        help="a cache to evaluate, several times if wanted; NAME:FIELD=VALUE,... changes fields of CacheConfig, as in "
        "kitty:boost=0.25,key_shrink=1/0.9/0.8; @FILE is one that calibrate.py wrote. `full` is always evaluated",
    )
    parser.add_argument(
        "--json", type=Path, required=True, help="where the results go: an object with one entry per cache"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--start",
        type=int,
        default=512,
        help="first position of KL, agreement and attention error (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from kitty_jax.cache.spec import caches_from_spec
    from kitty_jax.models.checkpoint import load_model
    from kitty_jax.research.metrics import evaluate_text
    from scripts.task_runs import write_json

    caches = {name: caches_from_spec(name) for name in arguments.cache}  # before the model loads: names may be wrong
    tokens = read_tokens(arguments.model, arguments.file, arguments.tokens, arguments.start)
    model = load_model(arguments.model, dtype=arguments.dtype)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = evaluate_text(
        model,
        tokens,
        caches,
        start=arguments.start,
        progress=lambda line: print(line, flush=True),
        on_row=lambda rows: write_json(arguments.json, rows),
    )
    print(table(results))
    return 0


def read_tokens(model: Path, file: Path, count: int, start: int = 0) -> list[int]:
    """The first ``count`` tokens of a text, no special token added.

    Raises:
        ValueError: the text is shorter, or ``count`` leaves nothing after position ``start``.
    """
    from kitty_jax.models.tokenizer import load_tokenizer
    from scripts.texts import read_text

    if count <= start + 1:
        raise ValueError(
            f"--tokens must be more than --start + 1 = {start + 1}, got {count}; give more, or a lower --start"
        )
    text = read_text(file)
    tokenizer = load_tokenizer(model)
    # Enough characters for the tokens wanted, doubled until there are: tokenizing a whole book takes its time.
    size = 8 * count
    while True:
        tokens = tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
        # The cut may split a word: its last tokens count only when the text ends there.
        if len(tokens) >= count + 16 or (size >= len(text) and len(tokens) >= count):
            return tokens[:count]
        if size >= len(text):
            raise ValueError(f"{file} has {len(tokens)} tokens, wanted {count}: give fewer --tokens or a longer text")
        size *= 2


def table(results: dict[str, dict]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| cache | bits | with buffers | NLL | perplexity | KL | top-1 agreement | attention error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        error = sum(row["attn_rel_err"]) / len(row["attn_rel_err"])
        lines.append(
            f"| {name} | {row['bits']:.2f} | {row['bits_with_buffers']:.2f} | {row['nll']:.4f} | {row['ppl']:.3f} | "
            f"{row['kl']:.4f} | {row['top1']:.3f} | {error:.3f} |"
        )
    return "\n".join(lines)
