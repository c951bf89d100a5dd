"""The small model of train_recall.py: its first weights, and its checkpoint with a tokenizer of whole words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.hf_config import config_to_hf
from kitty_jax.models.params import hf_tensors
from kitty_jax.models.registry import random_model
from kitty_jax.models.safetensors_dir import CONFIG, WEIGHTS, write_safetensors
from kitty_jax.models.tokenizer import import_transformers
from kitty_jax.research.tasks.lookup import Lookup

TASK = "recall_task.json"  # beside the weights: what the model was trained on
LOOK_BACK = 5.0  # of the first layer's queries and keys, the constant component's size against the random one's
LOOK_BACK_SCALE = 2.5  # and the first weights of its query norm


def initial_model(config: DecoderConfig, seed: int, *, key_spread: float, common: float):
    """Random weights with a bias towards the task, which saves most of the training (see `look_back`).

    Residual branches are small, embeddings have a common part of length ``common`` (their own is 1), and the key norms'
    weights are unequal: ``key_spread`` is the standard deviation of their logarithm.
    """
    model = random_model(config, seed)
    key = jax.random.key(seed + 1)
    shared = jax.random.normal(jax.random.fold_in(key, 0), (config.embed_dim,), jnp.float32)
    model.embed.weight[...] += common * config.embed_dim**-0.5 * shared
    look_back(model.layers[0].attn, config, shared)
    for i, block in enumerate(model.layers):
        block.attn.o.weight[...] *= (2 * config.num_layers) ** -0.5
        block.mlp.down.weight[...] *= (2 * config.num_layers) ** -0.5
        spread = jax.random.normal(jax.random.fold_in(key, 1 + i), (config.head_dim,), jnp.float32)
        weight = jnp.exp(key_spread * spread)
        # Their mean square is 1, so that logits begin as large as with equal weights.
        block.attn.k_norm.weight[...] = weight * jax.lax.rsqrt(jnp.mean(jnp.square(weight)))
        block.attn.q_norm.weight[...] = jnp.full_like(weight, LOOK_BACK_SCALE if i == 0 else 1.0)
    return model


def look_back(attention, config: DecoderConfig, shared: jax.Array) -> None:
    """Heads of the first layer that attend one token back, two, one, two, ... before anything is learned.

    The embeddings' common part makes a constant component of queries and keys; that of the queries is the keys', turned
    back by the rotary embedding of one or two tokens.
    """
    half = config.head_dim // 2
    frequency = np.asarray(config.rope.theta, np.float32) ** (-np.arange(half, dtype=np.float32) / half)
    used = (frequency > 0.1).astype(np.float32)  # slower ones cannot tell neighbours apart
    size = LOOK_BACK * np.sqrt(half / used.sum())
    towards = np.asarray(shared / jnp.linalg.norm(shared)) / np.sqrt(config.embed_dim)

    def turned(back: int) -> np.ndarray:
        return np.concatenate([used * np.cos(back * frequency), -used * np.sin(back * frequency)]) * size

    group = config.num_heads // config.num_kv_heads
    added = np.zeros(attention.qkv.weight.shape, np.float32)  # [K, Q + 2, D, E]
    for head in range(config.num_heads):
        added[head // group, head % group] = turned(1 + head % 2)[:, None] * towards
    added[:, -2] = turned(0)[:, None] * towards
    attention.qkv.weight[...] += added


def save(model, task: Lookup, directory: Path, about: dict) -> None:
    """A Hugging Face directory with weights, config and a tokenizer of whole words, and beside them the task with
    what is told ``about`` the training."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(task, directory)
    write_safetensors(directory / WEIGHTS, hf_tensors(model))
    about = {"task": dataclasses.asdict(task), **about}
    (directory / TASK).write_text(json.dumps(about, indent=1) + "\n")
    (directory / CONFIG).write_text(json.dumps({**config_to_hf(model.config), "bos_token_id": 0}, indent=1) + "\n")


def write_tokenizer(task: Lookup, directory: Path) -> None:
    """Words apart by spaces; <bos> in front of every text."""
    import_transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = task.words()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{words[0]} $A", special_tokens=[(words[0], 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=words[0]).save_pretrained(directory)


def load_task(directory: Path) -> Lookup:
    """The task that a model was trained on.

    Raises:
        ValueError: the directory was not written by this script.
    """
    if not (directory / TASK).is_file():
        raise ValueError(f"{directory} has no {TASK}; wanted a directory that this script wrote with --out")
    return Lookup(**json.loads((directory / TASK).read_text())["task"])
