"""Quantize-and-pack of key pages as a Mosaic GPU kernel: a block of 128 threads for every page and KV head.

Stages: the page comes to shared memory by asynchronous copies; channel_statistics (lowest, highest, magnitudes) and
choose_channels (:mod:`.store_channels_mgpu`); scale_channels; pack_low_plane; pack_boosted; the record is copied out.
The result equals :func:`.quantize.quantize_keys` bit for bit:

* sums over tokens add in the order of :func:`.quantize.tree_sum`;
* a 2-bit code is how many of three thresholds an element reaches. A threshold is a number of the input's dtype, so two
  channels of a token are compared at once, and no element is converted, scaled or divided;
* a 4-bit code is a quotient that is off by less than its distance to the next tie (:func:`.store_tile_mgpu.quotient`).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.metadata_kernel import choose_metadata, scale_and_min
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import THREADS, Value
from kitty_jax.pallas_kernels.quantize import KEY_LIMIT_LOG2, Score
from kitty_jax.pallas_kernels.store import ptx_store as sx
from kitty_jax.pallas_kernels.store import tile as tiles
from kitty_jax.pallas_kernels.store.channels import ChannelBlock, KeyPlan
from kitty_jax.pallas_kernels.store.tile import KINDS


def store_keys(
    pool_ref,
    keys: Array,
    page_ids: Array,
    fmt: PageFormat,
    *,
    score: Score,
    weights: Array | None,
    scores: Array | None,
    shrink: tuple[float, ...],
) -> None:
    """Writes the records of ``keys`` [X, K, G, D] into the ref of the pool [M, K, words]; ids outside are skipped."""
    x, k = keys.shape[:2]
    plan = KeyPlan(
        fmt=fmt,
        kv_heads=k,
        pool=pool_ref.shape[0],
        kind=KINDS[keys.dtype.name],
        score=None if scores is not None else score,
        weighted=weights is not None,
        shrink=tuple(shrink),
    )
    vectors = []
    if plan.chooses:
        vectors = [
            jnp.broadcast_to(v.astype(jnp.float32), (x, k, fmt.head_dim)) for v in (scores, weights) if v is not None
        ]
    ptx.launch(functools.partial(emit, plan), (), blocks=x * k, smem_bytes=plan.smem.total, name="store_key_pages")(
        pool_ref, keys, page_ids, *vectors
    )


def emit(plan: KeyPlan, addresses: list[Value], smem: Value) -> None:
    pool, keys, page_ids, *vectors = addresses
    tid, block = ptx.special_register("tid.x"), ptx.special_register("ctaid.x")
    page, head = ptx.div(block, plan.kv_heads), ptx.rem(block, plan.kv_heads)
    record = ptx.load_global(1, ptx.address(page_ids, page, 4))
    with ptx.when(sx.less_unsigned(record, plan.pool)):
        KeyBlock(plan, smem, tid, block).run(
            ptx.address(keys, block, plan.tile.bytes_in_memory),
            [ptx.address(v, block, 4 * plan.fmt.head_dim) for v in vectors],
            ptx.address(pool, ptx.add(ptx.mul(record, plan.kv_heads), head), 4 * plan.fmt.key_words),
        )


class KeyBlock(ChannelBlock):
    """One block's work. Lane ``4 * g + c`` packs row g of a fragment and columns 2c, 2c + 1 of its half tiles."""

    def run(self, keys: Value, vectors: list[Value], record: Value) -> None:
        first = ptx.address(keys, self.tid, tiles.CHUNK)
        self.tile.load(self.tid, self.at["tile"], lambda i: (first, i * THREADS * tiles.CHUNK))
        self.clear_record()
        sx.wait_for_copies()
        ptx.sync_block()
        self.channel_statistics()
        self.scale_channels(vectors)
        ptx.sync_block()
        if self.fmt.boosted < self.fmt.head_dim:
            self.pack_low_plane()
            ptx.sync_block()
        if self.fmt.boosted:
            self.pack_boosted()
            ptx.sync_block()
        tiles.copy_record(self.tid, self.at["record"], record, self.fmt.key_words)

    def clear_record(self) -> None:
        """Zeros where not every byte is written later: the high plane of a C that is no multiple of 8, and the end."""
        parts, end = self.fmt.key_parts, 4 * self.fmt.key_words
        first = parts["high"].offset if self.fmt.boosted % 8 else parts["channels"].offset // 16 * 16
        # scale and min are stored after the next barrier, so that clearing a chunk of theirs harms nothing.
        tiles.clear(self.tid, self.at["record"], first, end)

    def scale_channels(self, vectors: list[Value]) -> None:
        """Scale, min, thresholds of the thread's channel, and the page's exponent."""
        boosted = ptx.not_equal(self.choose_channels(vectors), 0)
        top = ptx.fmax(ptx.fabs(self.lowest), ptx.fabs(self.highest))
        top = ptx.reduce_lanes(ptx.fmax, top, (1, 2, 4, 8, 16))
        exponent = tiles.page_exponent(top, self.warp, ptx.add(self.at["warps"], 16), KEY_LIMIT_LOG2)
        sx.store_shared_byte(exponent, self.part["exponent"])
        self.power = ptx.power_of_two(exponent)
        self.inverse = ptx.power_of_two(ptx.sub(ptx.i32(0), exponent))
        low, high = ptx.fmul(self.lowest, self.inverse), ptx.fmul(self.highest, self.inverse)
        reciprocal = ptx.select(boosted, ptx.f32(tiles.RECIPROCAL[4]), ptx.f32(tiles.RECIPROCAL[2]))
        metadata = choose_metadata(self.fmt, low, high, reciprocal, self.plan.shrink, self.warp, self.at["metadata"])
        if self.plan.shrink == (1.0,):
            scale, base = scale_and_min(metadata, low, high, reciprocal)
        else:
            levels = ptx.select(boosted, ptx.f32(15.0), ptx.f32(3.0))
            scale, base = self.best_range(metadata, low, high, reciprocal, levels)
        metadata.store(self.part, self.channel, scale, base)
        for i, word in enumerate(metadata.grid_words()):
            for j in range(4):  # byte by byte: odd numbers of channels come before it
                sx.store_shared_byte(ptx.shr(word, 8 * j), self.part["grid"], 4 * i + j)
        step = tiles.nonzero(scale)
        self.store_channel("steps", step)
        self.store_channel("bases", base)
        if self.fmt.boosted < self.fmt.head_dim:
            size = self.tile.itemsize
            own = ptx.add(self.at["thresholds"], ptx.mul(self.channel, size))
            for i in range(3):
                first = sx.first_with_code(i + 1, base, step, self.power)
                self.tile.store_threshold(first, own, i * self.fmt.head_dim * size)

    # ------------------------------------------------------------ packing
    def pack_low_plane(self) -> None:
        """The low plane as if every channel had 2 bits: a lane packs 16 tokens of two channels into two words."""
        tile, d = self.tile, self.fmt.head_dim
        g, c = ptx.shr(self.lane, 2), ptx.bit_and(self.lane, 3)
        chunks = d // 16  # of two half tiles
        for i in range(chunks // 4):
            chunk = ptx.add(self.warp, 4 * i)
            words = []
            for half_tile in range(2):
                channel = ptx.add(ptx.add(ptx.mul(chunk, 16), 8 * half_tile), ptx.mul(c, 2))
                offset = ptx.mul(channel, tile.itemsize)
                limits = [
                    tile.load_pair(ptx.add(self.at["thresholds"], offset), j * d * tile.itemsize) for j in range(3)
                ]
                column = ptx.add(ptx.add(self.at["tile"], ptx.mul(g, tile.group_bytes)), offset)
                for rh in range(2):
                    word = ptx.i32(0)
                    for r in range(8):
                        x = tile.load_pair(column, (2 * r + rh) * tile.row_bytes)
                        word = tiles.insert_codes(word, [tile.reaches(x, limit) for limit in limits], r)
                    words.append(word)
            where = ptx.add(ptx.mul(chunk, 512), ptx.mul(self.lane, 16))
            ptx.store_shared(words, ptx.add(self.part["low"], where))

    def pack_boosted(self) -> None:
        """Both planes of the boosted channels: a thread packs 16 tokens of one, half a word each for rh = 0 and 1."""
        tile, boosted = self.tile, self.fmt.boosted
        items = 8 * boosted
        half_tiles = -(-boosted // 8)

        def item(i):
            slot, g = ptx.shr(i, 3), ptx.bit_and(i, 7)
            channel = ptx.load_shared_byte(ptx.add(self.part["channels"], slot))
            step, base = (
                ptx.load_shared(1, ptx.add(self.at[name], ptx.mul(channel, 4)), kind="f") for name in ("steps", "bases")
            )
            inverse = ptx.rcp(step)
            start = ptx.add(ptx.mul(g, tile.group_bytes), ptx.mul(channel, tile.itemsize))
            column = ptx.add(self.at["tile"], start)
            low = ptx.add(self.part["low"], tiles.half_word_offset(channel, g, self.fmt.head_dim // 8))
            high = ptx.add(self.part["high"], tiles.half_word_offset(slot, g, half_tiles))
            for rh in range(2):
                numbers = [tile.load_number(column, (2 * r + rh) * tile.row_bytes) for r in range(8)]
                nibbles = tiles.code_nibbles(numbers, self.inverse, [(step, base, inverse)] * 8)
                for plane, shift in ((low, 0), (high, 2)):
                    bits = sx.even_pairs(ptx.bit_and(ptx.shr(nibbles, shift), 0x33333333))
                    sx.store_shared_half(bits, plane, 4 * rh)

        if items >= THREADS:
            ptx.loop(ptx.i32(0), ptx.i32(items // THREADS), ptx.i32(1), [], lambda i: item(self.item_index(i)) or [])
        if items % THREADS:
            last = ptx.add(self.tid, items // THREADS * THREADS)
            with ptx.when(sx.less_unsigned(last, items)):
                item(last)

    def item_index(self, i: Value) -> Value:
        return ptx.add(ptx.mul(i, THREADS), self.tid)
