"""Fixed channel lists and a boost per layer from a calibration text, and what they are worth on other texts.

    python scripts/calibrate.py --model PATH --file CALIBRATION.txt --cache kitty-plus --out calibrated \
        --measure essays.txt --measure bible.txt

For each cache four caches are made and written to --out as one config per layer: `lists`, a list of channels per layer
and KV head in place of one per page; `boost`, as many boosted channels in all, but more in the layers where they save
most; `even-boost`, the same judged by the attention output's error alone; `lists-boost`, lists and boost together.
With --measure their KL from full precision stands beside the cache's own. `evaluate.py text --cache @FILE` reads them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax.numpy as jnp

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.models.checkpoint import load_model
from kitty_jax.research.calibration import (
    allocate,
    key_scores,
    layer_costs,
    listed_attention,
    save_caches,
    with_boosts,
    with_lists,
)
from kitty_jax.research.metrics import START, compare_hidden, stored_bits
from scripts.eval_text import read_tokens
from scripts.task_runs import file_name, write_json


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="calibrate.py", description=__doc__.splitlines()[0])
    out.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face model directory")
    out.add_argument("--file", type=Path, required=True, help="the calibration text, or a folder of *.txt")
    out.add_argument("--tokens", type=int, default=2048, help="of it (default: %(default)s)")
    out.add_argument("--skip", type=int, default=0, help="tokens of it to pass over (default: %(default)s)")
    out.add_argument("--cache", action="append", default=[], help="to start from, several times (default: kitty-plus)")
    out.add_argument(
        "--boosts",
        type=float,
        nargs="+",
        default=[0, 0.125, 0.25, 0.375, 0.5],
        help="that a layer may get (default: %(default)s)",
    )
    out.add_argument("--out", type=Path, required=True, help="folder for the caches, and figures.json")
    out.add_argument("--measure", type=Path, action="append", default=[], metavar="FILE", help="a text to measure on")
    out.add_argument("--measure-tokens", type=int, default=2048, help="of each (default: %(default)s)")
    out.add_argument("--start", type=int, default=START, help="first position of averages (default: %(default)s)")
    out.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return out


def calibrate(model, tokens, cache: CacheConfig, boosts: list[float], start: int) -> dict[str, tuple[CacheConfig, ...]]:
    """The caches of the module's head, by name."""
    scores = key_scores(model, tokens, cache)
    by_kl = layer_costs(model, tokens, cache, boosts, start=start)
    by_error = layer_costs(model, tokens, cache, boosts, start=start, by_kl=False)
    boosted = with_boosts(cache, allocate(by_kl, boosts, cache.boost))
    return {
        "lists": with_lists(cache, scores),
        "boost": boosted,
        "even-boost": with_boosts(cache, allocate(by_error, boosts, cache.boost)),
        "lists-boost": with_lists(boosted, scores),
    }


def measure(model, tokens, caches: dict[str, tuple[CacheConfig, ...]], start: int) -> dict[str, dict]:
    """KL, top-1 agreement and bits of each cache on a text."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    layers = model.config.num_layers

    def run(configs):
        return model(tokens[None], positions, configs, listed_attention)[0][0]

    full = run((CacheConfig.full(),) * layers)
    out = {}
    for name, configs in caches.items():
        row = compare_hidden(model, full, run(configs), tokens, start)
        out[name] = row | stored_bits(configs, model.config, tokens.shape[0])
    return out


def table(figures: dict[str, dict[str, dict]]) -> str:
    """Figures by text and cache as a Markdown table."""
    lines = ["| cache | bits | " + " | ".join(f"KL, {text}" for text in figures) + " |"]
    lines.append("|---" * (2 + len(figures)) + "|")
    for name, row in next(iter(figures.values())).items():
        cells = " | ".join(f"{figures[text][name]['kl']:.4f}" for text in figures)
        lines.append(f"| {name} | {row['bits']:.2f} | {cells} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    names = options.cache or ["kitty-plus"]
    caches = {name: cache_from_spec(name) for name in names}
    tokens = read_tokens(options.model, options.file, options.skip + options.tokens, options.start)[options.skip :]
    texts = {
        path.stem: read_tokens(options.model, path, options.measure_tokens, options.start) for path in options.measure
    }
    model = load_model(options.model, dtype=options.dtype)
    for cache in caches.values():
        for boost in options.boosts:  # a boost that does not fit the head size ends the run here
            with_boosts(cache, [boost])[0].page_format(model.config.head_dim)
    made = {}
    for name, cache in caches.items():
        made[name] = (cache,) * model.config.num_layers
        for how, configs in calibrate(model, tokens, cache, options.boosts, options.start).items():
            made[f"{name}, {how}"] = configs
            save_caches(configs, options.out / f"{file_name(name)}.{how}.json")
            print(f"{name}, {how}: boosts {[c.boost for c in configs]}", flush=True)
        print(f"{name}: calibrated, {time.perf_counter() - begin:.0f} s", flush=True)
    figures = {text: measure(model, ids, made, options.start) for text, ids in texts.items()}
    boosts = {name: [c.boost for c in configs] for name, configs in made.items()}
    write_json(options.out / "figures.json", {"boosts": boosts, "texts": figures})
    if figures:
        print(table(figures))


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"calibrate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
