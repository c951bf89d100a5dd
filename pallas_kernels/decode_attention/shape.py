"""What the decode-attention kernel knows before it runs: shapes, the split of the work into blocks, shared memory.

A block of four warps works on one sequence, one KV head and one group of eight *columns*; column ``t * Q + i`` is
query head i of new token t, and eight are the N of the tensor core's mma. Its warps share the pages and then the
full-precision tokens, merge what they have and write the output. With ``splits`` above one, that many blocks share the
work of one. Two blocks with a short sequence are a cluster and merge their partial results through one another's shared
memory; otherwise a second kernel does.
"""

from __future__ import annotations

import dataclasses
import functools

import jax

from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.page_format import PageFormat, round_up

COLUMNS = 8
WARPS = 4
PAIR_PAGES = 32  # pages of a sequence up to which two blocks are a cluster
LOG2E = 1.4426950408889634
KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

# q enters the products with key scales as float16(q * 2**-QUERY_SHIFT). Below 2**QUERY_LIMIT_LOG2 nothing can
# overflow: 2**(8 - 5) times the largest scale of a page, 2 * 2**13 / 3 (2 bits) or 4 times 2 * 2**13 / 15 (4 bits), is
# under 65,504. Larger q, and those below 1/2, take a slower branch.
QUERY_SHIFT = 5
QUERY_LIMIT_LOG2 = 8


def tile_unit(row_tile: int) -> float:
    """What an accumulator of ``row_tile`` is to be multiplied by: its codes enter the mma as subnormals code *
    4**(tile % 4) * 2**-24."""
    return 2.0**24 * 4.0 ** -(row_tile % 4)


def padded_rows(count: int) -> int:
    """Bytes of ``count`` 16-byte rows with a row of padding after every eight, against bank conflicts."""
    return 18 * count


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Static shape of one decode-attention call.

    Attributes:
        fmt: page format.
        batch, tokens, kv_heads, group: B, T, K and Q.
        pages: P, entries of a row of the page table.
        pool: M, records of the pool.
        sink, window: S and R.
        splits: blocks that share one sequence, head and column group.
        scale: softmax scale.
        kind: "bf16" or "f16", the dtype of queries and full-precision tokens.
        out_kind: "bf16", "f16" or "f32", the dtype of the output.
        insert: the kernel also writes the new token, the only one, into the buffers.
    """

    fmt: PageFormat
    batch: int
    tokens: int
    kv_heads: int
    group: int
    pages: int
    pool: int
    sink: int
    window: int
    splits: int
    scale: float
    kind: str
    out_kind: str
    insert: bool

    @classmethod
    def of(cls, inputs: DecodeInputs, scale: float, splits: int = 0, insert: bool = False) -> KernelShape:
        """The shape of a call; ``splits`` 0 is the device's choice."""
        kv, (batch, tokens, heads, _) = inputs.kv, inputs.q.shape
        pool, kv_heads, _ = kv.key_pages.shape
        shape = cls(
            fmt=kv.fmt,
            batch=batch,
            tokens=tokens,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            pages=inputs.page_table.shape[1] if pool else 0,
            pool=pool,
            sink=kv.sink,
            window=kv.window,
            splits=splits or 1,
            scale=float(scale),
            kind="bf16" if kv.tail_keys.dtype.name == "bfloat16" else "f16",
            out_kind=KINDS[inputs.q.dtype.name],
            insert=insert,
        )
        if splits:
            return shape
        return dataclasses.replace(shape, splits=choose_splits(shape.work_items, shape.pages, shape.smem.total))

    @property
    def head_dim(self) -> int:
        return self.fmt.head_dim

    @property
    def heads(self) -> int:
        """N, query heads."""
        return self.kv_heads * self.group

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of a query or full-precision token."""
        return 2 * self.head_dim

    @property
    def ring_slots(self) -> int:
        """R + G."""
        return self.window + self.fmt.page

    @property
    def columns(self) -> int:
        """Columns of a sequence and KV head, T * Q."""
        return self.tokens * self.group

    @property
    def column_groups(self) -> int:
        return -(-self.columns // COLUMNS)

    @property
    def stored_columns(self) -> int:
        """Columns of a group that may be real: those a partial result has room for."""
        return min(self.columns, COLUMNS)

    @property
    def units(self) -> int:
        """Warps that share one sequence, head and column group."""
        return self.splits * WARPS

    @property
    def work_items(self) -> int:
        """Sequences x KV heads x column groups."""
        return self.batch * self.kv_heads * self.column_groups

    @property
    def blocks(self) -> int:
        return self.work_items * self.splits

    @property
    def cluster(self) -> int:
        """Blocks of a cluster. Pairs only, and for short sequences: a cluster's blocks start and end together, which
        costs more than a second kernel where there is much to do, and at four or eight in any case."""
        return 2 if self.splits == 2 and self.pages <= PAIR_PAGES else 1

    @property
    def merges_in_memory(self) -> bool:
        """Whether blocks leave partial results in global memory to a second kernel."""
        return self.splits > self.cluster

    @property
    def has_edges(self) -> bool:
        """Whether there can be edge pages: keys quantized, values not yet."""
        return self.pages > 0 and self.window > 0

    @property
    def logit_factor(self) -> float:
        """From q . k to a power of two's exponent."""
        return self.scale * LOG2E

    @property
    def staged_logit_factor(self) -> float:
        """The same from products of the staged q."""
        return self.logit_factor * 2.0**QUERY_SHIFT

    @functools.cached_property
    def smem(self) -> SharedMemory:
        return SharedMemory.of(self.fmt)


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Byte offsets. Of the block: query rows, merge statistics, exponent of q; of a warp, from its base: key record,
    value record, scaled query rows, barriers."""

    stats: int
    exponent: int
    warps: int
    warp_bytes: int
    key: int
    value: int
    scaled: int
    barriers: int

    @property
    def total(self) -> int:
        return self.warps + WARPS * self.warp_bytes

    @classmethod
    def of(cls, fmt: PageFormat) -> SharedMemory:
        # Query rows [D][8 columns] float16 come first, at 0. A tile of statistics is 8 maxima and 8 sums; up to 2 a
        # warp, and the total.
        stats = padded_rows(fmt.head_dim)
        exponent = stats + (2 * WARPS + 1) * 2 * COLUMNS * 4
        warps = round_up(exponent + 4 * WARPS, 128)
        partial = 4 * COLUMNS * fmt.head_dim  # what a warp has at the end lies in its slots
        value = round_up(max(4 * fmt.key_words, partial), 128)
        scaled = value + round_up(max(4 * fmt.value_words, partial), 128)
        barriers = scaled + padded_rows(fmt.head_dim)
        return cls(stats, exponent, warps, round_up(barriers + 16, 128), 0, value, scaled, barriers)


# ---------------------------------------------------------------- splits
MULTIPROCESSORS = {"NVIDIA H100 PCIe": 114}  # of a device kind; an H100 or H200 SXM has 132
BLOCKS_PER_MULTIPROCESSOR = 4  # registers set it; shared memory may lower it
SHARED_MEMORY = 233_472  # bytes a multiprocessor has for its blocks (compute capability 9.0)
RESERVED_PER_BLOCK = 1_024
WHOLE_PAGES = 4  # pages of a sequence up to which one block takes it: a second kernel would cost more
LONG_PAGES = 64  # pages of a warp, without splits, from which a sequence is long
LONG_WAVES, SHORT_WAVES = 2.0, 0.5  # blocks to aim at, in blocks the device runs at once


def choose_splits(work_items: int, pages: int, smem_bytes: int) -> int:
    """Blocks that share one sequence and KV head, as measured best on an H200.

    Lengths are not known when the kernel is built, so the longest sequence that the page table has room for counts.
    One block a work item is best where that fills the device: nothing has to be merged. Two are a cluster where there
    is a multiprocessor for each.
    """
    multiprocessors = MULTIPROCESSORS.get(jax.devices()[0].device_kind, 132)
    per_sm = max(1, min(BLOCKS_PER_MULTIPROCESSOR, SHARED_MEMORY // (smem_bytes + RESERVED_PER_BLOCK)))
    slots = multiprocessors * per_sm
    if work_items >= slots or pages <= WHOLE_PAGES:
        return 1
    if pages <= PAIR_PAGES:
        return 2 if work_items <= multiprocessors else 1
    waves = LONG_WAVES if work_items * pages // WARPS > LONG_PAGES * slots // 4 else SHORT_WAVES
    return max(1, min(-(-pages // WARPS), round(waves * slots / work_items)))
