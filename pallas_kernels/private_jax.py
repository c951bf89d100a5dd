"""Functions of JAX that are not public: the one home of such imports.

jax 0.11.2 and 0.12.0 have them.
"""

from __future__ import annotations

from jax import Array
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic.gpu import utils as mosaic_utils

__all__ = ["arith", "cudnn_attention", "ir", "llvm", "mosaic_utils", "scf"]


def cudnn_attention(
    q: Array, k: Array, v: Array, lengths: list[Array | None], *, is_causal: bool
) -> tuple[Array, Array]:
    """cuDNN flash attention: q [B, T, N, D], k and v [B, X, K, D] -> (out [B, T, N, D], log of the sum [B, N, T]).

    ``jax.nn.dot_product_attention`` rounds the log of the sum to 16 bits, 3 % of a weight. The function beneath it does
    not. ``lengths``: int32 [B] of the queries and of the keys that count, unless the mask is causal.
    """
    mask = MaskType.CAUSAL if is_causal else MaskType.PADDING
    options = {"scale": q.shape[-1] ** -0.5, "mask_type": mask, "return_residual": True}
    return dot_product_attention(q, k, v, None, None, *lengths, **options)
