"""`evaluate.py metadata`: what scale and min in fewer bits than float16 would cost, in encodings simulated here.

The package has one of its own, `kitty:metadata=fixed8`, which `evaluate.py text` measures as it is: near `lin,8,8`.

An encoding is KIND,SCALE BITS,MIN BITS,BOOSTED CHANNELS. Kinds: `f16`, the package's default; `lin`, both at equal
steps between the least and the greatest of the page and KV head, which are float16; `log`, the scale at equal steps of
its logarithm; `e4m3`, float8 with a power of two per page and KV head. Codes are computed against the encoded numbers,
and the key shrink is searched with them. The encoding is data and no constant, so a cache compiles once for all.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.cache.query_statistic import squared_queries
from kitty_jax.cache.rotation import rotate
from kitty_jax.pallas_kernels.quantize import channel_scores
from kitty_jax.research.fake_quantize import split_pages
from kitty_jax.research.metrics import compare_hidden, relative_error
from kitty_jax.research.simulation import timed_attention

HELP = "What scale and min in fewer bits than float16 would cost: KL and attention error against bits."
PAGE_BITS = {"f16": 0, "lin": 64, "log": 64, "e4m3": 16}  # what a page and KV head says of its own statistics
LEAST = 1e-12  # takes the place of a logarithm's or a divisor's zero


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How scale and min are stored, and the number of 4-bit key channels."""

    kind: str
    scale_bits: int
    min_bits: int
    boosted: int

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """From KIND,SCALE BITS,MIN BITS,BOOSTED.

        Raises:
            ValueError: the text is of another form.
        """
        kind, *numbers = text.split(",")
        if kind not in PAGE_BITS or len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
            kinds = ", ".join(PAGE_BITS)
            raise ValueError(f"an encoding is KIND,SCALE BITS,MIN BITS,BOOSTED with a kind of {kinds}; got {text!r}")
        out = cls(kind, *map(int, numbers))
        fixed = {"f16": 16, "e4m3": 8}.get(kind)
        if fixed and (out.scale_bits, out.min_bits) != (fixed, fixed):
            raise ValueError(f"{kind} has {fixed} bits each: write {kind},{fixed},{fixed},{out.boosted}")
        if not 1 <= min(out.scale_bits, out.min_bits):
            raise ValueError(f"scale and min need a bit or more each, got {text!r}")
        return out

    def bits(self, head_dim: int, page: int = 128) -> float:
        """Stored bits per element, mean of keys and 2-bit values, each record rounded up to 16 bytes."""
        each = self.scale_bits + self.min_bits
        high_rows = -(-self.boosted // 8) * 8  # the plane of high bits comes in groups of 8 channels
        shared = PAGE_BITS[self.kind] + 8  # and the record's exponent
        key = 2 * page * (head_dim + high_rows) + head_dim * each + 8 * self.boosted + shared
        value = 2 * page * head_dim + page * each + shared
        return sum(-(-x // 128) * 128 for x in (key, value)) / (2 * page * head_dim)

    def numbers(self) -> tuple[Array, ...]:
        """What :func:`attend` takes."""
        parts = (list(PAGE_BITS).index(self.kind), self.scale_bits, self.min_bits, self.boosted)
        return tuple(jnp.float32(x) for x in parts)


def to_half(x: Array) -> Array:
    """x rounded to float16's 11 bits, in float32. Not a cast there and back, which XLA may drop."""
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def to_grid(x: Array, low: Array, high: Array, bits: Array) -> Array:
    """x at the nearest of 2**bits equal steps from low to high, both rounded to float16."""
    low, high = to_half(low), to_half(high)
    levels = jnp.exp2(bits) - 1
    step = jnp.maximum(high - low, LEAST) / levels
    return jnp.clip(jnp.round((x - low) / step), 0, levels) * step + low


def to_e4m3(x: Array) -> Array:
    """x in 4 bits of exponent and 3 of mantissa, times the power of two that puts a page's greatest below 448."""
    top = jnp.max(jnp.abs(x), (-1, -2), keepdims=True)
    shift = jnp.exp2(8 - jnp.floor(jnp.log2(jnp.maximum(top, LEAST))))
    scaled = x * shift
    exponent = jnp.maximum(jnp.floor(jnp.log2(jnp.maximum(jnp.abs(scaled), LEAST))), -6)
    step = jnp.exp2(exponent - 3)
    return jnp.clip(jnp.round(scaled / step) * step, -448, 448) / shift


def quantized(
    x: Array, axis: int, levels: Array | float, shrink: Sequence[float], encoding: tuple[Array, ...]
) -> Array:
    """Pages as a cache with that encoding gives them back.

    Args:
        x: float32 [..., G, D].
        axis: -2 for keys, whose channels have a scale each, -1 for values, whose tokens have.
        levels: 3 or 15, the greatest code; broadcasts against the statistics.
        shrink: factors of the range to try.
        encoding: kind, scale bits and min bits, float32 [].

    Returns:
        float32 [..., G, D].
    """
    kind, scale_bits, min_bits = encoding
    lowest, highest = jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    width = highest - lowest

    def over_page(of, array: Array) -> Array:
        return of(array, (-1, -2), keepdims=True)

    # The ends of the steps hold for every factor of the range, so that one pass finds them.
    low_ends = (
        over_page(jnp.min, lowest + width * ((1 - max(shrink)) / 2)),
        over_page(jnp.max, lowest + width * ((1 - min(shrink)) / 2)),
    )
    scale_ends = over_page(jnp.min, width * min(shrink) / levels), over_page(jnp.max, width * max(shrink) / levels)
    # A channel that never changes must not stretch the logarithm's span: 2**-10 of the greatest ends it.
    log_ends = jnp.maximum(scale_ends[0], scale_ends[1] * 2.0**-10), scale_ends[1]
    log_ends = tuple(jnp.log2(jnp.maximum(end, LEAST)) for end in log_ends)

    def with_range(low: Array, high: Array) -> Array:
        steps = to_grid(low, *low_ends, min_bits)
        low = jnp.select([kind == 0, kind == 3], [to_half(low), to_e4m3(low)], steps)
        scale = jnp.maximum(high - low, 0) / levels
        logged = jnp.exp2(to_grid(jnp.log2(jnp.maximum(scale, LEAST)), *log_ends, scale_bits))
        kinds = [to_half(scale), to_grid(scale, *scale_ends, scale_bits), logged]
        scale = jnp.select([kind == 0, kind == 1, kind == 2], kinds, to_e4m3(scale))
        codes = jnp.clip(jnp.round((x - low) / jnp.where(scale > 0, scale, 1)), 0, levels)
        return codes * scale + low

    best = None
    for factor in shrink:
        cut = width * ((1 - factor) / 2)
        out = with_range(lowest + cut, highest - cut)
        error = jnp.sum(jnp.square(out - x), axis, keepdims=True)
        if best is None:
            best = error, out
        else:
            best = tuple(jnp.where(error < best[0], new, old) for new, old in zip((error, out), best, strict=True))
    return best[1]


def attend(config: CacheConfig, encoding: tuple[Array, ...], q: Array, k: Array, v: Array) -> Array:
    """Causal attention over the simulated cache: q [B, T, N, D], k and v [B, T, K, D] -> [B, T, N, D].

    Of ``config`` boost is not used: the encoding says how many channels.
    """
    *encoding, boosted = encoding
    keys, values = (split_pages(x.astype(jnp.float32), config.sink, config.page) for x in (k, v))

    def back(x: Array, pages: Array) -> Array:
        b, count, heads, page, d = pages.shape
        middle = jnp.swapaxes(pages, 2, 3).reshape(b, count * page, heads, d)
        return jnp.concatenate([x[:, : config.sink], middle, x[:, config.sink + count * page :]], 1)

    if config.selection == "sensitivity":
        squares = jnp.sum(split_pages(squared_queries(q, k.shape[2]), config.sink, config.page), -2)
        scores = channel_scores(keys, "range") * jnp.sqrt(squares)
    else:
        scores = channel_scores(keys, config.selection)
    rank = jnp.argsort(jnp.argsort(-scores, -1), -1)
    levels = jnp.where(rank.astype(jnp.float32) < boosted, 15.0, 3.0)[..., None, :]
    keys = quantized(keys, -2, levels, config.key_shrink, tuple(encoding))
    values = rotate(values) if config.rotate_values else values
    values = quantized(values, -1, 3.0, config.value_shrink, tuple(encoding))
    values = rotate(values) if config.rotate_values else values
    keys, values = back(k.astype(jnp.float32), keys), back(v.astype(jnp.float32), values)
    return timed_attention(q, k, v, keys, values, config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from scripts import eval_text

    eval_text.add_arguments(parser)
    parser.set_defaults(tokens=2048)
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar="KIND,SCALE,MIN,BOOSTED",
        help="several times if wanted, as in log,4,6,8: bits of scale and of min, number of boosted channels. Kinds: "
        + ", ".join(PAGE_BITS),
    )


def run(arguments: argparse.Namespace) -> int:
    from kitty_jax.cache.spec import caches_from_spec
    from kitty_jax.models.checkpoint import load_model
    from scripts.eval_text import read_tokens
    from scripts.task_runs import write_json

    encodings = [Encoding.parse(text) for text in arguments.encoding]
    caches = {name: caches_from_spec(name) for name in arguments.cache}
    for name, cache in caches.items():
        if not isinstance(cache, CacheConfig) or not cache.quantized or cache.value_bits != 2:
            raise ValueError(f"{name}: wanted one quantized cache with 2-bit values for all layers")
        if cache.metadata != "float16":
            raise ValueError(f"{name}: the encodings say how scale and min are stored; leave out {cache.metadata}")
        if cache.selection not in ("magnitude", "range", "variance", "sensitivity"):
            raise ValueError(
                f"{name}: selection {cache.selection!r} is not simulated here; use magnitude or sensitivity"
            )
    tokens = jnp.asarray(read_tokens(arguments.model, arguments.file, arguments.tokens, arguments.start), jnp.int32)
    model = load_model(arguments.model, dtype=arguments.dtype)
    rows = measure(model, tokens, caches, encodings, arguments.start)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.json, rows)
    return 0


def measure(model, tokens: Array, caches: dict[str, CacheConfig], encodings: Sequence[Encoding], start: int) -> list:
    """A row for every cache and encoding, printed as it comes: tokens int32 [T]."""
    none, head_dim = (None,) * model.config.num_layers, model.config.head_dim
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    full_attend = jax.jit(causal_attention)
    hidden, inputs = model(tokens[None], positions, none, lambda _, *qkv: (full_attend(*qkv), qkv))
    full, rows = hidden[0], []
    for name, cache in caches.items():
        jitted = jax.jit(lambda numbers, *qkv, cache=cache: attend(cache, numbers, *qkv))
        for encoding in encodings:
            numbers = encoding.numbers()

            def simulate(_, *qkv, jitted=jitted, numbers=numbers):
                return jitted(numbers, *qkv), None

            errors = [relative_error(full_attend(*qkv), jitted(numbers, *qkv), start) for qkv in inputs]
            row = {"cache": name, **dataclasses.asdict(encoding), "bits": encoding.bits(head_dim, cache.page)}
            row["attn_rel_err"] = float(np.mean([float(x) for x in errors]))
            row |= compare_hidden(model, full, model(tokens[None], positions, none, simulate)[0][0], tokens, start)
            rows.append(row)
            what = f"{name}, {encoding.kind} {encoding.scale_bits} + {encoding.min_bits}, {encoding.boosted} boosted"
            print(
                f"{what}: {row['bits']:.3f} bits, KL {row['kl']:.4f}, attention error {row['attn_rel_err']:.3f}",
                flush=True,
            )
    return rows
