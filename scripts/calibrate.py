"""Fixed channel lists and a boost per layer from a calibration text, and what they are worth on other texts.

    python scripts/calibrate.py --model PATH --file CALIBRATION.txt --cache kitty-plus --out calibrated \
        --measure essays.txt --measure bible.txt

For each cache three caches are made and written to --out as one config per layer: `lists`, a list of channels per layer
and KV head in place of one per page; `boost`, as many boosted channels in all, but more in the layers where they save
most; `lists-boost`, both together. With --measure their KL from full precision stands beside the cache's own.
`evaluate.py text --cache @FILE` reads them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.cache.spec import cache_from_spec, save_caches
from kitty_jax.models.checkpoint import load_model
from kitty_jax.research.calibration import allocate, key_scores, layer_costs, with_boosts, with_lists
from kitty_jax.research.metrics import START, evaluate_text
from scripts.command_line import Parser, run_command
from scripts.tables import markdown, write_json
from scripts.task_runs import add_checkpoint_arguments, file_name
from scripts.texts import read_tokens


def parser() -> Parser:
    out = Parser("calibrate.py", __doc__)
    add_checkpoint_arguments(out, dtype="float32")
    out.add_argument("--file", type=Path, required=True, help="the calibration text, or a folder of *.txt")
    out.add_argument("--tokens", type=int, default=2048, help="of it (default: %(default)s)")
    out.add_argument("--skip", type=int, default=0, help="tokens of it to pass over (default: %(default)s)")
    boosts = [0, 0.125, 0.25, 0.375, 0.5]
    out.add_argument("--boosts", type=float, nargs="+", default=boosts, help="of a layer (default: %(default)s)")
    out.add_argument("--out", type=Path, required=True, help="folder for the caches, and figures.json")
    out.add_argument("--measure", type=Path, action="append", default=[], metavar="FILE", help="a text to measure on")
    out.add_argument("--measure-tokens", type=int, default=2048, help="of each (default: %(default)s)")
    out.add_argument("--start", type=int, default=START, help="first position of averages (default: %(default)s)")
    return out


def run(options: argparse.Namespace) -> None:
    begin, start = time.perf_counter(), options.start
    caches = {name: cache_from_spec(name) for name in options.cache or ["kitty-plus"]}
    tokens = read_tokens(options.model, options.file, options.skip + options.tokens, start)[options.skip :]
    texts = {path.stem: read_tokens(options.model, path, options.measure_tokens, start) for path in options.measure}
    model = load_model(options.model, dtype=options.dtype)
    for cache in caches.values():
        for config in with_boosts(cache, options.boosts):
            config.page_format(model.config.head_dim)  # a boost that does not fit the head size ends the run here
    made = {}
    for name, cache in caches.items():
        scores = key_scores(model, tokens, cache)
        costs = layer_costs(model, tokens, cache, options.boosts, start=start)
        boosted = with_boosts(cache, allocate(costs, options.boosts, cache.boost))
        made[name] = (cache,) * model.config.num_layers
        how = {"lists": with_lists(cache, scores), "boost": boosted, "lists-boost": with_lists(boosted, scores)}
        for kind, configs in how.items():
            made[f"{name}, {kind}"] = configs
            save_caches(configs, options.out / f"{file_name(name)}.{kind}.json")
            print(f"{name}, {kind}: boosts {[c.boost for c in configs]}", flush=True)
        print(f"{name}: calibrated, {time.perf_counter() - begin:.0f} s", flush=True)
    figures = {text: evaluate_text(model, ids, made, start=start) for text, ids in texts.items()}
    boosts = {name: [c.boost for c in configs] for name, configs in made.items()}
    write_json(options.out / "figures.json", {"boosts": boosts, "texts": figures})
    rows = []
    for name in ("full", *made) if figures else ():
        of_texts = [by_cache[name] for by_cache in figures.values()]
        rows.append([name, f"{of_texts[0]['bits']:.2f}", *(f"{row['kl']:.4f}" for row in of_texts)])
    if rows:
        print(markdown(["cache", "bits", *(f"KL, {text}" for text in figures)], rows))


def main(argv: list[str] | None = None) -> int:
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
