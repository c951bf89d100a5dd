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
from kitty_jax.research.scoring import Cache, check_scoring, compare, hidden_states, simulate
from kitty_jax.research.simulation import SimulatedLayer, simulated_caches

START = 512  # first position of the averages: before it, little or nothing is quantized

_full = jax.jit(causal_attention)


def evaluate_text(
    model,
    tokens: Array,
    caches: Mapping[str, Cache],
    *,
    start: int = START,
    scoring: str = "simulation",
    progress: Callable[[str], None] = lambda line: None,
    on_row: Callable[[dict[str, dict]], None] = lambda results: None,
) -> dict[str, dict]:
    """Teacher-forced evaluation of a text under several caches.

    Args:
        model: a decoder of this project.
        tokens: int32 [T], the text, without any token added.
        caches: what to evaluate, by name: a config, a name, or one config per layer.
        start: first position of ``kl``, ``top1`` and ``attn_rel_err``.
        scoring: "simulation", one pass a cache, or "packed"; see :func:`.scoring.hidden_states`.
        progress: called with a line after each pass.
        on_row: called with the results so far after each cache, so that a long run can keep what it has.

    Returns:
        For "full" and each cache a dict of:
        ``nll``, mean over all T - 1 predictions of -log p(next token), nats; ``ppl``, its exponential;
        ``kl``, mean KL(full precision || cache) over positions from ``start`` on, nats; ``top1``, share of those
        positions with the same most likely token; ``attn_rel_err``, one number per layer, the mean over those positions
        of the relative error \\|cache - full\\| / \\|full\\| of the attention output (over all heads, before the output
        projection, always simulated), every layer being fed the full-precision run's inputs; ``bits`` per cached
        element with metadata; ``bits_with_buffers``, sink, tail and window of a sequence of T tokens in 16 bits counted
        too; ``seconds`` of the pass.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 1 or tokens.shape[0] <= start + 1:
        raise ValueError(
            f"tokens must be one text of more than start + 1 = {start + 1} tokens, got shape {tokens.shape}"
        )
    check_scoring(scoring)
    clock = time.perf_counter()
    full, errors = attention_errors(model, tokens, list(caches.values()), start)
    progress(f"full precision, and the attention of every cache on its inputs: {time.perf_counter() - clock:.0f} s")
    errors_of = {"full": np.zeros(model.config.num_layers), **dict(zip(caches, errors, strict=True))}
    out = {}
    for name, cache in {"full": CacheConfig.full(), **caches}.items():
        clock = time.perf_counter()
        hidden = full if name == "full" else hidden_states(model, tokens[None], cache, scoring=scoring)[0]
        row = compare(model, full, hidden, tokens, start)
        row["attn_rel_err"] = errors_of[name].tolist()
        out[name] = row | stored_bits(cache, model.config, tokens.shape[0]) | {"seconds": time.perf_counter() - clock}
        on_row(out)
        progress(f"{name}: nll {row['nll']:.4f}, kl {row['kl']:.4f} ({out[name]['seconds']:.0f} s)")
    return out


def attention_errors(model, tokens: Array, caches: Sequence[Cache], start: int) -> tuple[Array, np.ndarray]:
    """``attn_rel_err`` of :func:`evaluate_text` for each cache, from one full-precision run of tokens int32 [T].

    Returns:
        (final hidden states [T, E] of that run, errors float64 [caches, L]).
    """
    layers = model.config.num_layers
    by_cache = [simulated_caches(cache, layers) for cache in caches]
    probes = tuple(tuple(cache[i] for cache in by_cache) for i in range(layers))
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    hidden, errors = model(tokens[None], positions, probes, functools.partial(_probe, start))
    errors = np.array([[float(x) for x in row] for row in errors])
    return jax.block_until_ready(hidden[0]), errors.reshape(layers, len(caches)).T


def _probe(start: int, caches: tuple[SimulatedLayer, ...], q: Array, k: Array, v: Array) -> tuple[Array, tuple]:
    """Full-precision attention; in place of the caches, each one's relative error on the same inputs."""
    out = _full(q, k, v)
    return out, tuple(relative_error(out, simulate(cache, q, k, v)[0], start) for cache in caches)


@functools.partial(jax.jit, static_argnames="start")
def relative_error(wanted: Array, got: Array, start: int = 0) -> Array:
    """Mean of \\|got - wanted\\| / \\|wanted\\| over positions from ``start`` on, norms over heads and channels.

    [B, T, N, D] twice -> [].
    """

    def norm(x: Array) -> Array:
        return jnp.linalg.norm(x[:, start:].astype(jnp.float32), axis=(-1, -2))

    return jnp.mean(norm(got - wanted) / norm(wanted))


def stored_bits(cache: Cache, config, tokens: int) -> dict[str, float]:
    """``bits`` per element of a page with metadata, mean over layers, keys, values; ``bits_with_buffers`` of a cache.

    Buffers and full-precision layers count 16 bits an element, whatever the model computes in, as in the tables of the
    paper; page tables are left out. A sequence of ``tokens`` tokens; its buffers count as far as they are filled.
    """
    page, whole = [], []
    for layer in layer_configs(cache, config.num_layers):
        if not layer.quantized:
            page.append(16.0)
            whole += [16.0, 16.0]
            continue
        fmt = layer.page_format(config.head_dim)
        page.append(fmt.bits_per_element)
        for bits, full_precision in ((fmt.key_bits, layer.sink), (fmt.value_bits_stored, layer.sink + layer.window)):
            in_pages = max(tokens - full_precision, 0) // fmt.page * fmt.page / tokens  # the share of the tokens
            whole.append(16 + (bits - 16) * in_pages)
    return {"bits": float(np.mean(page)), "bits_with_buffers": float(np.mean(whole))}
