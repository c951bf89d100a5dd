"""Rotary position embedding: its configuration, its frequencies and its application.

The maths is that of the original RoPE (arXiv 2104.09864), of linear interpolation (arXiv 2306.15595), of YaRN (arXiv
2309.00071) and of the LLaMA 3.1 frequency scaling, with the parameters that Hugging Face configurations use.
"""

import dataclasses
import math
import numbers
import reprlib

import jax
import jax.numpy as jnp
import numpy as np

# Type -> the fields that it needs, and those that it may have beside them.
_FIELDS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position"), ()),
    "yarn": (
        ("factor", "original_max_position"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
ROPE_TYPES = tuple(_FIELDS)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Parameters of a rotary embedding. A field that the type does not use is None.

    theta: base of the wavelengths. type: one of ROPE_TYPES. factor: how many times the context is stretched.
    original_max_position: context length before stretching (llama3, yarn).
    low_freq_factor, high_freq_factor: band edges of llama3, as original_max_position / wavelength.
    beta_fast, beta_slow: band edges of YaRN, in rotations over original_max_position (None: 32 and 1); truncate rounds
      them outwards (None: yes).
    attention_factor: YaRN's multiplier of cos and sin; None derives it from factor, mscale and mscale_all_dim.

    Raises one ValueError that names unknown types, and missing, surplus and impossible values.
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float | None = None
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self):
        if self.type not in ROPE_TYPES:
            raise ValueError(f"RoPE type {self.type!r} is not supported; supported types: {', '.join(ROPE_TYPES)}")
        required, optional = _FIELDS[self.type]
        given = {name: value for name, value in vars(self).items() if name != "type" and value is not None}
        missing = [name for name in required if name not in given]
        surplus = [name for name in given if name not in ("theta", *required, *optional)]
        problems = [f"missing {missing}"] * bool(missing) + [f"surplus {surplus}"] * bool(surplus)
        problems += [
            f"{name} = {reprlib.repr(value)} (wanted {wanted})"
            for name, value in given.items()
            if (wanted := _wanted(name, value))
        ]
        if not problems and self.theta <= 1:
            problems.append(f"theta = {self.theta} (wanted a number above 1)")
        if not problems and self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            problems.append(
                f"high_freq_factor = {self.high_freq_factor} (wanted more than {self.low_freq_factor}, low_freq_factor)"
            )
        if problems:
            raise ValueError(f"RoPE of type {self.type!r}: {', '.join(problems)}")


def _wanted(name: str, value) -> str | None:
    """What a field wants, if `value` is not that."""
    if name == "truncate":
        return None if isinstance(value, bool) else "true or false"
    kind, text = (numbers.Integral, "whole") if name == "original_max_position" else (numbers.Real, "finite")
    # A bool is no number, and 10 ** 400 no finite float. Hugging Face takes an mscale of 0 for none.
    is_number = isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 1e300
    fits = is_number and (value > 0 or (value == 0 and name.startswith("mscale")))
    return None if fits else f"a {text} number above 0"


def _yarn_frequencies(config: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN, "NTK-by-parts" (arXiv 2309.00071, section 3.2): base [D/2] float64 -> frequencies [D/2]."""

    def dimension_of(rotations: float) -> float:
        length = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast or 32.0), dimension_of(config.beta_slow or 1.0)
    if config.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # one step instead of a division by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return base / config.factor * interpolated + base * (1 - interpolated)


def _llama3_frequencies(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    """The LLaMA 3.1 scaling: long wavelengths are stretched, short ones kept, a band between interpolated."""
    rotations = config.original_max_position * base / (2 * math.pi)
    kept = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
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
