"""float16 or bfloat16 for scale and min? Quantizes a model's real keys with both and prints the error of each.

    python scripts/metadata_error.py --model PATH --file TEXT [--tokens N]

Two settings: the keys as they are, and with 1,000 added to channel 0 of every KV head (QK-norm weights and biases do
such things to single channels). The error is the root mean square of key - dequantized key, over that with float32
metadata.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.tokenizer import load_tokenizer

PAGE = 128


def keys_of(model, tokens: np.ndarray) -> list[np.ndarray]:
    """Keys after rotary embedding of every layer: float32 [T, K, D] each."""

    def attend(cache, q, k, v):
        out, _ = causal_attend(None, q, k, v)
        return out, k[0].astype(jnp.float32)

    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    _, keys = jax.jit(lambda m: m(ids, positions, (None,) * m.config.num_layers, attend))(model)
    return [np.asarray(k) for k in keys]


def rms_error(pages: np.ndarray, metadata) -> float:
    """Root mean square error of 2-bit keys [pages, G, K, D] with scale and min rounded to ``metadata``."""
    low = pages.min(1, keepdims=True).astype(metadata).astype(np.float32)
    scale = (np.maximum(pages.max(1, keepdims=True) - low, 0) / 3).astype(metadata).astype(np.float32)
    codes = np.clip(np.rint((pages - low) / np.where(scale > 0, scale, 1)), 0, 3)
    return float(np.sqrt(np.mean((codes * scale + low - pages) ** 2, dtype=np.float64)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory or .gguf file")
    parser.add_argument("--file", required=True, help="text file")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text (default 1024)")
    args = parser.parse_args()
    with open(args.file, encoding="utf-8") as file:
        tokens = load_tokenizer(args.model)(file.read(), add_special_tokens=False)["input_ids"][: args.tokens]
    if len(tokens) < PAGE:
        parser.error(f"{args.file} has {len(tokens)} tokens; at least one page of {PAGE} is needed")
    keys = keys_of(load_model(args.model), tokens)
    count = len(tokens) // PAGE
    pages = np.stack(keys)[:, : count * PAGE].reshape(-1, PAGE, *keys[0].shape[1:])
    shifted = pages.copy()
    shifted[..., 0] += 1000
    print(f"{len(keys)} layers, {count} pages of {PAGE} tokens; error relative to float32 metadata\n")
    print("| keys | float16 | bfloat16 |\n|---|---|---|")
    for name, x in (
        ("as they are", pages),
        ("channel 0 at 1,000, all channels", shifted),
        ("that channel", shifted[..., :1]),
    ):
        exact = rms_error(x, np.float32)
        print(f"| {name} | {rms_error(x, np.float16) / exact:.4f} | {rms_error(x, jnp.bfloat16) / exact:.4f} |")


if __name__ == "__main__":
    main()
