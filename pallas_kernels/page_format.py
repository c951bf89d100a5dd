"""The page format: what one page of one KV head looks like in memory, and the arrays of one layer.

A page holds ``page`` (G) consecutive tokens of one KV head as two self-contained records of bytes:

    key record    low plane | high plane | scale f16 [D] | min f16 [D] | boosted channels u8 [C] | exponent i8 | pad
    value record  low plane | high plane | scale f16 [G] | min f16 [G] | exponent i8 | pad

A code is ``low + 4 * high``. Ordinary key channels have 2-bit codes (no high bits); the C boosted ones have 4-bit
codes, and row c of the high plane belongs to channel ``channels[c]``, in ascending order. A 4-bit value cache has a
full high plane, a 2-bit one has none. The dequantized number is ``(code * scale + min) * 2**exponent``; the exponent is
0 unless the page holds numbers that float16 metadata could not (see :mod:`.quantize`). Records are padded to 16 bytes,
the granularity of bulk copies.

Dimension letters: B batch, K KV heads, G page, D head size, C boosted channels, S sink, R window, P pages per sequence,
M pages in the pool (DESIGN section 3).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

WARP = 32  # lanes that share a fragment
RECORD_ALIGNMENT = 16  # bytes


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple that is not below x."""
    return -(-x // multiple) * multiple


def plane_words(row_tiles: int, half_tiles: int) -> int:
    """uint32 words of a 2-bit plane of ``row_tiles`` x 16 rows and ``half_tiles`` x 8 columns (see :mod:`.packing`)."""
    return round_up(row_tiles * half_tiles, 8) // 8 * 2 * WARP


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a record: ``offset`` and ``size`` in bytes, ``dtype`` and ``count`` of the elements it is read as."""

    offset: int
    size: int
    dtype: np.dtype
    count: int


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """Shape of a page of one KV head.

    Attributes:
        page: G, tokens in a page; a positive multiple of 16.
        head_dim: D, a multiple of 16 up to 256.
        boosted: C, key channels with 4-bit codes, 0 to D.
        value_bits: bits of a value code, 2 or 4.
    """

    page: int = 128
    head_dim: int = 128
    boosted: int = 16
    value_bits: int = 2

    def __post_init__(self):
        if self.page <= 0 or self.page % 16:
            raise ValueError(f"page must be a positive multiple of 16 tokens, got {self.page}")
        if self.head_dim <= 0 or self.head_dim % 16 or self.head_dim > 256:
            raise ValueError(f"head_dim must be a multiple of 16 from 16 to 256, got {self.head_dim}")
        if not 0 <= self.boosted <= self.head_dim:
            raise ValueError(f"boosted must be from 0 to head_dim = {self.head_dim} channels, got {self.boosted}")
        if self.value_bits not in (2, 4):
            raise ValueError(f"value_bits must be 2 or 4, got {self.value_bits}")

    @functools.cached_property
    def key_parts(self) -> dict[str, Part]:
        """Parts of a key record by name, in record order."""
        g, d, c = self.page, self.head_dim, self.boosted
        return _lay_out(
            low=(np.uint32, plane_words(g // 16, d // 8)),
            high=(np.uint32, plane_words(g // 16, -(-c // 8))),
            scale=(np.float16, d),
            min=(np.float16, d),
            channels=(np.uint8, c),
            exponent=(np.int8, 1),
        )

    @functools.cached_property
    def value_parts(self) -> dict[str, Part]:
        """Parts of a value record by name, in record order."""
        g, d = self.page, self.head_dim
        words = plane_words(d // 16, g // 8)
        return _lay_out(
            low=(np.uint32, words),
            high=(np.uint32, words if self.value_bits == 4 else 0),
            scale=(np.float16, g),
            min=(np.float16, g),
            exponent=(np.int8, 1),
        )

    @property
    def key_words(self) -> int:
        """uint32 words of a key record."""
        return _words(self.key_parts)

    @property
    def value_words(self) -> int:
        """uint32 words of a value record."""
        return _words(self.value_parts)

    @property
    def key_bits(self) -> float:
        """Stored bits per key element, metadata and padding included."""
        return self.key_words * 32 / (self.page * self.head_dim)

    @property
    def value_bits_stored(self) -> float:
        """Stored bits per value element, metadata and padding included."""
        return self.value_words * 32 / (self.page * self.head_dim)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per cached element with metadata, averaged over keys and values."""
        return (self.key_bits + self.value_bits_stored) / 2


def _lay_out(**parts) -> dict[str, Part]:
    out, offset = {}, 0
    for name, (dtype, count) in parts.items():
        dtype = np.dtype(dtype)
        out[name] = Part(offset, dtype.itemsize * count, dtype, count)
        offset += dtype.itemsize * count
    return out


def _words(parts: dict[str, Part]) -> int:
    last = list(parts.values())[-1]
    return round_up(last.offset + last.size, RECORD_ALIGNMENT) // 4


def join_record(parts: dict[str, Array], layout: dict[str, Part]) -> Array:
    """Concatenates the parts [..., count] of a record into uint32 [..., words]; padding bytes are zero."""
    batch = parts["low"].shape[:-1]
    pieces, tail = [], []  # bytes are gathered first: their counts need not be multiples of 4
    for name, part in layout.items():
        x = parts[name]
        if x.shape != (*batch, part.count) or x.dtype != part.dtype:
            raise ValueError(f"part {name}: wanted {part.dtype}[{part.count}], got {x.dtype}{x.shape[len(batch) :]}")
        if part.dtype.itemsize == 1:
            tail.append(jax.lax.bitcast_convert_type(x, jnp.uint8))
        else:
            pieces.append(x if part.dtype.itemsize == 4 else _to_words(x))
    last = jnp.concatenate(tail, -1)
    size = _words(layout) * 4 - sum(4 * p.shape[-1] for p in pieces)
    last = jnp.pad(last, [(0, 0)] * len(batch) + [(0, size - last.shape[-1])])
    return jnp.concatenate([*pieces, _to_words(last)], -1)


def _to_words(x: Array) -> Array:
    per_word = 4 // x.dtype.itemsize
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, per_word), jnp.uint32)


def split_record(record: Array, layout: dict[str, Part]) -> dict[str, Array]:
    """Typed views of a record uint32 [..., words]: the inverse of :func:`join_record`."""
    out = {}
    for name, part in layout.items():
        first, end = part.offset // 4, -(-(part.offset + part.size) // 4)
        words = record[..., first:end]
        if part.dtype.itemsize == 4:
            out[name] = words
            continue
        x = jax.lax.bitcast_convert_type(words, jnp.dtype(part.dtype))
        x = x.reshape(*x.shape[:-2], -1)
        skip = (part.offset - 4 * first) // part.dtype.itemsize
        out[name] = x[..., skip : skip + part.count]
    return out


BUFFERS = ("sink_keys", "sink_values", "tail_keys", "ring_values")  # arrays of a LayerKV with one entry per sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """All cached keys and values of one layer.

    Sink, tail and window hold full-precision tokens in the model's dtype. With n = max(0, length - S) tokens past the
    sink, token i < n of those sits in tail slot ``i % G`` (until its page is full) and in ring slot ``i % (R + G)``;
    every slot holds the newest token congruent to it, so that the content depends on the tokens alone and not on how
    they were inserted.

    Attributes:
        key_pages: uint32 [M, K, key words], key records.
        value_pages: uint32 [M, K, value words], value records.
        sink_keys, sink_values: [B, K, S, D].
        tail_keys: [B, K, G, D], the keys that do not yet fill a page.
        ring_values: [B, K, R + G, D], the values in full precision.
        fmt: the page format.
    """

    key_pages: Array
    value_pages: Array
    sink_keys: Array
    sink_values: Array
    tail_keys: Array
    ring_values: Array
    fmt: PageFormat = dataclasses.field(metadata={"static": True})

    @property
    def sink(self) -> int:
        """S, tokens of the sink."""
        return self.sink_keys.shape[2]

    @property
    def window(self) -> int:
        """R, the newest values that always stay in full precision."""
        return self.ring_values.shape[2] - self.fmt.page

    def counts(self, lengths: Array) -> tuple[Array, Array, Array]:
        """(n, n_k, n_v) for ``lengths``: tokens past the sink, full key pages, full value pages (DESIGN section 2)."""
        n = jnp.maximum(lengths - self.sink, 0)
        return n, n // self.fmt.page, jnp.maximum(n - self.window, 0) // self.fmt.page


def buffer_slots(past_sink, page: int, ring: int) -> tuple:
    """(slot in the key tail, slot in the value ring) of token ``past_sink`` after the sink, with R + G = ``ring``.

    The one place of this arithmetic: ``past_sink`` is an int32 array, or a value of a kernel.
    """
    return past_sink % page, past_sink % ring
