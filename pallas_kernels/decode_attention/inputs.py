"""What decode attention takes: queries, the new tokens, the layer's cache and the facts about it."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from kitty_jax.pallas_kernels.page_format import LayerKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Arrays of one call.

    Attributes:
        q: [B, T, N, D] queries of the T new tokens, after rotary embedding.
        new_keys, new_values: [B, T, K, D].
        kv: the layer's cache before the new tokens.
        page_table: int32 [B, P], page p of sequence b is record ``page_table[b, p]`` of the pool.
        lengths: int32 [B], tokens cached in ``kv``.
        num_new: int32 [B], how many of the T new tokens are real (the rest is padding at the end).
    """

    q: Array
    new_keys: Array
    new_values: Array
    kv: LayerKV
    page_table: Array
    lengths: Array
    num_new: Array

    @property
    def kv_heads(self) -> int:
        return self.kv.key_pages.shape[1]

    def check(self) -> None:
        """Raises ValueError where shapes disagree."""
        (b, t, n, d), k, kv = self.q.shape, self.kv_heads, self.kv
        if n % k:
            raise ValueError(f"query heads must be a multiple of the cache's {k} KV heads, got {n}")
        wanted = {
            "new_keys": (self.new_keys, (b, t, k, d)),
            "new_values": (self.new_values, (b, t, k, d)),
            "sink_keys": (kv.sink_keys, (b, k, kv.sink, d)),
            "tail_keys": (kv.tail_keys, (b, k, kv.fmt.page, kv.fmt.head_dim)),
            "page_table": (self.page_table, (b, self.page_table.shape[-1])),
            "lengths": (self.lengths, (b,)),
            "num_new": (self.num_new, (b,)),
        }
        wrong = [f"{name}: wanted {shape}, got {x.shape}" for name, (x, shape) in wanted.items() if x.shape != shape]
        if wrong:
            raise ValueError(f"decode_attention with q of shape {self.q.shape}: " + "; ".join(wrong))
