"""Rotary scaling of a GGUF file as a Hugging Face `rope_scaling` dict."""

import math
from typing import Any

import numpy as np

from kitty_jax.models.gguf_format import GgufContainer, GgufError

ROPE_FACTORS = "rope_freqs.weight"
# The one set of parameters, apart from `factor`, that published LLaMA 3.1, 3.2 and 3.3 checkpoints use.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling_of(container: GgufContainer, architecture: str, head_dim: int, theta: float) -> dict[str, Any] | None:
    """None for plain rotary embedding, else the dict for `rope_scaling`: types "linear", "yarn" and "llama3"."""
    prefix = f"{architecture}.rope."
    keys = {k.removeprefix(prefix): v for k, v in container.metadata.items() if k.startswith(prefix)}
    kind = keys.get("scaling.type") or ("linear" if "scale_linear" in keys or "scaling.factor" in keys else "none")
    factor = float(keys.get("scaling.factor", keys.get("scale_linear", 1.0)))
    if ROPE_FACTORS in container.shapes:
        if kind != "none":
            raise GgufError(
                f"{container.path}: both {ROPE_FACTORS} and rotary scaling of type {kind!r} are given; only one is "
                "supported."
            )
        return _llama3_from_factors(container, head_dim, theta)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(container, keys, factor)
    raise GgufError(
        f"{container.path}: rotary scaling of type {kind!r} is not supported; supported: none, linear, yarn."
    )


def _yarn(container: GgufContainer, keys: dict[str, Any], factor: float) -> dict[str, Any]:
    if "scaling.original_context_length" not in keys:
        raise GgufError(f"{container.path}: yarn rotary scaling without 'rope.scaling.original_context_length'.")
    if keys.get("scaling.yarn_log_multiplier") or keys.get("scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise GgufError(
            f"{container.path}: yarn with yarn_log_multiplier or an extrapolation factor other than 1 is not supported."
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(keys["scaling.original_context_length"]),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"scaling.yarn_{name}" in keys:
            scaling[name] = float(keys[f"scaling.yarn_{name}"])
    attention = float(keys.get("scaling.yarn_attn_factor", keys.get("scaling.attn_factor", 1.0)))
    if attention != 1.0:
        # GGUF's number multiplies the usual 0.1 ln(factor) + 1; Hugging Face's replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_from_factors(container: GgufContainer, head_dim: int, theta: float) -> dict[str, Any] | None:
    """LLaMA 3's scaling parameters, recovered from the frequency divisors they give; other divisors are refused."""
    stored = container.read(ROPE_FACTORS).reshape(-1)
    if stored.shape != (head_dim // 2,):
        raise GgufError(
            f"{container.path}: {ROPE_FACTORS} has {stored.size} values; head size {head_dim} needs {head_dim // 2}."
        )
    if np.all(stored == 1.0):
        return None
    scaling = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3}
    expected = llama3_factors(scaling, head_dim, theta)
    if not np.allclose(stored, expected, rtol=1e-4):
        worst = int(np.argmax(np.abs(stored / expected - 1.0)))
        raise GgufError(
            f"{container.path}: {ROPE_FACTORS} does not follow LLaMA 3's rule with {scaling}: divisor {worst} is "
            f"{stored[worst]:.6g}, the rule gives {expected[worst]:.6g}. Other frequency divisors are not supported; "
            "convert from the original checkpoint."
        )
    return scaling


def llama3_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """Frequency divisors [D/2] by LLaMA 3's rule: 1 for short waves, `factor` for long ones, a ramp between."""
    wavelengths = 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - ramp) / scaling["factor"] + ramp)
