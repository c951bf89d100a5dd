"""Quantize-and-pack as one Mosaic GPU kernel for keys and values: a block of 128 threads for each page and KV head.

Keys and values are one problem. A page has *units* that are quantized on their own, channels of keys or tokens of
values, and each has *elements*, its tokens or its channels. The page lies in shared memory, and thread u takes unit u
through :func:`.quantize.quantize_keys` or :func:`.quantize.quantize_values`, in the same float32 operations: least and
greatest element, score and rank among the channels, scale and min, one code after the other. Codes go to shared memory
as bytes, and the block assembles the packed words from them in the order of :mod:`.packing`. Blocks of pages that are
to be skipped end at once: that is what the kernel is for, where a batch's sequences fill pages at different steps.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import Value
from kitty_jax.pallas_kernels.store.page_block import PageBlock
from kitty_jax.pallas_kernels.store.shape import PAGE, StoreShape

HEAD_DIMS = (64, 128)
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def unsupported(dtype, fmt: PageFormat) -> str | None:
    """Why the kernel does not take pages of this dtype and format, or None."""
    if fmt.page != PAGE:
        return f"the kernel takes pages of {PAGE} tokens, got {fmt.page}"
    if fmt.head_dim not in HEAD_DIMS:
        return f"the kernel takes head sizes {HEAD_DIMS}, got {fmt.head_dim}"
    if np.dtype(dtype).name not in KINDS:
        return f"the kernel takes {', '.join(KINDS)}, got {np.dtype(dtype).name}"
    return None


def store(
    pool_ref,
    pages: Array,
    page_ids: Array,
    starts: Array | None,
    vectors: list[Array],
    shape: StoreShape,
) -> None:
    """Writes the records of ``pages`` into the ref of the pool; ids outside of it are skipped.

    Args:
        pool_ref: of uint32 [M, K, words].
        pages: keys [X, K, G, D] or values [X, K, W, D].
        page_ids: int32 [X].
        starts: int32 [X], first slots of pages of values; None where W = G.
        vectors: given scores and weights, float32 [X, K, D] each, those that ``shape`` says are given.
    """
    x, k = pages.shape[:2]
    vectors = [jnp.broadcast_to(v.astype(jnp.float32), (x, k, shape.units)) for v in vectors]
    operands = [pool_ref, pages, page_ids, *([] if starts is None else [starts]), *vectors]
    emit_page = functools.partial(emit, shape, starts is not None)
    ptx.launch(emit_page, (), blocks=x * k, smem_bytes=shape.smem["total"], name="store_pages")(*operands)


def emit(shape: StoreShape, has_starts: bool, addresses: list[Value], smem: Value) -> None:
    """The body of the kernel."""
    pool, pages, page_ids, *vectors = addresses
    block = ptx.special_register("ctaid.x")
    page, head = block // shape.kv_heads, block % shape.kv_heads
    record = ptx.load_global(1, ptx.address(page_ids, page, 4))
    with ptx.when(record.below(shape.pool)):
        start = ptx.load_global(1, ptx.address(vectors.pop(0), page, 4)) if has_starts else None
        PageBlock(shape, smem).run(
            ptx.address(pages, block, shape.slots * shape.row_bytes),
            start,
            [ptx.address(v, block, 4 * shape.units) for v in vectors],
            ptx.address(pool, record * shape.kv_heads + head, 4 * shape.words),
        )
