"""What the tests of generation share: a tiny model, small pages, and prompts of different lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.config import CacheConfig, cache_from_name
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.registry import config_from_name, random_model

VOCAB = 97
PROMPTS = [[5, 11, 90, 3, 3, 41], [7], list(range(20, 65))]


@functools.cache
def tiny_model(seed: int = 0, num_layers: int = 1):
    """A random Qwen3 of head size 16 in float32."""
    sizes = {"vocab_size": VOCAB, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    config = dataclasses.replace(config_from_name("qwen3-0.6b"), num_layers=num_layers, dtype=jnp.float32, **sizes)
    return random_model(config, seed)


def small_cache(name: str) -> CacheConfig:
    """The named cache with pages of 16 tokens, so that short sequences fill several."""
    config = cache_from_name(name)
    return dataclasses.replace(config, sink=min(config.sink, 4), page=16, window=16) if config.quantized else config


@functools.cache
def _recompute(num_layers: int):
    @jax.jit
    def logits(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = model.merge()(tokens, positions, (None,) * num_layers, causal_attend)
        return model.merge().logits(hidden)

    return logits


def greedy_by_recompute(fm, prompt: list[int], steps: int) -> list[int]:
    """Greedy continuation without a cache: the whole text again for every token."""
    ids = list(prompt)
    for _ in range(steps):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        logits = _recompute(fm.config.num_layers)(fm, tokens)
        ids.append(int(np.argmax(np.asarray(logits)[0, len(ids) - 1])))
    return ids[len(prompt) :]
