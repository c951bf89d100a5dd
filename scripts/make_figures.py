"""The paper's figures for any model and text, each as PNG and JSON (with matplotlib: the extra `plots`).

python scripts/make_figures.py keys        --model PATH --file TEXT --layer 10 --out docs/figures   # Figure 2a
python scripts/make_figures.py sensitivity --model PATH --file TEXT --layer 10 --out docs/figures   # Figure 2b
python scripts/make_figures.py boost       --model PATH --file TEXT --tokens 2048 --out docs/figures  # Figure 4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.cache.config import CacheConfig
from kitty_jax.models.checkpoint import load_model
from kitty_jax.research.analysis import capture, channel_sensitivity
from kitty_jax.research.metrics import evaluate_text
from scripts.command_line import Parser, run_command, whole
from scripts.tables import write_json
from scripts.texts import read_tokens

WINDOW = 512  # tokens shown in Figure 2a


def main(argv: list[str] | None = None) -> int:
    parser = Parser("make_figures.py", __doc__)
    commands = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for name, function in {"keys": keys, "sensitivity": sensitivity, "boost": boost}.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(draw=function)
        command.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face directory")
        command.add_argument("--file", type=Path, required=True, help="a text, or a folder of *.txt")
        command.add_argument("--tokens", type=whole(1), default=2048, help="tokens of it (default: %(default)s)")
        command.add_argument("--out", type=Path, required=True, help="folder for NAME.png and NAME.json")
        if name == "boost":
            command.add_argument("--fraction", type=float, nargs="+", default=[0, 0.0625, 0.125, 0.25, 0.5, 1])
            command.add_argument("--selection", nargs="+", default=["magnitude", "random"])
            command.add_argument("--start", type=int, default=512, help="first position counted (default: %(default)s)")
        else:
            command.add_argument("--layer", type=int, required=True)
        if name == "keys":
            command.add_argument("--head", type=int, default=0, help="KV head (default: %(default)s)")
    return run_command(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('needs matplotlib: pip install "kitty-jax[plots]"') from error
    tokens = np.array(read_tokens(options.model, options.file, options.tokens), np.int32)
    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    data = options.draw(load_model(options.model), tokens, options, figure.subplots())
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / f"{options.figure}.png")
    write_json(options.out / f"{options.figure}.json", data)
    print(options.out / f"{options.figure}.png")


def keys(model, tokens, options, axes) -> dict:
    """Figure 2a: |key| by token and channel, one KV head of one layer."""
    _, k = capture(model, tokens, [options.layer])[options.layer]
    if not 0 <= options.head < k.shape[1]:
        raise ValueError(f"--head must be from 0 to {k.shape[1] - 1} for this model, got {options.head}")
    magnitude = np.abs(np.asarray(k[:, options.head], np.float32))[-WINDOW:]
    image = axes.imshow(magnitude, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="|key|")
    axes.set(xlabel="channel", ylabel=f"token (the last {len(magnitude)})")
    axes.set_title(f"layer {options.layer}, KV head {options.head}")
    statistics = {"mean_magnitude": magnitude.mean(0).tolist(), "max_magnitude": magnitude.max(0).tolist()}
    return {"layer": options.layer, "head": options.head, **statistics}


def sensitivity(model, tokens, options, axes) -> dict:
    """Figure 2b: mean squared error of the logits when one channel alone has 2 bits, by query head."""
    q, k = capture(model, tokens, [options.layer])[options.layer]
    error = np.asarray(channel_sensitivity(q, k, CacheConfig.kivi2_sink()))
    ranked = np.sort(error, -1)[:, ::-1]
    for head, row in enumerate(ranked):
        axes.semilogy(row, label=f"head {head}", linewidth=1)
    axes.set(xlabel="channel, by rank", ylabel="MSE of the logits")
    axes.set_title(f"layer {options.layer}: one channel alone at 2 bits")
    axes.legend(fontsize=6, ncols=2)
    share = ranked[:, : error.shape[1] // 8].sum(-1) / error.sum(-1)
    return {"layer": options.layer, "mse": error.tolist(), "share_of_the_top_eighth": share.tolist()}


def boost(model, tokens, options, axes) -> dict:
    """Figure 4: KL from full precision against the fraction of boosted channels, by the way they are chosen."""
    caches = {
        f"{selection} {fraction}": CacheConfig.kitty(boost=fraction, selection=selection)
        for selection in options.selection
        for fraction in options.fraction
    }
    results = evaluate_text(model, tokens, caches, start=options.start, progress=lambda line: print(line, flush=True))
    curves = {s: [results[f"{s} {f}"]["kl"] for f in options.fraction] for s in options.selection}
    for selection, kl in curves.items():
        axes.semilogy([100 * f for f in options.fraction], kl, marker="o", label=selection)
    axes.set(xlabel="boosted channels, %", ylabel="mean KL from full precision, nats")
    axes.legend()
    return {"fraction": options.fraction, "kl": curves, "caches": results}


if __name__ == "__main__":
    sys.exit(main())
