"""The paper's figures for any model and text, each as PNG and JSON (with matplotlib: the extra `plots`).

python scripts/make_figures.py keys        --model PATH --file TEXT --layer 10 --out docs/figures   # Figure 2a
python scripts/make_figures.py sensitivity --model PATH --file TEXT --layer 10 --out docs/figures   # Figure 2b
python scripts/make_figures.py boost       --model PATH --file TEXT --tokens 2048 --out docs/figures  # Figure 4
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.cache.config import CacheConfig
from kitty_jax.models.checkpoint import load_model
from kitty_jax.research.analysis import capture, channel_sensitivity
from kitty_jax.research.metrics import evaluate_text
from scripts.eval_text import read_tokens

WINDOW = 512  # tokens shown in Figure 2a


def keys(model, tokens, arguments, axes) -> dict:
    """Figure 2a: \\|key\\| by token and channel, one KV head of one layer."""
    _, k = capture(model, tokens, [arguments.layer])[arguments.layer]
    _in_range("--head", arguments.head, k.shape[1])
    magnitude = np.abs(np.asarray(k[:, arguments.head], np.float32))[-WINDOW:]
    image = axes.imshow(magnitude, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="|key|")
    axes.set(xlabel="channel", ylabel=f"token (the last {len(magnitude)})")
    axes.set_title(f"layer {arguments.layer}, KV head {arguments.head}")
    return {
        "layer": arguments.layer,
        "head": arguments.head,
        "mean_magnitude": magnitude.mean(0).tolist(),
        "max_magnitude": magnitude.max(0).tolist(),
    }


def sensitivity(model, tokens, arguments, axes) -> dict:
    """Figure 2b: mean squared error of the logits when one channel alone has 2 bits, by query head."""
    q, k = capture(model, tokens, [arguments.layer])[arguments.layer]
    error = np.asarray(channel_sensitivity(q, k, CacheConfig.kivi2_sink()))
    for head, row in enumerate(error):
        axes.semilogy(np.sort(row)[::-1], label=f"head {head}", linewidth=1)
    axes.set(xlabel="channel, by rank", ylabel="MSE of the logits")
    axes.set_title(f"layer {arguments.layer}: one channel alone at 2 bits")
    axes.legend(fontsize=6, ncols=2)
    top = np.sort(error, -1)[:, ::-1]
    share = top[:, : error.shape[1] // 8].sum(-1) / error.sum(-1)
    return {"layer": arguments.layer, "mse": error.tolist(), "share_of_the_top_eighth": share.tolist()}


def boost(model, tokens, arguments, axes) -> dict:
    """Figure 4: KL from full precision against the fraction of boosted channels, by the way they are chosen."""
    caches = {
        f"{selection} {fraction}": CacheConfig.kitty(boost=fraction, selection=selection)
        for selection in arguments.selection
        for fraction in arguments.fraction
    }
    results = evaluate_text(model, tokens, caches, start=arguments.start, progress=lambda line: print(line, flush=True))
    curves = {s: [results[f"{s} {f}"]["kl"] for f in arguments.fraction] for s in arguments.selection}
    for selection, kl in curves.items():
        axes.semilogy([100 * f for f in arguments.fraction], kl, marker="o", label=selection)
    axes.set(xlabel="boosted channels, %", ylabel="mean KL from full precision, nats")
    axes.legend()
    return {"fraction": arguments.fraction, "kl": curves, "caches": results}


def _in_range(flag: str, got: int, count: int) -> None:
    if not 0 <= got < count:
        raise ValueError(f"{flag} must be from 0 to {count - 1} for this model, got {got}")


FIGURES = {"keys": keys, "sensitivity": sensitivity, "boost": boost}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="make_figures.py", description=__doc__.splitlines()[0])
    commands = out.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for name, function in FIGURES.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face directory")
        command.add_argument("--file", type=Path, required=True, help="a text, or a folder of *.txt")
        command.add_argument("--tokens", type=int, default=2048, help="tokens of it (default: %(default)s)")
        command.add_argument("--out", type=Path, required=True, help="folder for NAME.png and NAME.json")
        if name == "boost":
            command.add_argument("--fraction", type=float, nargs="+", default=[0, 0.0625, 0.125, 0.25, 0.5, 1])
            command.add_argument("--selection", nargs="+", default=["magnitude", "random"])
            command.add_argument("--start", type=int, default=512, help="first position counted (default: %(default)s)")
        else:
            command.add_argument("--layer", type=int, required=True)
        if name == "keys":
            command.add_argument("--head", type=int, default=0, help="KV head (default: %(default)s)")
    return out


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        print('make_figures.py: needs matplotlib: pip install "kitty-jax[plots]"', file=sys.stderr)
        return 2
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    try:
        tokens = np.array(read_tokens(arguments.model, arguments.file, arguments.tokens), np.int32)
        figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
        data = FIGURES[arguments.figure](load_model(arguments.model), tokens, arguments, figure.subplots())
    except (ValueError, OSError) as error:
        print(f"make_figures.py {arguments.figure}: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / arguments.figure
    figure.savefig(path.with_suffix(".png"))
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
