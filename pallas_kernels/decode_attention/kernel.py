"""Decode attention as Mosaic GPU kernels: pages, full-precision tokens and the merge.

The kernel is a sequence of stages: coordinates and q (:mod:`.block`), the new token into the buffers
(:mod:`.insert_token`), pages (:mod:`.pages`), full-precision tokens and edge pages (:mod:`.buffers`), and the merge
(:mod:`.merge`). The reference is :mod:`.reference`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention import merge
from kitty_jax.pallas_kernels.decode_attention.block import Block, Operands, Running, load_queries, stage_queries
from kitty_jax.pallas_kernels.decode_attention.buffers import DenseStage, attend_edge_pages, attend_regions
from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.decode_attention.insert_token import insert_token, load_token, store_token
from kitty_jax.pallas_kernels.decode_attention.pages import PageWalk, attend_pages
from kitty_jax.pallas_kernels.decode_attention.shape import KINDS, KernelShape
from kitty_jax.pallas_kernels.ordering import ordered
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV

HEAD_DIMS = (64, 128)
PAGE = 128
MAX_COLUMNS = 128  # T * Q; a group of 8 columns reads all pages, so beyond some tens dequantizing once is cheaper
MAX_BUFFER_BYTES = 1 << 32  # offsets into buffers are 32 bits


def unsupported(q: Array, kv: LayerKV, scale: float) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    fmt = kv.fmt
    columns = q.shape[1] * q.shape[2] // kv.key_pages.shape[1]
    if fmt.head_dim not in HEAD_DIMS:
        return f"the kernel takes head sizes {HEAD_DIMS}, got {fmt.head_dim}"
    if fmt.page != PAGE:
        return f"the kernel takes pages of {PAGE} tokens, got {fmt.page}"
    if fmt.boosted % 8:
        return f"the kernel takes boosted channels in multiples of 8, got {fmt.boosted}"
    if columns > MAX_COLUMNS:
        return f"the kernel takes at most {MAX_COLUMNS} new tokens x query heads per KV head, got {columns}"
    if q.dtype.name not in KINDS:
        return f"the kernel takes q in {', '.join(KINDS)}, got {q.dtype.name}"
    buffers = [getattr(kv, name) for name in BUFFERS]
    dtypes = {x.dtype.name for x in buffers}
    if len(dtypes) > 1 or not dtypes <= set(KINDS):
        return f"the kernel takes buffers of one dtype of {', '.join(KINDS)}, got {', '.join(sorted(dtypes))}"
    if max(x.size for x in buffers) * 2 >= MAX_BUFFER_BYTES:
        return f"the kernel takes buffers below {MAX_BUFFER_BYTES} bytes, got a ring of shape {kv.ring_values.shape}"
    if not isinstance(scale, (int, float)) or not scale > 0:
        return f"the kernel takes a positive Python number as the softmax scale, got {scale!r}"
    return None


# A jit of its own, so that a model of many layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnames=("scale", "splits", "insert"))
def decode_attention_mosaic(
    inputs: DecodeInputs, scale: float, splits: int = 0, insert: bool = False
) -> tuple[Array, LayerKV]:
    """(attention, layer): :func:`.operation.decode_attention` by the kernels; with ``insert`` the layer has the new
    token. ``splits``: blocks that share a sequence and head, or 0 for the device's choice. float32 buffers are
    converted to float16, saturating, on every call."""
    kv = inputs.kv
    # In float32 buffers, of which the kernel gets copies, the token is inserted afterwards.
    in_kernel = insert and kv.tail_keys.dtype != jnp.float32
    shape = KernelShape.of(inputs, scale, splits, in_kernel)
    dtype = jnp.bfloat16 if shape.kind == "bf16" else jnp.float16
    buffers = {name: _cast(getattr(kv, name), dtype) for name in BUFFERS}
    # An array without elements has no address: another one stands in, and is neither read nor written.
    refs = {name: jax.new_ref(x) if in_kernel and x.size else x for name, x in buffers.items()}
    some = inputs.lengths
    pages = (kv.key_pages, kv.value_pages, inputs.page_table) if shape.pages else (some,) * 3
    operands = Operands(
        q=_cast(inputs.q, dtype),
        new_keys=_cast(inputs.new_keys, dtype),
        new_values=_cast(inputs.new_values, dtype),
        key_pages=pages[0],
        value_pages=pages[1],
        **{name: x if x.size else some for name, x in refs.items()},
        page_table=pages[2],
        lengths=inputs.lengths,
        num_new=inputs.num_new,
    )
    out = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)
    partial = [
        jax.ShapeDtypeStruct((shape.blocks, shape.stored_columns, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((shape.blocks, 16), jnp.float32),
    ]
    merged, *stats = ptx.launch(
        functools.partial(_emit, shape),
        partial if shape.merges_in_memory else [out],
        blocks=shape.blocks,
        smem_bytes=shape.smem.total,
        name="decode_attention",
        cluster=shape.cluster,
    )(*operands)
    if in_kernel:
        kv = dataclasses.replace(kv, **{n: jax.freeze(ref) if buffers[n].size else ref for n, ref in refs.items()})
    if shape.merges_in_memory:
        (merged,) = ptx.launch(
            functools.partial(merge.emit_merge, shape),
            [out],
            blocks=shape.batch * shape.tokens * shape.heads,
            smem_bytes=merge.MERGE_SMEM,
            name="decode_attention_merge",
        )(merged, *stats)
    if insert and not in_kernel:
        new = [ordered(x, merged)[:, 0] for x in (inputs.new_keys, inputs.new_values)]
        kv = insert_token(kv, *new, inputs.lengths, inputs.num_new > 0)
    return merged, kv


def _cast(x: Array, dtype) -> Array:
    if x.dtype == dtype:
        return x
    if dtype == jnp.float16:
        largest = float(jnp.finfo(jnp.float16).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _emit(shape: KernelShape, addresses: list[ptx.Value], smem: ptx.Value) -> None:
    """The body of the first kernel."""
    mem, outs = Operands(*addresses[: len(Operands._fields)]), addresses[len(Operands._fields) :]
    block = Block.start(shape, mem, smem)
    # Everything that a block begins with is asked for before any of it is waited for.
    queries, token = load_queries(block), load_token(block) if shape.insert else None
    with ptx.when(block.lane == 0):
        ptx.mbarrier_init(block.key_barrier, 2)
    ptx.sync_warp()
    walk = PageWalk(block) if shape.pages else None
    if walk:
        walk.start()  # the first pages are on their way while q is staged
    stage_queries(block, queries)
    if token:
        store_token(block, token)

    slots = [shape.smem.value, shape.smem.key]
    of_pages = attend_pages(block, walk)
    merge.store_partial(block, of_pages, slots[0], 0, merge.page_channel)
    # The coordinates anew: those that outlive the loop over pages would cost it registers, and it has none to spare.
    block = Block.start(shape, mem, smem)
    dense, empty = DenseStage(block), Running.empty(shape.head_dim // 16, biased=False)
    of_buffers = attend_edge_pages(dense, attend_regions(dense, empty))
    merge.store_partial(block, of_buffers, slots[1], 1, merge.dense_channel)
    merge.merge_warps(Block.start(shape, mem, smem), slots, outs)
