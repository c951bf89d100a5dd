"""Rotary position embedding: its configuration, its frequencies and its application.

The maths is that of the original RoPE (arXiv 2104.09864), of linear interpolation (arXiv 2306.15595), of YaRN (arXiv
2309.00071) and of the LLaMA 3.1 frequency scaling, with the parameters that Hugging Face configurations use.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.models.config_values import checked

DEFAULT_THETA = 10_000.0

# Which keys each type reads, beyond rope_theta and the type itself. The first tuple is required.
_KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
ROPE_TYPES = tuple(_KEYS)
# Keys of the block whatever its type.
_COMMON = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
# Kinds of `checked` for the keys that are not a number above 0. Hugging Face takes an mscale of 0 for none.
_VALUES = {
    "original_max_position_embeddings": "whole",
    "mscale": "not negative",
    "mscale_all_dim": "not negative",
    "truncate": "bool",
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Parameters of a rotary embedding. A field that the type does not use stays at its default.

    theta: base of the wavelengths. type: one of ROPE_TYPES. factor: how many times the context is stretched.
    original_max_position: context length before stretching (llama3, yarn).
    low_freq_factor, high_freq_factor: band edges of llama3, as original_max_position / wavelength.
    beta_fast, beta_slow: band edges of YaRN, in rotations over original_max_position; truncate rounds them outwards.
    attention_factor: YaRN's multiplier of cos and sin; None derives it from factor, mscale and mscale_all_dim.
    """

    theta: float = DEFAULT_THETA
    type: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.type not in _KEYS:
            raise ValueError(f"RoPE type {self.type!r} is not supported; supported types: {', '.join(ROPE_TYPES)}")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"rope theta (rope_theta) must be finite and above 1, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.type in ("llama3", "yarn") and not (self.original_max_position and self.original_max_position > 0):
            raise ValueError(
                f"rope type {self.type!r} needs original_max_position, the context length before scaling (a positive"
                f" number of tokens); got {self.original_max_position}"
            )
        if self.type == "yarn" and not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                f"rope type 'yarn' needs positive beta_fast and beta_slow, got {self.beta_fast} and {self.beta_slow}"
            )
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope type 'llama3' needs high_freq_factor > low_freq_factor, got {self.high_freq_factor} and"
                f" {self.low_freq_factor}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read the rotary part of a Hugging Face config.json.

        Takes the older form (``rope_theta`` beside ``rope_scaling`` with "rope_type" or "type") and the newer one
        (everything in ``rope_parameters``). Raises one ValueError that names unknown types, missing and unknown keys,
        and values of a wrong type or out of range.
        """
        problems: list[str] = []
        rope = read_rope(config, problems)
        if rope is None:
            raise ValueError("; ".join(problems))
        return rope

    def to_hf(self) -> dict[str, Any]:
        """The ``rope_parameters`` block of a Hugging Face config.json that reads back as this configuration."""
        out: dict[str, Any] = {"rope_type": self.type, "rope_theta": self.theta}
        required, optional = _KEYS[self.type]
        for key in (*required, *optional):
            value = getattr(self, key.removesuffix("_embeddings"))
            if value is not None:
                out[key] = value
        return out


def read_rope(config: Mapping[str, Any], problems: list[str]) -> RopeConfig | None:
    """As `RopeConfig.from_hf`, but what is wrong is appended to problems, each naming its key, and None returned."""
    before = len(problems)
    old, new = (checked(config, key, "object", problems) for key in ("rope_scaling", "rope_parameters"))
    if old and new:
        problems.append("config has both rope_scaling and rope_parameters; keep one of them")
        return None
    where = "rope_scaling" if old else "rope_parameters"
    given = dict(old or new or {})
    old_name, new_name = (checked(given, key, "string", problems, where) for key in ("type", "rope_type"))
    if old_name and new_name and old_name != new_name:
        problems.append(f"{where} names two types, {new_name!r} and {old_name!r}; keep one of them")
    kind = new_name or old_name or "default"
    if kind not in _KEYS:
        problems.append(f"{where} type {kind!r} is not supported; supported types: {', '.join(ROPE_TYPES)}")
    readable = len(problems) == before
    for block, name in ((config, ""), (given, where)):
        if checked(block, "partial_rotary_factor", "positive", problems, name) not in (None, 1.0):
            problems.append(f"partial_rotary_factor {block['partial_rotary_factor']} is not supported; only 1.0 is")
    inner, outer = (checked(b, "rope_theta", "positive", problems, n) for b, n in ((given, where), (config, "")))
    values = {"theta": DEFAULT_THETA if inner is None and outer is None else outer if inner is None else inner}
    if not readable:  # which keys belong to the block depends on its type
        return None

    required, optional = _KEYS[kind]
    by_ratio = kind == "yarn" and "factor" in given and given["factor"] is None
    missing = [key for key in required if given.get(key) is None and not (by_ratio and key == "factor")]
    unknown = sorted(set(given) - {*required, *optional, *_COMMON}, key=str)
    if missing or unknown:
        problems.append(
            f"{where} of type {kind!r}: missing keys {missing}, unknown keys {unknown}; it takes"
            f" {['rope_theta', *required, *optional]}"
        )
    for key in (*required, *optional):
        values[key] = checked(given, key, _VALUES.get(key, "positive"), problems, where)
    if kind in ("llama3", "yarn"):
        longest = checked(config, "max_position_embeddings", "whole", problems)
        # A value beside the rotary block wins over one inside it, and the context length is the last resort: this
        # is the order in which Hugging Face resolves them.
        inside = values.pop("original_max_position_embeddings")
        original = checked(config, "original_max_position_embeddings", "whole", problems) or inside or longest
        values["original_max_position"] = original
        if by_ratio and longest and original:
            values["factor"] = longest / original
        elif by_ratio:
            problems.append(f"{where}.factor = None needs max_position_embeddings, of which it takes the ratio")
    if len(problems) > before:
        return None
    try:
        return RopeConfig(type=kind, **{key: value for key, value in values.items() if value is not None})
    except ValueError as error:
        problems.append(str(error))
        return None


def _yarn_frequencies(config: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN, "NTK-by-parts" (arXiv 2309.00071, section 3.2): base [D/2] float64 -> frequencies [D/2]."""

    def dimension_of(rotations: float) -> float:
        length = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # one step instead of a division by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return base / config.factor * interpolated + base * (1 - interpolated)


def _llama3_frequencies(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    """The LLaMA 3.1 scaling: long wavelengths are stretched, short ones kept, a band between interpolated."""
    turns = config.original_max_position * base / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return (1 - kept) * base / config.factor + kept * base


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per token of every rotated pair, float32 [D/2], in radians. Computed in float64 and rounded once."""
    base = config.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.type == "linear":
        base = base / config.factor
    elif config.type == "llama3":
        base = _llama3_frequencies(config, base)
    elif config.type == "yarn":
        base = _yarn_frequencies(config, base, head_dim)
    return base.astype(np.float32)


def attention_factor(config: RopeConfig) -> float:
    """The number that cos and sin are multiplied by: 1 except for YaRN (arXiv 2309.00071, equation 22)."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return float(config.attention_factor)

    def magnitude(scale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * scale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def cos_sin(config: RopeConfig, positions: jax.Array, head_dim: int, dtype) -> tuple[jax.Array, jax.Array]:
    """positions int32 [B, T] -> cos, sin [B, T, 1, D/2] in dtype, computed in float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, head_dim)
    factor = attention_factor(config)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    return cos.astype(dtype)[:, :, None], sin.astype(dtype)[:, :, None]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, T, heads, D] by cos, sin [B, T, 1, D/2]. Channel d is paired with channel d + D/2."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
