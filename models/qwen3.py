"""Qwen3, and Qwen2 / Qwen2.5: configurations named for their checkpoints, and reading of their config.json.

Qwen3 norms every query and key head before RoPE; Qwen2 has biases on the query, key and value projections instead.
Sizes are those of the checkpoints' published config.json.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kitty_jax.models import hf_config
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.rope import RopeConfig

# Hugging Face's classes default Qwen3's head size to 128, whatever the width of the model.
QWEN3 = hf_config.Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, default_head_dim=128)
QWEN2 = hf_config.Family("qwen2", "Qwen2ForCausalLM", qk_norm=False, qkv_bias=True)


def from_hf(config: Mapping[str, Any], dtype=None, ignore: Collection[str] = ()) -> DecoderConfig:
    """config.json of model type "qwen3" or "qwen2" -> DecoderConfig; see hf_config.read."""
    families = {family.model_type: family for family in (QWEN3, QWEN2)}
    kind = config.get("model_type")
    if kind not in families:
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(families)}")
    return hf_config.read(families[kind], config, dtype, ignore)


def _qwen3(embed: int, mlp: int, layers: int, heads: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=151_936,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_position=40_960,
        rope=RopeConfig(theta=1e6),
        rms_eps=1e-6,
        qk_norm=True,
        qkv_bias=False,
        tied_head=tied,
    )


def _qwen2_5(embed: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        family="qwen2",
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=embed // heads,
        max_position=32_768,
        rope=RopeConfig(theta=1e6),
        rms_eps=1e-6,
        qk_norm=False,
        qkv_bias=True,
        tied_head=tied,
    )


def qwen3_0_6b() -> DecoderConfig:
    """Qwen/Qwen3-0.6B."""
    return _qwen3(1024, 3072, 28, 16, tied=True)


def qwen3_1_7b() -> DecoderConfig:
    """Qwen/Qwen3-1.7B."""
    return _qwen3(2048, 6144, 28, 16, tied=True)


def qwen3_4b() -> DecoderConfig:
    """Qwen/Qwen3-4B."""
    return _qwen3(2560, 9728, 36, 32, tied=True)


def qwen3_8b() -> DecoderConfig:
    """Qwen/Qwen3-8B."""
    return _qwen3(4096, 12_288, 36, 32, tied=False)


def qwen3_14b() -> DecoderConfig:
    """Qwen/Qwen3-14B."""
    return _qwen3(5120, 17_408, 40, 40, tied=False)


def qwen3_32b() -> DecoderConfig:
    """Qwen/Qwen3-32B."""
    return _qwen3(5120, 25_600, 64, 64, tied=False)


def qwen2_5_0_5b() -> DecoderConfig:
    """Qwen/Qwen2.5-0.5B-Instruct (and Qwen/Qwen2-0.5B-Instruct)."""
    return _qwen2_5(896, 4864, 24, 14, 2, 151_936, tied=True)


def qwen2_5_1_5b() -> DecoderConfig:
    """Qwen/Qwen2.5-1.5B-Instruct (and Qwen/Qwen2-1.5B-Instruct)."""
    return _qwen2_5(1536, 8960, 28, 12, 2, 151_936, tied=True)


def qwen2_5_7b() -> DecoderConfig:
    """Qwen/Qwen2.5-7B-Instruct (and Qwen/Qwen2-7B-Instruct)."""
    return _qwen2_5(3584, 18_944, 28, 28, 4, 152_064, tied=False)
