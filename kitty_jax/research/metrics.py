"""What a cache costs in accuracy on a text: likelihood, KL divergence, agreement, attention error, bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.dense_attention import causal_attention
from kitty_jax.research.simulation import SimulatedLayer, simulated_attention, simulated_caches

START = 512  # first position of the averages: before it, little or nothing is quantized
CHUNK = 256  # positions whose logits are in memory at a time

Cache = CacheConfig | str | Sequence[CacheConfig]

# Jitted here, and the model around them not: one compilation serves all layers that share a config, in every pass.
_simulate = jax.jit(simulated_attention)
_full = jax.jit(causal_attention)


def evaluate_text(
    model,
    tokens: Array,
    caches: Mapping[str, Cache],
    *,
    start: int = START,
    progress: Callable[[str], None] = lambda line: None,
    on_row: Callable[[dict[str, dict]], None] = lambda results: None,
) -> dict[str, dict]:
    """Teacher-forced evaluation of a text under several caches, each in one pass of the simulation.

    Args:
        model: a decoder of this project.
        tokens: int32 [T], the text, without any token added.
        caches: what to evaluate, by name: a config, a name, or one config per layer.
        start: first position of ``kl``, ``top1`` and ``attn_rel_err``.
        progress: called with a line after each pass.
        on_row: called with the results so far after each cache, so that a long run can keep what it has.

    Returns:
        For "full" and each cache a dict of:
        ``nll``, mean over all T - 1 predictions of -log p(next token), nats; ``ppl``, its exponential;
        ``kl``, mean KL(full precision || cache) over positions from ``start`` on, nats; ``top1``, share of those
        positions with the same most likely token; ``attn_rel_err``, one number per layer, the mean over those positions
        of the relative error \\|cache - full\\| / \\|full\\| of the attention output (over all heads, before the output
        projection), every layer being fed the full-precision run's inputs; ``bits`` per cached element with metadata;
        ``bits_with_buffers``, sink, tail and window of a sequence of T tokens in 16 bits counted too; ``seconds`` of
        the pass.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 1 or tokens.shape[0] <= start + 1:
        raise ValueError(
            f"tokens must be one text of more than start + 1 = {start + 1} tokens, got shape {tokens.shape}"
        )
    config = model.config
    caches = {"full": CacheConfig.full(), **caches}
    layers = {name: simulated_caches(cache, config.num_layers) for name, cache in caches.items()}
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]

    clock = time.perf_counter()
    probed = tuple({name: layers[name][i] for name in caches if name != "full"} for i in range(config.num_layers))
    hidden, errors = model(tokens[None], positions, probed, functools.partial(_probe, start))
    full = jax.block_until_ready(hidden[0])
    progress(f"full precision, and the attention of every cache on its inputs: {time.perf_counter() - clock:.0f} s")

    out = {}
    for name, cache in caches.items():
        clock = time.perf_counter()
        hidden = full if name == "full" else model(tokens[None], positions, layers[name], _simulate)[0][0]
        row = compare_hidden(model, full, hidden, tokens, start)
        row["attn_rel_err"] = [0.0 if name == "full" else float(layer[name]) for layer in errors]
        row |= stored_bits(cache, config, tokens.shape[0])
        row["seconds"] = time.perf_counter() - clock
        out[name] = row
        on_row(out)
        progress(f"{name}: nll {row['nll']:.4f}, kl {row['kl']:.4f} ({row['seconds']:.0f} s)")
    return out


def _probe(
    start: int, caches: dict[str, SimulatedLayer], q: Array, k: Array, v: Array
) -> tuple[Array, dict[str, Array]]:
    """Full-precision attention; in place of the caches, each one's relative error on the same inputs."""
    out = _full(q, k, v)
    return out, {name: relative_error(out, _simulate(cache, q, k, v)[0], start) for name, cache in caches.items()}


@functools.partial(jax.jit, static_argnames="start")
def relative_error(wanted: Array, got: Array, start: int = 0) -> Array:
    """Mean of \\|got - wanted\\| / \\|wanted\\| over positions from ``start`` on, norms over heads and channels.

    [B, T, N, D] twice -> [].
    """

    def norm(x: Array) -> Array:
        return jnp.linalg.norm(x[:, start:].astype(jnp.float32), axis=(-1, -2))

    return jnp.mean(norm(got - wanted) / norm(wanted))


def compare_hidden(model, full: Array, hidden: Array, tokens: Array, start: int) -> dict[str, float]:
    """nll, ppl, kl and top1 of :func:`evaluate_text` from final hidden states [T, E], full-precision and cached.

    A chunk of logits is in memory at a time.
    """
    sums = np.zeros(3)
    count = tokens.shape[0]
    for first in range(0, count, CHUNK):
        rows = slice(first, min(first + CHUNK, count))
        wanted = None if hidden is full else model.logits(full[rows])
        got = model.logits(hidden[rows])
        target = jnp.append(tokens[first + 1 : first + CHUNK + 1], jnp.int32(0))[: got.shape[0]]
        nll, kl, same = (np.asarray(x, np.float64) for x in _score(got if wanted is None else wanted, got, target))
        position = np.arange(rows.start, rows.stop)
        scored = position >= start
        sums += nll[position < count - 1].sum(), kl[scored].sum(), same[scored].sum()
    nll = sums[0] / (count - 1)
    return {"nll": nll, "ppl": float(np.exp(nll)), "kl": sums[1] / (count - start), "top1": sums[2] / (count - start)}


@jax.jit
def _score(wanted: Array, got: Array, target: Array) -> tuple[Array, Array, Array]:
    p, q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(got)
    nll = -jnp.take_along_axis(q, target[:, None], axis=-1)[:, 0]
    return nll, jnp.sum(jnp.exp(p) * (p - q), axis=-1), jnp.argmax(p, -1) == jnp.argmax(q, -1)


def stored_bits(cache: Cache, config, tokens: int) -> dict[str, float]:
    """``bits`` per element of a page with metadata, mean over layers, keys, values; ``bits_with_buffers`` of a whole
    cache.

    Buffers and full-precision layers count 16 bits an element, whatever the model computes in, as in the tables of the
    paper; page tables are left out. A sequence of ``tokens`` tokens; its buffers count as far as they are filled.
    """
    page, total = [], 0.0
    per_layer = 2 * config.num_kv_heads * config.head_dim
    for layer in layer_configs(cache, config.num_layers):
        if not layer.quantized:
            page.append(16.0)
            total += 16 * per_layer * tokens
            continue
        fmt = layer.page_format(config.head_dim)
        page.append(fmt.bits_per_element)
        past = max(tokens - layer.sink, 0)
        for bits, in_pages in (
            (fmt.key_bits, past // fmt.page * fmt.page),
            (fmt.value_bits_stored, max(past - layer.window, 0) // fmt.page * fmt.page),
        ):
            total += per_layer / 2 * (bits * in_pages + 16 * (tokens - in_pages))
    return {"bits": float(np.mean(page)), "bits_with_buffers": total / (per_layer * tokens * config.num_layers)}
