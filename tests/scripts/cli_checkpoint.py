"""A tiny random model with a byte-level tokenizer as a Hugging Face directory, for the tests of command lines."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
from safetensors.numpy import save_file

from kitty_jax.models.hf_config import config_to_hf
from kitty_jax.models.params import hf_tensors
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.tokenizer import load_tokenizer
from tests.models.checkpoint_files import byte_level_tokenizer, write_gguf


def write_checkpoint(directory: Path) -> Path:
    """A Qwen3 of one layer and head size 16 in float32, and a tokenizer of 256 bytes, some merges and an eos."""
    metadata = byte_level_tokenizer()
    write_gguf(directory / "tokenizer.gguf", "qwen3", metadata=metadata)
    model_directory = directory / "model"
    load_tokenizer(directory / "tokenizer.gguf").save_pretrained(model_directory)
    sizes = {"embed_dim": 32, "mlp_dim": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    vocab = len(metadata["tokenizer.ggml.tokens"])
    config = dataclasses.replace(
        config_from_name("qwen3-0.6b"), vocab_size=vocab, max_position=256, dtype=jnp.float32, **sizes
    )
    save_file(hf_tensors(random_model(config, seed=3)), model_directory / "model.safetensors")
    (model_directory / "config.json").write_text(json.dumps(config_to_hf(config)))
    return model_directory
