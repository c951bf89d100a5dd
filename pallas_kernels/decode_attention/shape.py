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

from kitty_jax.pallas_kernels.page_format import PageFormat

COLUMNS = 8
WARPS = 4
PAIR_PAGES = 32  # pages of a sequence up to which two blocks are a cluster
LOG2E = 1.4426950408889634

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
class DecodePlan:
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
    insert: bool = False

    @property
    def head_dim(self) -> int:
        return self.fmt.head_dim

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

    @functools.cached_property
    def smem(self) -> SharedMemory:
        return SharedMemory.of(self.fmt)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Byte offsets. Of the block: query rows, merge statistics, exponents of q; of a warp, from its base: key record,
    value record, scaled query rows, mins as float16 where the record has them otherwise, barriers."""

    stats: int
    exponents: int
    warps: int
    warp_bytes: int
    key: int
    value: int
    scaled: int
    mins: int
    barriers: int

    @property
    def total(self) -> int:
        return self.warps + WARPS * self.warp_bytes

    @classmethod
    def of(cls, fmt: PageFormat) -> SharedMemory:
        # Query rows [D][8 columns] float16 come first, at 0. A tile of statistics is 8 maxima and 8 sums; up to 2 a
        # warp, and the total.
        stats = padded_rows(fmt.head_dim)
        exponents = stats + (2 * WARPS + 1) * 2 * COLUMNS * 4
        warps = _round_up(exponents + 4 * WARPS, 128)
        partial = 4 * COLUMNS * fmt.head_dim  # what a warp has at the end lies in its slots
        value = _round_up(max(4 * fmt.key_words, partial), 128)
        scaled = value + _round_up(max(4 * fmt.value_words, partial), 128)
        mins = scaled + padded_rows(fmt.head_dim)
        barriers = mins + (0 if fmt.metadata == "float16" else 2 * fmt.head_dim)
        return cls(stats, exponents, warps, _round_up(barriers + 16, 128), 0, value, scaled, mins, barriers)
