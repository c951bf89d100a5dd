"""The key kernel by channels: statistics, scores, the choice of the boosted ones, the range of least error.

The page lies in shared memory. In passes over tokens, a thread takes two neighbouring channels of the tokens whose
lowest bits are its part; in between, thread t is channel t. Sums over tokens add in the order of
:func:`.quantize.tree_sum`: the highest bit of the token first, so the lowest bits, which the parts hold, come last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.metadata_kernel import Metadata, scale_and_min, scratch_bytes
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import THREADS, Value
from kitty_jax.pallas_kernels.quantize import Score
from kitty_jax.pallas_kernels.store import ptx_store as sx
from kitty_jax.pallas_kernels.store import tile as tiles
from kitty_jax.pallas_kernels.store.tile import PAGE, Layout, Tile


@dataclasses.dataclass(frozen=True)
class KeyPlan:
    """What is fixed when the kernel is built."""

    fmt: PageFormat
    kv_heads: int
    pool: int
    kind: str
    score: Score | None  # None: given scores
    weighted: bool
    shrink: tuple[float, ...]

    @property
    def chooses(self) -> bool:
        return 0 < self.fmt.boosted < self.fmt.head_dim

    @property
    def parts(self) -> int:
        """Threads that share a channel pair in the passes over tokens; part i takes the tokens whose low bits are i."""
        return THREADS // (self.fmt.head_dim // 2)

    @functools.cached_property
    def tile(self) -> Tile:
        return Tile(self.fmt.head_dim, self.kind, rows_per_pad=PAGE // 8, pad_bytes=32 if self.kind == "f32" else 16)

    @functools.cached_property
    def smem(self) -> Layout:
        d, per_part = self.fmt.head_dim, self.parts * self.fmt.head_dim
        return Layout.of(
            record=4 * self.fmt.key_words,
            tile=self.tile.size,
            sums=4 * per_part,
            lowest=self.tile.itemsize * per_part,
            highest=self.tile.itemsize * per_part,
            steps=4 * d,
            bases=4 * d,
            keys=4 * d,
            thresholds=3 * self.tile.itemsize * d,
            warps=4 * 16,
            metadata=scratch_bytes(self.fmt),
        )


class ChannelBlock:
    """One block's view of its page, by channels."""

    def __init__(self, plan: KeyPlan, smem: Value, tid: Value, block: Value):
        self.plan, self.fmt, self.tile = plan, plan.fmt, plan.tile
        self.tid = tid
        self.lane, self.warp = ptx.bit_and(tid, 31), ptx.warp_index(tid)
        self.at = {name: ptx.add(smem, offset) for name, offset in plan.smem.offsets.items()}
        self.part = {name: ptx.add(self.at["record"], p.offset) for name, p in plan.fmt.key_parts.items()}

    # ------------------------------------------------------------ statistics
    def pair_and_part(self) -> tuple[Value, Value]:
        pairs = self.fmt.head_dim // 2
        return ptx.bit_and(self.tid, pairs - 1), ptx.shr(self.tid, pairs.bit_length() - 1)

    def token_tree(self, leaf: Callable, join: Callable) -> list[Value]:
        """Reduces ``leaf(token)`` (a list) over the thread's tokens in the order of tree_sum.

        ``join(a, b)`` adds token lists; the thread's part fixes the lowest bits, which the caller combines last.
        """
        first_bit = self.plan.parts.bit_length() - 1

        def reduce(bit: int, token: int) -> list[Value]:
            if 1 << bit == PAGE:
                return leaf(token)
            return join(reduce(bit + 1, token), reduce(bit + 1, token | 1 << bit))

        return reduce(first_bit, 0)

    def combine_parts(self, name: str, f: Callable, load: Callable) -> Value:
        """The thread's channel over all parts, lowest token bit last."""
        d, size = self.fmt.head_dim, self.tile.itemsize if name != "sums" else 4
        own = ptx.add(self.at[name], ptx.mul(self.channel, size))
        values = [load(own, part * d * size) for part in range(self.plan.parts)]
        while len(values) > 1:
            half = len(values) // 2
            values = [f(a, b) for a, b in zip(values[:half], values[half:], strict=True)]
        return values[0]

    def channel_statistics(self) -> None:
        """Lowest, highest and summed magnitudes: of every part in shared memory, the channel's own in registers."""
        tile, d = self.tile, self.fmt.head_dim
        pair, part = self.pair_and_part()
        column = self.pair_column(pair, part)
        magnitudes = self.plan.chooses and self.plan.score == "magnitude"

        def leaf(token):
            words = tile.load_pair(column, self.tile.row_offset(token))
            sums = [ptx.fabs(x) for x in tile.to_floats(words)] if magnitudes else []
            return [words, words, sums]

        def join(a, b):
            low, high = tile.min_pairs(a[0], b[0]), tile.max_pairs(a[1], b[1])
            return [low, high, [ptx.fadd(x, y) for x, y in zip(a[2], b[2], strict=True)]]

        low, high, sums = self.token_tree(leaf, join)
        slot = ptx.add(ptx.mul(part, d), ptx.mul(pair, 2))
        for name, words in (("lowest", low), ("highest", high)):
            ptx.store_shared(words, ptx.add(self.at[name], ptx.mul(slot, tile.itemsize)))
        if magnitudes:
            ptx.store_shared(sums, ptx.add(self.at["sums"], ptx.mul(slot, 4)))
        ptx.sync_block()
        # With 64 channels, threads 64 to 127 repeat the work of channels 0 to 63 and store the same numbers.
        self.channel = ptx.bit_and(self.tid, d - 1)
        self.lowest = self.combine_parts("lowest", sx.fmin, tile.load_number)
        self.highest = self.combine_parts("highest", ptx.fmax, tile.load_number)

    def pair_column(self, pair: Value, part: Value) -> Value:
        """Address of the thread's channel pair in its first row."""
        row = ptx.mul(part, self.tile.row_bytes)
        return ptx.add(self.at["tile"], ptx.add(row, ptx.mul(pair, 2 * self.tile.itemsize)))

    def channel_score(self, vectors: list[Value]) -> Value:
        """The score of the thread's channel, as :func:`.quantize.channel_scores`, times its weight."""
        vectors = list(vectors)
        own = lambda v: ptx.load_global(1, ptx.address(v, self.channel, 4), kind="f")  # noqa: E731
        load = lambda pointer, offset: ptx.load_shared(1, pointer, offset, kind="f")  # noqa: E731
        mean = lambda x: ptx.fmul(x, ptx.f32(1 / PAGE))  # noqa: E731  (a power of two: exact)
        if self.plan.score is None:
            score = own(vectors.pop(0))
        elif self.plan.score == "range":
            score = ptx.fsub(self.highest, self.lowest)
        elif self.plan.score == "magnitude":
            score = mean(self.combine_parts("sums", ptx.fadd, load))
        else:
            score = mean(self.sum_over_tokens(lambda x, centre: tiles.short_square(ptx.fsub(x, centre)), mean))
        return ptx.fmul(score, own(vectors.pop(0))) if self.plan.weighted else score

    def sum_over_tokens(self, term: Callable, mean: Callable) -> Value:
        """Sum of ``term(x, mean of x)`` over the tokens of the thread's channel."""
        load = lambda pointer, offset: ptx.load_shared(1, pointer, offset, kind="f")  # noqa: E731
        self.store_sums(lambda x, i: x)
        centre = mean(self.combine_parts("sums", ptx.fadd, load))
        ptx.store_shared([centre], ptx.add(self.at["bases"], ptx.mul(self.channel, 4)))
        ptx.sync_block()
        pair, _ = self.pair_and_part()
        centres = ptx.load_shared(2, ptx.add(self.at["bases"], ptx.mul(pair, 8)), kind="f")
        self.store_sums(lambda x, i: term(x, centres[i]))
        return self.combine_parts("sums", ptx.fadd, load)

    def store_sums(self, term: Callable) -> None:
        """Sums ``term(x, 0 or 1)`` over the tokens of each part into shared memory; a barrier before and after."""
        pair, part = self.pair_and_part()
        column = self.pair_column(pair, part)

        def leaf(token):
            numbers = self.tile.to_floats(self.tile.load_pair(column, self.tile.row_offset(token)))
            return [term(x, i) for i, x in enumerate(numbers)]

        sums = self.token_tree(leaf, lambda a, b: [ptx.fadd(x, y) for x, y in zip(a, b, strict=True)])
        slot = ptx.add(ptx.mul(part, self.fmt.head_dim), ptx.mul(pair, 2))
        ptx.sync_block()
        ptx.store_shared(sums, ptx.add(self.at["sums"], ptx.mul(slot, 4)))
        ptx.sync_block()

    # ------------------------------------------------------------ the choice of channels
    def choose_channels(self, vectors: list[Value]) -> Value:
        """Writes the list of boosted channels and returns 1 in the threads whose channel is one."""
        c, d = self.fmt.boosted, self.fmt.head_dim
        if not self.plan.chooses:
            if c:
                sx.store_shared_byte(self.channel, ptx.add(self.part["channels"], self.channel))
            return ptx.i32(1 if c else 0)
        key = tiles.sortable(self.channel_score(vectors))
        keys = self.at["keys"]
        ptx.store_shared([key], ptx.add(keys, ptx.mul(self.channel, 4)))
        ptx.sync_block()
        rank, own = ptx.i32(0), ptx.sub(ptx.i32(d - 1), self.channel)
        for first in range(0, d, 4):
            for i, other in enumerate(ptx.load_shared(4, keys, 4 * first)):
                rank = sx.add_if_above(rank, other, d - 1 - first - i, key, own)
        boosted = sx.flag_if_less_unsigned(rank, ptx.i32(c))
        vote = sx.ballot(boosted)
        ptx.store_shared([vote], ptx.add(self.at["warps"], ptx.mul(self.warp, 4)))
        ptx.sync_block()
        slot = sx.popc(ptx.bit_and(vote, sx.lanes_below()))
        # Warps of the same channels come d // 32 apart.
        own_warp = ptx.bit_and(self.warp, d // 32 - 1)
        for warp in range(d // 32 - 1):
            votes = sx.popc(ptx.load_shared(1, self.at["warps"], 4 * warp))
            slot = ptx.add(slot, ptx.select(ptx.less(ptx.i32(warp), own_warp), votes, ptx.i32(0)))
        with ptx.when(ptx.not_equal(boosted, 0)):
            sx.store_shared_byte(self.channel, ptx.add(self.part["channels"], slot))
        return boosted

    def store_channel(self, name: str, value: Value) -> None:
        ptx.store_shared([value], ptx.add(self.at[name], ptx.mul(self.channel, 4)))

    def best_range(
        self, metadata: Metadata, low: Value, high: Value, reciprocal: Value, levels: Value
    ) -> tuple[Value, Value]:
        """Scale and min of the shrink factor of least squared error, ties to the first."""
        self.store_channel("keys", levels)
        pair, _ = self.pair_and_part()
        load = lambda pointer, offset: ptx.load_shared(1, pointer, offset, kind="f")  # noqa: E731

        def attempt(cut):
            scale, base = scale_and_min(metadata, *tiles.shrunk_range(low, high, cut), reciprocal)
            self.store_channel("steps", scale)
            self.store_channel("bases", base)
            ptx.sync_block()
            steps, bases, tops = (
                ptx.load_shared(2, ptx.add(self.at[name], ptx.mul(pair, 8)), kind="f")
                for name in ("steps", "bases", "keys")
            )
            self.store_sums(lambda x, j: tiles.squared_error(ptx.fmul(x, self.inverse), steps[j], bases[j], tops[j]))
            return self.combine_parts("sums", ptx.fadd, load), scale, base

        best = tiles.best_of(self.plan.shrink, attempt)
        ptx.sync_block()
        return best
