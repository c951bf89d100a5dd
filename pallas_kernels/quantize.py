"""Quantization of pages and its inverse: the pure reference, which is also the fallback where no kernel can run.

Keys: each channel of a page on its own over the G tokens; the C channels of highest score with 4 bits, the others with
2. Values: each token on its own over its D channels, with 2 or 4 bits. Asymmetric (Kitty, arXiv 2511.18643, section 3;
KIVI, arXiv 2402.02750):

    min   = float16(lowest)
    scale = float16((highest - min) / (2**bits - 1))
    code  = clamp(round_half_even((x - min) / scale), 0, 2**bits - 1)

Codes are computed against the *stored* (rounded) min and scale, so that the rounding of the metadata is compensated and
not added.

float16 metadata ends at 65,504 and bfloat16 models do not. A page whose largest magnitude is not below 2**13 (keys) or
2**5 (values) is divided by the smallest power of two that brings it there, and the power is stored as the record's
``exponent``. The limits leave room for what the attention kernel multiplies in float16: 4 * scale * q, \\|q\\| <= 1,
and 4 * scale * weight with weights up to 2**8.

Sums over a page are taken in a fixed order (:func:`tree_sum`), so that a page's scores, and with them its channels, do
not depend on how many pages a program handles at once.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.pallas_kernels import packing
from kitty_jax.pallas_kernels.page_format import PageFormat, join_record, split_record

KEY_LIMIT_LOG2 = 13
VALUE_LIMIT_LOG2 = 5

Score = Literal["magnitude", "variance", "range"]
SCORES: tuple[str, ...] = ("magnitude", "variance", "range")


def power_of_two(exponent: Array) -> Array:
    """2**exponent as float32, exactly, for integers from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def tree_sum(x: Array, axis: int) -> Array:
    """Sum along ``axis`` by repeated halving: the same bits in every program, unlike a reduction XLA may reorder."""
    x = jnp.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        odd = x[2 * half :]
        x = x[:half] + x[half : 2 * half]
        if odd.shape[0]:
            x = jnp.concatenate([x[:1] + odd, x[1:]])
    return x[0]


def channel_scores(keys: Array, score: Score = "magnitude") -> Array:
    """Score of every channel of a page: keys [..., G, D] -> float32 [..., D].

    ``magnitude`` is the paper's: the mean over the page of \\|k\\|. ``variance`` and ``range`` (highest - lowest) are
    alternatives.
    """
    x = keys.astype(jnp.float32)
    count = np.float32(x.shape[-2])
    if score == "magnitude":
        return tree_sum(jnp.abs(x), -2) / count
    if score == "variance":
        centred = x - (tree_sum(x, -2) / count)[..., None, :]
        return tree_sum(jnp.square(_short(centred)), -2) / count
    if score == "range":
        return jnp.max(x, -2) - jnp.min(x, -2)
    raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")


def channel_errors(keys: Array, shrink: tuple[float, ...] = (1.0,)) -> Array:
    """By how much 4 bits instead of 2 lower each channel's squared error: [..., G, D] -> float32 [..., D]."""
    x, _ = _in_range(keys, KEY_LIMIT_LOG2)  # pages compare with none

    def error(is_4bit: bool) -> Array:
        codes, scale, low = _quantize(x, -2, np.full((1, 1), is_4bit), shrink)
        return tree_sum(jnp.square(_short(codes * scale + low - x)), -2)

    return error(False) - error(True)


def select_channels(scores: Array, count: int) -> Array:
    """The ``count`` channels of highest score in ascending order: [..., D] -> uint8 [..., count].

    Ties go to the lowest channel.
    """
    _, channels = jax.lax.top_k(scores, count)
    return jnp.sort(channels.astype(jnp.int32), axis=-1).astype(jnp.uint8)


def boost_index(channels: Array, head_dim: int) -> Array:
    """The paper's Boost_IDX: each channel's row in the high plane, or 255. uint8 [..., C] -> uint8 [..., D]."""
    hit = channels[..., None, :].astype(jnp.int32) == jnp.arange(head_dim, dtype=jnp.int32)[:, None]
    slot = jnp.argmax(hit, axis=-1) if channels.shape[-1] else jnp.zeros(hit.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(hit, -1), slot, 255).astype(jnp.uint8)


def page_exponent(x: Array, limit_log2: int) -> Array:
    """Smallest e >= 0 with max \\|x\\| < 2**(limit_log2 + e), over the last two axes: [..., G, D] -> int8 [..., 1]."""
    top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(-1, -2))
    bits = jax.lax.bitcast_convert_type(top, jnp.int32)
    return jnp.maximum((bits >> 23) - 126 - limit_log2, 0).astype(jnp.int8)[..., None]


def _in_range(x: Array, limit_log2: int) -> tuple[Array, Array]:
    """(x as float32 divided by 2**exponent, exponent): [..., G, D] and int8 [..., 1] (:func:`page_exponent`)."""
    exponent = page_exponent(x, limit_log2)
    return x.astype(jnp.float32) * power_of_two(-exponent.astype(jnp.int32))[..., None], exponent


def _short(x: Array) -> Array:
    """x to 12 significant bits: its square is exact in float32, so no fused multiply-add changes a sum of squares."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)


def _half(x: Array) -> Array:
    """x rounded to float16, as float32.

    XLA may drop a conversion to float16 and back (it allows itself excess precision, and on GPUs does so): the number
    comes back through its bits.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.uint32)
    size = bits & np.uint32(0x7FFF)
    normal = jax.lax.bitcast_convert_type((size << 13) + np.uint32(112 << 23), jnp.float32)
    subnormal = size.astype(jnp.float32) * np.float32(2.0**-24)
    value = jnp.where(size < 0x400, subnormal, normal)
    return jnp.where(bits == size, value, -value)


def _round_quotient(x: Array, step: Array, levels: Array) -> Array:
    """clamp(round_half_even(x / step), 0, levels) of the exact quotient; x float32, step positive with at most 11 bits.

    XLA turns a division by a broadcast array into a product with its reciprocal, which is off by one code at ties. So
    the product is only a guess; it is corrected against half a step, where every operation is exact.
    """
    guess = jnp.clip(jnp.round(x * (1 / step)), 0, levels)
    rest, half = x - guess * step, step * np.float32(0.5)
    is_odd = guess != 2 * jnp.floor(guess * np.float32(0.5))
    up = (rest > half) | ((rest == half) & is_odd)
    down = (rest < -half) | ((rest == -half) & is_odd)
    return jnp.clip(jnp.where(up, guess + 1, jnp.where(down, guess - 1, guess)), 0, levels)


def _quantize(
    x: Array, axis: int, is_4bit: Array | np.ndarray, shrink: tuple[float, ...]
) -> tuple[Array, Array, Array]:
    """(codes, scale, min) of x along ``axis``, float32; the bool ``is_4bit`` broadcasts against the statistics.

    Scale and min are numbers that float16 holds.

    Written so that contracting a product and a sum into a fused multiply-add changes no bit: every product that meets a
    sum is exact.
    """
    lowest, highest = jnp.min(x, axis, keepdims=True), jnp.max(x, axis, keepdims=True)
    levels = jnp.where(is_4bit, np.float32(15), np.float32(3))
    reciprocal = jnp.where(is_4bit, np.float32(1 / 15), np.float32(1 / 3))
    best = None
    for factor in shrink:
        start, end = lowest, highest
        if shrink != (1.0,):
            cut = jax.lax.reduce_precision(highest - lowest, 8, 11) * jnp.float32(jnp.bfloat16((1 - factor) / 2))
            start, end = lowest + cut, highest - cut
        # Which of -0 and +0 is the smaller is left to the order of the reduction: one zero makes one record.
        low = _half(jnp.where(start == 0, 0, start))
        scale = _half(jnp.maximum(end - low, 0) * reciprocal)
        codes = _round_quotient(x - low, jnp.where(scale > 0, scale, 1), levels)
        error = jnp.expand_dims(tree_sum(jnp.square(_short(codes * scale + low - x)), axis), axis)
        attempt = (error, codes, scale, low)
        if best is not None:
            is_better = error < best[0]
            attempt = tuple(jnp.where(is_better, new, old) for new, old in zip(attempt, best, strict=True))
        best = attempt
    return best[1:]


def _codes_and_metadata(
    x: Array, axis: int, is_4bit: Array | np.ndarray, shrink: tuple[float, ...], limit_log2: int
) -> tuple[Array, dict[str, Array]]:
    """(codes uint32 [..., G, D]; the parts scale, min and exponent of the records)."""
    x, exponent = _in_range(x, limit_log2)
    codes, scale, low = _quantize(x, axis, is_4bit, shrink)
    scale, low = (jnp.squeeze(number, axis).astype(jnp.float16) for number in (scale, low))
    return codes.astype(jnp.uint32), {"scale": scale, "min": low, "exponent": exponent}


def _check(name: str, x: Array, fmt: PageFormat) -> None:
    if x.shape[-2:] != (fmt.page, fmt.head_dim):
        raise ValueError(f"{name} must end in [page, head_dim] = {[fmt.page, fmt.head_dim]}, got shape {x.shape}")


def quantize_keys(
    keys: Array,
    fmt: PageFormat,
    *,
    score: Score = "magnitude",
    weights: Array | None = None,
    scores: Array | None = None,
    shrink: tuple[float, ...] = (1.0,),
) -> Array:
    """Quantizes and packs pages of keys.

    Args:
        keys: [..., G, D], any float dtype, one KV head and page per leading index.
        fmt: page format.
        score: how channels are scored (:func:`channel_scores`).
        weights: optional float [..., D] (broadcast), multiplied into the scores.
        scores: optional float32 [..., D] (broadcast) that replaces the score altogether (random or fixed channels).
        shrink: factors of the range to try per channel; the one of least squared error is kept, ties to the first.

    Returns:
        uint32 [..., fmt.key_words], key records.
    """
    _check("keys", keys, fmt)
    batch = keys.shape[:-2]
    if fmt.boosted in (0, fmt.head_dim):
        channels = jnp.broadcast_to(jnp.arange(fmt.boosted, dtype=jnp.uint8), (*batch, fmt.boosted))
    else:
        if scores is None:
            scores = channel_scores(keys, score)
        if weights is not None:
            scores = scores * weights.astype(jnp.float32)
        channels = select_channels(jnp.broadcast_to(scores, (*batch, fmt.head_dim)), fmt.boosted)
    is_boosted = jnp.any(channels[..., None] == jnp.arange(fmt.head_dim, dtype=jnp.uint8), -2)  # [..., D]
    codes, metadata = _codes_and_metadata(keys, -2, is_boosted[..., None, :], shrink, KEY_LIMIT_LOG2)
    rows = jnp.broadcast_to(channels.astype(jnp.int32)[..., None, :], (*batch, fmt.page, fmt.boosted))
    low = packing.pack_keys(codes & np.uint32(3))
    high = packing.pack_keys(jnp.take_along_axis(codes, rows, -1) >> np.uint32(2))
    return join_record({"low": low, "high": high, "channels": channels, **metadata}, fmt.key_parts)


def quantize_values(values: Array, fmt: PageFormat, *, shrink: tuple[float, ...] = (1.0,)) -> Array:
    """Quantizes and packs pages of values: [..., G, D], any float dtype -> records, uint32 [..., fmt.value_words].

    ``shrink``: factors of the range to try per token, as in :func:`quantize_keys`.
    """
    _check("values", values, fmt)
    is_4bit = np.full((1, 1), fmt.value_bits == 4)
    codes, metadata = _codes_and_metadata(values, -1, is_4bit, shrink, VALUE_LIMIT_LOG2)
    low = packing.pack_values(codes & np.uint32(3))
    high = packing.pack_values(codes >> np.uint32(2)) if fmt.value_bits == 4 else low[..., :0]
    return join_record({"low": low, "high": high, **metadata}, fmt.value_parts)


def _restore(codes: Array, parts: dict[str, Array], axis: int) -> Array:
    scale, low = (jnp.expand_dims(parts[name].astype(jnp.float32), axis) for name in ("scale", "min"))
    return (codes.astype(jnp.float32) * scale + low) * power_of_two(parts["exponent"])[..., None]


def key_codes(parts: dict[str, Array], fmt: PageFormat) -> Array:
    """Codes 0..15 of key records' parts (:func:`.page_format.split_record`): uint32 [..., G, D]."""
    codes = packing.unpack_keys(parts["low"], fmt.page, fmt.head_dim)
    if not fmt.boosted:
        return codes
    high = packing.unpack_keys(parts["high"], fmt.page, fmt.boosted)
    if fmt.boosted == fmt.head_dim:
        return codes + 4 * high
    slot = boost_index(parts["channels"], fmt.head_dim)[..., None, :]  # [..., 1, D]
    index = jnp.broadcast_to(jnp.minimum(slot.astype(jnp.int32), fmt.boosted - 1), codes.shape)
    return codes + jnp.where(slot == 255, 0, 4 * jnp.take_along_axis(high, index, -1))


def value_codes(parts: dict[str, Array], fmt: PageFormat) -> Array:
    """Codes 0..15 of value records' parts: uint32 [..., G, D]."""
    codes = packing.unpack_values(parts["low"], fmt.page, fmt.head_dim)
    if fmt.value_bits == 4:
        codes = codes + 4 * packing.unpack_values(parts["high"], fmt.page, fmt.head_dim)
    return codes


def dequantize_keys(records: Array, fmt: PageFormat) -> Array:
    """Key records uint32 [..., fmt.key_words] -> float32 [..., G, D] (Algorithm 1 of the paper)."""
    parts = split_record(records, fmt.key_parts)
    return _restore(key_codes(parts, fmt), parts, -2)


def dequantize_values(records: Array, fmt: PageFormat) -> Array:
    """Value records uint32 [..., fmt.value_words] -> float32 [..., G, D]."""
    parts = split_record(records, fmt.value_parts)
    return _restore(value_codes(parts, fmt), parts, -1)
