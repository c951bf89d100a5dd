"""Generate text from a checkpoint with a 2-bit KV cache.

    python scripts/generate.py --model PATH --prompt TEXT [--prompt TEXT ...] [--cache kitty-pro] [--chat] [--json]

PATH is a Hugging Face directory or a .gguf file. The text comes as it is generated; a small table of speed and cache
bytes ends it. Short runs are mostly compilation; JAX_COMPILATION_CACHE_DIR=FOLDER in the environment keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp
from tqdm import tqdm

from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.inference.detokenize import InOrder, TextStream, encode_prompts
from kitty_jax.inference.engine import Engine
from kitty_jax.inference.memory_plan import KVPlan, cache_bytes
from kitty_jax.inference.prompts import check_capacity, check_prompts
from kitty_jax.inference.sampling import Greedy, Sampler, Sampling
from kitty_jax.models.checkpoint import load_model, open_checkpoint
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids
from kitty_jax.pallas_kernels.implementation import IMPLEMENTATIONS
from scripts.command_line import CACHES, Parser, run_command, whole

SLOTS = 16  # prompts at a time unless --slots says otherwise
DTYPES = ("float32", "bfloat16", "float16")


def parser() -> Parser:
    p = Parser("generate.py", __doc__)
    add = p.add_argument
    add("--model", required=True, metavar="PATH", help="Hugging Face model directory or .gguf file")
    add("--prompt", action="append", default=[], metavar="TEXT", help="repeat it for a batch")
    file_help = 'one prompt per line, or JSON lines with a "prompt"; - is standard input'
    add("--prompts-file", metavar="FILE", help=file_help)
    slots_help = f"prompts that run at a time; the next one starts when one ends (default: all, up to {SLOTS})"
    add("--slots", type=whole(1), metavar="N", help=slots_help)
    add("--chat", action="store_true", help="put each prompt into the checkpoint's chat template")
    add("--cache", default="kitty-pro", metavar="SPEC", help=f"{CACHES} of scripts/calibrate.py (default: %(default)s)")
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="default: %(default)s")
    capacity_help = "tokens that a sequence's cache holds (default: what the longest prompt needs)"
    add("--capacity", type=whole(1), metavar="N", help=capacity_help)
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add("--dtype", choices=DTYPES, help="of weights and activations (default: as stored; float32 for .gguf)")
    add("--implementation", choices=IMPLEMENTATIONS, default="auto", help="of the operations on pages")
    add("--json", action="store_true", help="one JSON object on standard output, all else on standard error")
    add = p.add_argument_group("sampling", "greedy unless one of the first four is given").add_argument
    add("--temperature", type=float, metavar="X", help="0 is greedy")
    add("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    add("--top-p", type=float, metavar="X", help="keep the most likely tokens of total probability X")
    add("--min-p", type=float, metavar="X", help="keep tokens X times as likely as the most likely one")
    add("--seed", type=int, default=0, metavar="N", help="prompt b uses N + b (default: %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, or 2 with one line on standard error."""
    return run_command(parser(), run, argv)


def run(options: argparse.Namespace) -> None:
    # In the order of what they cost, so that a wrong flag is answered before a large file is read.
    cache, sampler, prompts = caches_from_spec(options.cache), sampler_of(options), read_prompts(options)
    open_checkpoint(options.model)
    tokenizer = load_tokenizer(options.model)
    ids = encode_prompts(tokenizer, prompts, chat=options.chat)
    lengths = [len(prompt) for prompt in check_prompts(ids)]
    capacity = check_capacity(lengths, options.max_new_tokens, options.capacity)
    ends = {*stop_token_ids(options.model), tokenizer.eos_token_id} - {None}
    eos = () if options.ignore_eos else sorted(ends)

    begin = time.perf_counter()
    model = load_model(options.model, dtype=options.dtype, progress=loading(options.model))
    load_seconds = time.perf_counter() - begin
    longest = max(lengths) + options.max_new_tokens
    if longest > model.config.max_position:
        say(f"note: up to {longest} tokens, but the model was made for {model.config.max_position}")
    slots = min(len(prompts), options.slots or SLOTS)
    # Text for a reader comes token by token; otherwise many steps run between two looks at who has ended.
    chunk = {"chunk": 1} if slots == len(prompts) and not options.json else {}
    kept = {"cache": cache, "slots": slots, "capacity": capacity, **chunk}
    engine = Engine(model, sampler=sampler, eos=eos, implementation=options.implementation, **kept)
    asked = {"max_new_tokens": options.max_new_tokens, "seed": options.seed}
    pieces = engine.stream(ids, **asked)
    say(f"loaded in {load_seconds:.1f} s; compiling for {jax.devices()[0].device_kind}")
    compile_seconds = engine.compile(ids, **asked)
    say(f"compiled in {compile_seconds:.1f} s")

    titles = [f"[{i + 1}] {' '.join(p.split())[:70]}" for i, p in enumerate(prompts)] if len(prompts) > 1 else None
    with (
        open(os.devnull, "w") if options.json else contextlib.nullcontext(sys.stdout) as out,
        tqdm(total=len(prompts), unit="prompt", disable=None if options.json else True) as bar,  # None: not a terminal
    ):
        sequences, texts, times = stream_texts(pieces, len(prompts), tokenizer, InOrder(titles, out), bar.update)
    size = cache_bytes(cache, model.config, batch=slots, capacity=capacity)
    report = {
        "model": str(options.model),
        "dtype": jnp.dtype(model.config.dtype).name,
        "device": jax.devices()[0].device_kind,
        "cache": options.cache if options.cache[:1] == "@" else options.cache.strip().lower().replace("_", "-"),
        "capacity": capacity,
        "slots": slots,
        "outputs": [
            {
                "prompt": prompt,
                "prompt_tokens": len(row),
                "new_tokens": len(new),
                "token_ids": new,
                "text": text,
                "finished_by_eos": bool(new) and new[-1] in eos,
            }
            for prompt, row, new, text in zip(prompts, ids, sequences, texts, strict=True)
        ],
        "seconds": {"load": load_seconds, "compile": compile_seconds, **times},
        "tokens_per_second": sum(map(len, sequences)) / times["generation"],
        "cache_bytes": {name: getattr(size, name) for name in ("payload", "metadata", "buffers", "total", "bf16")},
    }
    print(json.dumps(report) if options.json else f"\n{table(report, size)}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sampler_of(options: argparse.Namespace) -> Sampler:
    """Greedy without a sampling flag or at temperature 0."""
    filters = {name: getattr(options, name) for name in ("top_k", "top_p", "min_p")}
    given = [f"--{name.replace('_', '-')}" for name, value in filters.items() if value is not None]
    if options.temperature == 0 and given:
        raise ValueError(f"--temperature 0 always takes the most likely token: leave out {' and '.join(given)}")
    if not options.temperature and not given:
        return Greedy()
    return Sampling(temperature=1.0 if options.temperature is None else options.temperature, **filters)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of --prompt, then those of --prompts-file. Blank lines of the file are passed over."""
    prompts, name = list(options.prompt), options.prompts_file
    if name is not None:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines:
            raise ValueError(f"{name} holds no prompts")
        as_json = name.endswith(".jsonl") or all(prompt_of(line) is not None for _, line in lines)
        for number, line in lines:
            prompt = prompt_of(line) if as_json else line
            if prompt is None:
                raise ValueError(f'{name}, line {number}: wanted a JSON object with a text "prompt", got {line:.60}')
            prompts.append(prompt)
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompts-file FILE")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError(f"empty prompt: prompt {number} of {len(prompts)} holds no text")
    return prompts


def prompt_of(line: str) -> str | None:
    """The prompt of a JSON line, or None where it is none."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError):
        return None
    return prompt if isinstance(prompt, str) else None


def loading(path: str) -> Callable[[int, int, str], None] | None:
    """Progress of loading: a line that is rewritten on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        say(f"loading {path}")
        return None

    def show(done: int, total: int, name: str) -> None:
        text = f"\rloading {100 * done / max(total, 1):5.1f} % of {total / 1e6:.0f} MB  {name:.50}\033[K"
        print(text, end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def stream_texts(
    pieces: Iterable[Any], count: int, tokenizer: Any, out: InOrder, ended: Callable[[], object]
) -> tuple[list[list[int]], list[str], dict[str, float]]:
    """Streams what an engine gives to ``out``: new ids and text of each prompt, and seconds until the first of them
    and until the last. ``ended`` is called whenever a prompt has ended.
    """

    def to_text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    sequences, texts = [[] for _ in range(count)], [""] * count
    streams = [TextStream(to_text) for _ in range(count)]
    begin, first = time.perf_counter(), None
    for row, new, last, *_ in pieces:
        first = first or time.perf_counter() - begin
        sequences[row] += new
        text = streams[row].push(new) + (streams[row].finish() if last else "")
        texts[row] += text
        out.write(row, text)
        if last:
            out.end(row)
            ended()
    return sequences, texts, {"first_tokens": first, "generation": time.perf_counter() - begin}


def table(report: dict, size: KVPlan) -> str:
    """The report as a few lines of text."""
    outputs, seconds = report["outputs"], report["seconds"]
    prompt_tokens, new_tokens = (sum(o[name] for o in outputs) for name in ("prompt_tokens", "new_tokens"))
    parts = f"payload {megabytes(size.payload)}, metadata {megabytes(size.metadata)}, buffers {megabytes(size.buffers)}"
    small = "" if size.ratio >= 1 else ": at so small a capacity the full-precision buffers outweigh what pages save"
    rows = [
        ("prompt tokens", f"{prompt_tokens}", f"{len(outputs)} prompt{'s' if len(outputs) > 1 else ''}"),
        ("new tokens", f"{new_tokens}", ""),
        ("compilation", f"{seconds['compile']:.2f} s", ""),
        ("first tokens after", f"{seconds['first_tokens']:.2f} s", ""),
        ("generation", f"{seconds['generation']:.2f} s", f"{report['tokens_per_second']:.1f} new tokens/s"),
        (f"cache {report['cache']}", megabytes(size.total), f"{parts}; capacity {report['capacity']} tokens"),
        ("the same in bf16", megabytes(size.bf16), f"{size.ratio:.2f} times as large{small}"),
    ]
    return "\n".join(f"{name:<20}{value:>12}  {note}".rstrip() for name, value, note in rows)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
