"""LLaMA 3, 3.1, 3.2, 3.3 and other models of the plain "llama" type: named configurations, and reading of config.json.

Sizes are those of the checkpoints' published config.json.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kitty_jax.models import hf_config
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.rope import RopeConfig

LLAMA = hf_config.Family("llama", "LlamaForCausalLM", qk_norm=False, qkv_bias=False)


def from_hf(config: Mapping[str, Any], dtype=None, ignore: Collection[str] = ()) -> DecoderConfig:
    """config.json of model type "llama" -> DecoderConfig; see hf_config.read."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type {config.get('model_type')!r} is not 'llama'")
    return hf_config.read(LLAMA, config, dtype, ignore)


def _llama3(
    embed: int, mlp: int, layers: int, heads: int, head_dim: int, *, rope_factor: float | None, tied: bool
) -> DecoderConfig:
    """rope_factor: how far positions are stretched to reach 131,072; None for the first models, of 8,192 positions."""
    scaling = {
        "type": "llama3",
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 8192,
    }
    return DecoderConfig(
        family="llama",
        vocab_size=128_256,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position=8192 if rope_factor is None else 131_072,
        rope=RopeConfig(theta=5e5, **({} if rope_factor is None else scaling)),
        rms_eps=1e-5,
        qk_norm=False,
        qkv_bias=False,
        tied_head=tied,
    )


def llama3_8b() -> DecoderConfig:
    """meta-llama/Meta-Llama-3-8B and its Instruct version."""
    return _llama3(4096, 14_336, 32, 32, 128, rope_factor=None, tied=False)


def llama3_70b() -> DecoderConfig:
    """meta-llama/Meta-Llama-3-70B and its Instruct version."""
    return _llama3(8192, 28_672, 80, 64, 128, rope_factor=None, tied=False)


def llama3_1_8b() -> DecoderConfig:
    """meta-llama/Llama-3.1-8B and its Instruct version."""
    return _llama3(4096, 14_336, 32, 32, 128, rope_factor=8.0, tied=False)


def llama3_2_1b() -> DecoderConfig:
    """meta-llama/Llama-3.2-1B and its Instruct version."""
    return _llama3(2048, 8192, 16, 32, 64, rope_factor=32.0, tied=True)


def llama3_2_3b() -> DecoderConfig:
    """meta-llama/Llama-3.2-3B and its Instruct version."""
    return _llama3(3072, 8192, 28, 24, 128, rope_factor=32.0, tied=True)


def llama3_3_70b() -> DecoderConfig:
    """meta-llama/Llama-3.3-70B-Instruct (and Llama-3.1-70B)."""
    return _llama3(8192, 28_672, 80, 64, 128, rope_factor=8.0, tied=False)


def smollm2_135m() -> DecoderConfig:
    """HuggingFaceTB/SmolLM2-135M and its Instruct version."""
    return DecoderConfig(
        family="llama",
        vocab_size=49_152,
        embed_dim=576,
        mlp_dim=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope=RopeConfig(theta=1e5),
        rms_eps=1e-5,
        qk_norm=False,
        qkv_bias=False,
        tied_head=True,
    )
