"""Decode attention as Mosaic GPU kernels: pages, full-precision tokens and the merge.

The kernel is a sequence of stages (see the modules): start_block and stage_queries (:mod:`.decode_block_mgpu`),
load_token and store_token (:mod:`.decode_insert_mgpu`, where the new token goes into the buffers),
attend_pages (:mod:`.decode_pages_mgpu`), attend_regions and attend_edge_pages (:mod:`.decode_dense_mgpu`), merge_warps
and the merge kernel (:mod:`.decode_merge_mgpu`). The reference is :func:`.decode_attention.decode_attention` with
``implementation="xla"``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention import merge as merging
from kitty_jax.pallas_kernels.decode_attention.block import (
    Block,
    Operands,
    Running,
    load_queries,
    stage_queries,
    start_block,
)
from kitty_jax.pallas_kernels.decode_attention.buffers import DenseStage, attend_edge_pages, attend_regions
from kitty_jax.pallas_kernels.decode_attention.insert_token import load_token, store_token
from kitty_jax.pallas_kernels.decode_attention.pages import PageWalk, attend_pages
from kitty_jax.pallas_kernels.decode_attention.reference_insert import insert_token
from kitty_jax.pallas_kernels.decode_attention.shape import WARPS, DecodePlan
from kitty_jax.pallas_kernels.decode_attention.tuning import DecodeTuning, decode_splits, decode_tuning
from kitty_jax.pallas_kernels.ordering import ordered
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV

HEAD_DIMS = (64, 128)
PAGE = 128
MAX_COLUMNS = 128  # T * Q; a group of 8 columns reads all pages, so beyond some tens dequantizing once is cheaper
MAX_BUFFER_BYTES = 1 << 32  # offsets into buffers are 32 bits
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


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
    buffers = {x.dtype.name for x in (kv.sink_keys, kv.sink_values, kv.tail_keys, kv.ring_values)}
    if len(buffers) > 1 or not buffers <= set(KINDS):
        return f"the kernel takes buffers of one dtype of {', '.join(KINDS)}, got {', '.join(sorted(buffers))}"
    if max(x.size for x in (kv.sink_keys, kv.tail_keys, kv.ring_values)) * 2 >= MAX_BUFFER_BYTES:
        return f"the kernel takes buffers below {MAX_BUFFER_BYTES} bytes, got a ring of shape {kv.ring_values.shape}"
    if not isinstance(scale, (int, float)) or not scale > 0:
        return f"the kernel takes a positive Python number as the softmax scale, got {scale!r}"
    return None


def make_plan(q: Array, kv: LayerKV, page_table: Array, scale: float, tuning: DecodeTuning | None = None) -> DecodePlan:
    """The static shape of a call, split as ``tuning`` (default: the device's) says."""
    tuning = tuning or decode_tuning()
    b, t, n, _ = q.shape
    m, k, _ = kv.key_pages.shape
    kind = KINDS[kv.tail_keys.dtype.name]
    plan = DecodePlan(
        fmt=kv.fmt,
        batch=b,
        tokens=t,
        kv_heads=k,
        group=n // k,
        pages=page_table.shape[1] if m else 0,
        pool=m,
        sink=kv.sink,
        window=kv.window,
        splits=1,
        scale=float(scale),
        kind="bf16" if kind == "bf16" else "f16",
        out_kind=KINDS[q.dtype.name],
    )
    splits = decode_splits(
        tuning,
        work_items=plan.work_items,
        pages=plan.pages,
        warps=WARPS,
        smem_bytes=plan.smem.total,
    )
    return dataclasses.replace(plan, splits=splits)


# A jit of its own, so that a model of many layers traces and lowers the kernel once.
@functools.partial(jax.jit, static_argnames=("scale", "tuning", "insert"))
def decode_attention_mosaic(
    q: Array,
    new_keys: Array,
    new_values: Array,
    kv: LayerKV,
    page_table: Array,
    lengths: Array,
    num_new: Array,
    scale: float,
    tuning: DecodeTuning | None = None,
    insert: bool = False,
) -> Array | tuple[Array, LayerKV]:
    """:func:`.decode_attention.decode_attention` by the kernels, or, with ``insert``,
    :func:`.decode_attention.decode_attention_insert`. float32 buffers are converted to float16, saturating, on every
    call."""
    # In float32 buffers, of which the kernel gets copies, the token is inserted afterwards.
    in_kernel = insert and kv.tail_keys.dtype != jnp.float32
    plan = dataclasses.replace(make_plan(q, kv, page_table, scale, tuning), insert=in_kernel)
    dtype = jnp.bfloat16 if plan.kind == "bf16" else jnp.float16
    buffers = [_cast(getattr(kv, name), dtype) for name in BUFFERS]
    # An array without elements has no address: another one stands in, and is neither read nor written.
    refs = [jax.new_ref(x) if in_kernel and x.size else x for x in buffers]
    addressed = [x if x.size else lengths for x in refs]
    pages = [kv.key_pages, kv.value_pages, page_table] if plan.pages else [lengths] * 3
    operands = Operands(
        q=_cast(q, dtype),
        new_keys=_cast(new_keys, dtype),
        new_values=_cast(new_values, dtype),
        key_pages=pages[0],
        value_pages=pages[1],
        sink_keys=addressed[0],
        sink_values=addressed[1],
        tail_keys=addressed[2],
        ring_values=addressed[3],
        page_table=pages[2],
        lengths=lengths,
        num_new=num_new,
    )
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    f32 = jnp.float32
    partial = [
        jax.ShapeDtypeStruct((plan.blocks, plan.stored_columns, plan.head_dim), f32),
        jax.ShapeDtypeStruct((plan.blocks, 16), f32),
    ]
    results = ptx.launch(
        lambda addresses, smem: _emit(plan, addresses, smem),
        partial if plan.merges_in_memory else [out],
        blocks=plan.blocks,
        smem_bytes=plan.smem.total,
        name="decode_attention",
        cluster=plan.cluster,
    )(*operands)
    if in_kernel:
        written = [jax.freeze(ref) if x.size else x for ref, x in zip(refs, buffers, strict=True)]
        kv = dataclasses.replace(kv, **dict(zip(BUFFERS, written, strict=True)))
    merged = results[0]
    if plan.merges_in_memory:
        (merged,) = ptx.launch(
            lambda addresses, smem: merging.emit_merge(plan, addresses, smem),
            [out],
            blocks=plan.batch * plan.tokens * plan.kv_heads * plan.group,
            smem_bytes=merging.MERGE_SMEM,
            name="decode_attention_merge",
        )(*results)
    if not insert:
        return merged
    if not in_kernel:
        new = [ordered(x, merged)[:, 0] for x in (new_keys, new_values)]
        kv = insert_token(kv, *new, lengths, num_new > 0)
    return merged, kv


def _cast(x: Array, dtype) -> Array:
    if x.dtype == dtype:
        return x
    if dtype == jnp.float16:
        largest = float(jnp.finfo(jnp.float16).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _emit(plan: DecodePlan, addresses: list[ptx.Value], smem: ptx.Value) -> None:
    """The body of the first kernel."""
    mem, outs = Operands(*addresses[: len(Operands._fields)]), addresses[len(Operands._fields) :]

    def stage() -> Block:
        # Anew for every stage: a coordinate that outlives the loop over pages would cost it a register, and it has
        # none to spare.
        return start_block(plan, mem, smem)

    block = stage()
    # Everything that a block begins with is asked for before any of it is waited for.
    queries, token = load_queries(block), load_token(block) if plan.insert else None
    with ptx.when(ptx.equal(block.lane, 0)):
        ptx.mbarrier_init(block.key_barrier, 2)
    ptx.sync_warp()
    walk = PageWalk(block) if plan.pages else None
    if walk:
        walk.start()  # the first pages are on their way while q is staged
    stage_queries(block, queries)
    if token:
        store_token(block, token)

    of_pages = attend_pages(block, walk)
    merging.store_partial(block, of_pages, plan.smem.value, 0, merging.page_channel)
    block = stage()
    dense, empty = DenseStage(block), Running.empty(plan.head_dim // 16, biased=False)
    of_buffers = attend_edge_pages(dense, attend_regions(dense, empty))
    merging.store_partial(block, of_buffers, plan.smem.key, 1, merging.dense_channel)
    merging.merge_warps(stage(), [plan.smem.value, plan.smem.key], outs)
