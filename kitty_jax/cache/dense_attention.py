"""Full-precision attention: cuDNN where it runs, blocks of queries elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.partials import MASKED, Partial
from kitty_jax.pallas_kernels.private_jax import cudnn_attention

QUERY_BLOCK = 256  # queries attended at a time on the XLA path: bounds the logits at B * N * 256 * keys


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of right-padded sequences over themselves: q [B, T, N, D], k and v [B, T, K, D] -> [B, T, N, D].

    cuDNN flash attention where it runs (GPU, 16-bit, head size a multiple of 8 up to 128), blocks of queries
    elsewhere. Padding comes after a sequence's tokens, so the causal mask hides it from them.
    """
    if cudnn_takes(q) and q.shape[1] > 1:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return masked_attention(q, k, v, jnp.zeros(q.shape[0], jnp.int32))


def masked_attention(q: Array, k: Array, v: Array, first: Array) -> Array:
    """Attention in which query t of sequence b sees keys 0 to first[b] + t.

    Args:
        q: [B, T, N, D]; k, v: [B, X, K, D]; first: int32 [B].

    Returns:
        [B, T, N, D] in q's dtype; logits and softmax in float32.
    """
    b, t, n, d = q.shape
    if t <= QUERY_BLOCK:
        return _masked_block(q, k, v, first)
    blocks = -(-t // QUERY_BLOCK)
    padded = jnp.pad(q, [(0, 0), (0, blocks * QUERY_BLOCK - t), (0, 0), (0, 0)])
    padded = jnp.swapaxes(padded.reshape(b, blocks, QUERY_BLOCK, n, d), 0, 1)
    starts = jnp.arange(blocks, dtype=jnp.int32) * QUERY_BLOCK
    out = jax.lax.map(lambda x: _masked_block(x[0], k, v, first + x[1]), (padded, starts))
    return jnp.swapaxes(out, 0, 1).reshape(b, -1, n, d)[:, :t]


def _masked_block(q: Array, k: Array, v: Array, first: Array) -> Array:
    b, t, n, d = q.shape
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], d)
    exact = {"precision": "highest"} if q.dtype == jnp.float32 else {}
    logits = jnp.einsum("btkqd,bxkd->bkqtx", grouped, k, preferred_element_type=jnp.float32, **exact) * d**-0.5
    seen = jnp.arange(k.shape[1]) <= (first[:, None] + jnp.arange(t))[:, :, None]  # [B, T, X]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1).astype(v.dtype)
    v = _seen_alone(v, seen)
    out = jnp.einsum("bkqtx,bxkd->btkqd", weights, v, preferred_element_type=jnp.float32, **exact)
    return out.reshape(b, t, n, d).astype(q.dtype)


def _seen_alone(v: Array, seen: Array) -> Array:
    """v [B, X, K, D] with zeros where no query sees the key (``seen`` bool [B or 1, T, X]): an earlier sequence may
    have left a NaN there, which a weight of zero does not take away."""
    return jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, 0)


def partial_dense_attention(q: Array, k: Array, v: Array, visible: Array | None) -> Partial:
    """Attention over one block of keys as a partial result that merges with others.

    Args:
        q: [B, T, N, D]; k, v: [B, X, K, D].
        visible: int32 [B], every query of sequence b sees the first visible[b] keys; None: query t sees keys 0 to t.

    Returns:
        o [B, T, N, D] float32, m and l [B, T, N].
    """
    if cudnn_takes(q) and q.shape[1] > 1:
        partial = _partial_cudnn(q, k, v, visible)
    else:
        partial = _partial_xla(q, k, v, visible)
    if visible is None:
        return partial
    some = (visible > 0)[:, None, None]
    return Partial(
        jnp.where(some[..., None], partial.o, 0), jnp.where(some, partial.m, MASKED), jnp.where(some, partial.l, 0)
    )


def _partial_cudnn(q: Array, k: Array, v: Array, visible: Array | None) -> Partial:
    lengths = [None, None]
    if visible is not None:
        lengths = [jnp.full(q.shape[0], q.shape[1], jnp.int32), jnp.maximum(visible, 1)]
    out, log_sum = cudnn_attention(q, k, v, lengths, is_causal=visible is None)
    log_sum = jnp.swapaxes(log_sum, 1, 2)  # from [B, N, T]
    return Partial(out.astype(jnp.float32), log_sum, jnp.ones_like(log_sum))


def _partial_xla(q: Array, k: Array, v: Array, visible: Array | None) -> Partial:
    b, t, n, d = q.shape
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], d)
    logits = jnp.einsum("btkqd,bxkd->btkqx", grouped, k, precision="highest") * d**-0.5
    key = jnp.arange(k.shape[1])
    seen = key <= jnp.arange(t)[None, :, None] if visible is None else key < visible[:, None, None]
    logits = jnp.where(seen[:, :, None, None], logits, MASKED)
    m = jnp.max(logits, axis=-1)
    p = jnp.where(seen[:, :, None, None], jnp.exp(logits - m[..., None]), 0)
    v = _seen_alone(v, seen)
    out = jnp.einsum("btkqx,bxkd->btkqd", p, v, precision="highest")
    return Partial(out.reshape(b, t, n, d), m.reshape(b, t, n), jnp.sum(p, axis=-1).reshape(b, t, n))


def cudnn_takes(q: Array) -> bool:
    """Whether cuDNN flash attention runs here for queries of this dtype and head size."""
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
    )
