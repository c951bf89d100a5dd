"""Attention of a few new tokens over a quantized layer: pages, edge pages, sink, key tail, value window, and the new
tokens."""

from __future__ import annotations

from jax import Array

from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.decode_attention.insert_token import insert_token
from kitty_jax.pallas_kernels.decode_attention.kernel import decode_attention_mosaic, unsupported
from kitty_jax.pallas_kernels.decode_attention.reference import decode_attention_reference
from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.ordering import ordered
from kitty_jax.pallas_kernels.page_format import LayerKV


def decode_attention(
    q: Array,
    new_keys: Array,
    new_values: Array,
    kv: LayerKV,
    page_table: Array,
    lengths: Array,
    num_new: Array,
    *,
    scale: float | None = None,
    implementation: Implementation = "auto",
    insert: bool = False,
) -> Array | tuple[Array, LayerKV]:
    """Attends from new tokens over everything cached before them and over themselves, causally.

    The new tokens are *not* in ``kv`` yet; they count as full precision (DESIGN section 1: a step inserts, attends,
    then quantizes). Query head n reads KV head ``n // Q``, Q = N / K.

    Args:
        q, new_keys, new_values, kv, page_table, lengths, num_new: see :class:`.DecodeInputs`.
        scale: softmax scale, ``D ** -0.5`` by default.
        implementation: "auto", "mosaic" or "xla".
        insert: also writes the new token, T = 1, of every sequence where ``num_new`` is above 0 into the buffers.
            The kernel does both in one launch. Donate ``kv`` (or use it in a loop), and its buffers are written in
            place.

    Returns:
        [B, T, N, D] in q's dtype, or, with ``insert``, (that, the layer with the tokens). Rows of padding tokens are
        finite and meaningless; a token that sees no key cannot occur, it sees itself.

    Raises:
        ValueError: shapes disagree, ``insert`` of more than one token, or the named implementation cannot run these
            arguments here.
    """
    inputs = DecodeInputs(q, new_keys, new_values, kv, page_table, lengths, num_new)
    inputs.check()
    if insert and q.shape[1] != 1:
        raise ValueError(f"decode_attention(insert=True) takes one new token a sequence, got q of shape {q.shape}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choose(implementation, unsupported(q, kv, scale)) == "mosaic":
        out, kv = decode_attention_mosaic(inputs, scale, insert=insert)
    else:
        out = decode_attention_reference(inputs, scale)
        if insert:
            kv = insert_token(kv, *(ordered(x, out)[:, 0] for x in (new_keys, new_values)), lengths, num_new > 0)
    return (out, kv) if insert else out
