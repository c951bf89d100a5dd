"""The decoder that Qwen3, Qwen2 and LLaMA3 share: configuration, attention, MLP, block, model.

Rounding follows Hugging Face: norms in float32, cast, then multiply by the weight; activations in ``config.dtype``;
matrix products accumulate in float32. Weights keep Hugging Face's layout [out, in], so a checkpoint needs no transpose.
Projections that share their input are one parameter, so that a decode step reads them with one product.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kitty_jax.models.rope import RopeConfig, cos_sin, rotate

# attend(cache, q [B, T, N, D], k [B, T, K, D], v [B, T, K, D]) -> (out [B, T, N, D], cache)
# As a jax.tree_util.Partial it makes equal blocks share one trace: see Decoder.__call__.
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that determines a decoder's parameters and maths. Hashable, so it can be static under jit.

    family: "qwen3", "qwen2" or "llama", the Hugging Face model type it reads and writes.
    dtype: of parameters and activations (bfloat16, float16 or float32). rms_eps: added to the mean square in norms.
    max_position: longest sequence in tokens that the checkpoint was made for.
    """

    family: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    rms_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied_head: bool
    dtype: Any = jnp.bfloat16

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))  # one spelling, so that equal configs compare equal
        sizes = "vocab_size embed_dim mlp_dim num_layers num_heads num_kv_heads head_dim max_position".split()
        wrong = {name: getattr(self, name) for name in sizes if getattr(self, name) < 1}
        if wrong:
            raise ValueError(f"sizes of a decoder must be at least 1, got {wrong}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.dtype.name not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype.name}")


def _matmul(x: jax.Array, weight: jax.Array, out_dtype) -> jax.Array:
    """x [..., I], weight [O..., I] -> [..., O...]. float32 at full precision: on a GPU the default would be TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    if weight.ndim > 2 and jax.default_backend() == "cpu":
        # XLA's CPU backend is ten times as slow at a product with several output dimensions as at many with one. As a
        # batch they stay split over a mesh as they are.
        x = jnp.broadcast_to(x, (*weight.shape[:-2], *x.shape))
        batch = tuple(range(weight.ndim - 2))
        dims = (((x.ndim - 1,), (weight.ndim - 1,)), (batch, batch))
        out = lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=out_dtype)
        return jnp.moveaxis(out, batch, range(out.ndim - 1 - len(batch), out.ndim - 1))
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=out_dtype)


class Linear(nnx.Module):
    """x [..., I] -> [..., O...] in x's dtype; O may have several dimensions."""

    def __init__(self, in_dim: int, out_dims: tuple[int, ...], dtype, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((*out_dims, in_dim), dtype))
        self.bias = nnx.Param(jnp.zeros(out_dims, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = _matmul(x, self.weight[...], x.dtype)
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32; the weight multiplies after the cast back."""

    def __init__(self, dim: int, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


class Embedding(nnx.Module):
    """tokens int32 [...] -> [..., E]. With a tied head the same table gives the logits."""

    def __init__(self, vocab_size: int, dim: int, dtype):
        self.weight = nnx.Param(jnp.zeros((vocab_size, dim), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class Attention(nnx.Module):
    """Grouped-query attention with optional QK-norm and QKV bias; where K and V are kept is attend's business.

    qkv [K, Q + 2, D, E] has for each KV head its Q = N / K query heads, its key and its value: a mesh splits it by K.
    """

    def __init__(self, config: DecoderConfig):
        embed, group = config.embed_dim, config.num_heads // config.num_kv_heads
        qkv_dims = (config.num_kv_heads, group + 2, config.head_dim)
        self.qkv = Linear(embed, qkv_dims, config.dtype, config.qkv_bias)
        self.o = Linear(config.num_heads * config.head_dim, (embed,), config.dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps, config.dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps, config.dtype) if config.qk_norm else None

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache, attend: Attend):
        """x [B, T, E]; cos, sin [B, T, 1, D/2] -> (out [B, T, E], cache)."""
        qkv = self.qkv(x)  # [B, T, K, Q + 2, D]
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        q = q.reshape(*x.shape[:-1], -1, q.shape[-1])  # [B, T, N, D]; k and v [B, T, K, D]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(cache, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(out.reshape(*x.shape[:-1], -1)), cache


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), x [B, T, E]; gate_up [2, F, E]."""

    def __init__(self, config: DecoderConfig):
        self.gate_up = Linear(config.embed_dim, (2, config.mlp_dim), config.dtype)
        self.down = Linear(config.mlp_dim, (config.embed_dim,), config.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        both = self.gate_up(x)  # [B, T, 2, F]
        gate, up = both[..., 0, :], both[..., 1, :]
        return self.down(jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Returns ([B, T, E], cache)."""

    def __init__(self, config: DecoderConfig):
        self.input_norm = RMSNorm(config.embed_dim, config.rms_eps, config.dtype)
        self.attn = Attention(config)
        self.post_norm = RMSNorm(config.embed_dim, config.rms_eps, config.dtype)
        self.mlp = MLP(config)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache, attend: Attend):
        attended, cache = self.attn(self.input_norm(x), cos, sin, cache, attend)
        x = x + attended
        return x + self.mlp(self.post_norm(x)), cache


def _run_block(block: Block, *args):
    return block(*args)


# A traced call of it is one reference to a function that all blocks of equal structure and shapes share: 36 layers cost
# the tracing and lowering of one. XLA inlines the calls, so the program is that of unrolled blocks.
_run_shared = jax.jit(_run_block)


class Decoder(nnx.Module):
    """A causal language model. Constructed with zero weights; build a real one with kitty_jax.models.registry."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.embed_dim, config.dtype)
        self.layers = nnx.List([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.embed_dim, config.rms_eps, config.dtype)
        self.head = None if config.tied_head else Linear(config.embed_dim, (config.vocab_size,), config.dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, caches: tuple, attend: Attend):
        """tokens, positions int32 [B, T]; caches: one opaque pytree per layer -> (hidden [B, T, E], caches).

        hidden is after the final norm, in config.dtype. attend(cache, q, k, v) gets q [B, T, N, D] and k, v
        [B, T, K, D], q and k after QK-norm and RoPE, and returns (out [B, T, N, D] in q's dtype, cache); query head n
        belongs to KV head n // (N // K) and attend applies the scale D ** -0.5.

        attend may be any callable, and is then called layer by layer as the model is traced. As a
        jax.tree_util.Partial of a function at module level, with every array among its arguments (pytrees), it lets
        equal blocks be traced and lowered once; caches are equal if their shapes and static fields are.
        """
        if len(caches) != self.config.num_layers:
            raise ValueError(f"this model has {self.config.num_layers} layers and needs as many caches: {len(caches)}")
        x = self.embed(tokens)
        cos, sin = cos_sin(self.config.rope, positions, self.config.head_dim, x.dtype)
        run = _run_shared if isinstance(attend, jax.tree_util.Partial) else _run_block
        new = []
        for block, cache in zip(self.layers, caches, strict=True):
            x, cache = run(block, x, cos, sin, cache, attend)
            new.append(cache)
        return self.norm(x), tuple(new)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> float32 [..., V], not rounded to config.dtype on the way (Hugging Face rounds)."""
        table = self.embed if self.head is None else self.head
        return _matmul(hidden, table.weight[...], jnp.float32)


def causal_attend(cache, q: jax.Array, k: jax.Array, v: jax.Array):
    """Attention among the given tokens alone: row t sees rows 0..t. The cache (None, usually) passes through.

    q [B, T, N, D]; k, v [B, T, K, D] -> (out [B, T, N, D] in q's dtype, cache). Everything in float32, with the [T, T]
    weights in memory: for tests and for scoring short texts.
    """
    batch, length, num_heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim).astype(jnp.float32)
    keys, values = k.astype(jnp.float32), v.astype(jnp.float32)
    scores = jnp.einsum("btkqd,bskd->bkqts", grouped, keys, precision="highest") * head_dim**-0.5
    scores = jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bkqts,bskd->btkqd", jax.nn.softmax(scores, axis=-1), values, precision="highest")
    return out.reshape(batch, length, num_heads, head_dim).astype(q.dtype), cache
