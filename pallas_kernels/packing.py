"""Fragment-major packing of 2-bit codes: the only statement of bit order in this project.

The tensor core's ``mma.m16n8k16`` takes its A operand as 16 x 16 tiles. Lane ``4 * g + c`` (g 0..7, c 0..3) holds, for
each half tile of 8 columns, the entries in rows ``g`` and ``g + 8`` (rh = 0, 1) and columns ``2 * c + e`` (e = 0, 1). A
plane is stored so that the words one lane needs lie together:

* tiles are numbered ``u = half_tile * row_tiles + row_tile``; eight consecutive ones share a word: tile u is field
  ``u % 8`` of word group ``u // 8``. A field is two bits in each 16-bit half of the word: entry e of field f is bits
  ``2 f + 16 e``. With 8 row tiles (a key page of 128 tokens, a value page of head size 128), and with 4, the field
  depends on the row tile (and the half tile's parity) alone, so that one constant per accumulator undoes the field's
  power of four;
* word ``2 * group + rh`` of a lane; four words of a lane make a 16-byte chunk, and chunks are stored chunk, lane, word.
  An odd last pair of words is stored lane, word.

Rows and columns of a page:

* keys are tokens x channels: token ``g * G/8 + 2 * row_tile + rh``, channel ``8 * half_tile + 2 * c + e``, so that a
  lane's 16 tokens of a 128-token page are consecutive;
* values are channels x tokens: channel ``16 * row_tile + 8 * rh + g``, token ``(2 * c + e) * G/8 + half_tile``, which
  is where the transposed weights of those tokens land.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from kitty_jax.pallas_kernels.page_format import WARP

_FIELD_SHIFTS = np.array([[2 * field + 16 * e for e in range(2)] for field in range(8)], np.uint32)


def _pack_tiles(x: Array) -> Array:
    """Codes [..., h, r, g, c, rh, e] -> words [..., words]."""
    *batch, h, r = x.shape[:-4]
    x = x.reshape(*batch, h * r, *x.shape[-4:])
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -(h * r) % 8)] + [(0, 0)] * 4)
    x = jnp.moveaxis(x.reshape(*batch, -1, 8, *x.shape[-4:]), -5, -2)  # group g c rh field e
    words = jnp.sum(x.astype(jnp.uint32) << _FIELD_SHIFTS, axis=(-1, -2), dtype=jnp.uint32)  # group g c rh
    chunks = words.shape[-4] // 2
    full = words[..., : 2 * chunks, :, :, :].reshape(*batch, chunks, 2, WARP, 2)
    full = jnp.swapaxes(full, -2, -3).reshape(*batch, -1)  # chunk lane (pair rh)
    last = words[..., 2 * chunks :, :, :, :].reshape(*batch, -1)  # lane rh
    return jnp.concatenate([full, last], -1)


def _unpack_tiles(words: Array, half_tiles: int, row_tiles: int) -> Array:
    """Words [..., words] -> codes uint32 [..., h, r, g, c, rh, e]."""
    *batch, count = words.shape
    groups = count // (2 * WARP)
    chunks = groups // 2
    full = words[..., : chunks * 4 * WARP].reshape(*batch, chunks, WARP, 2, 2)
    full = jnp.swapaxes(full, -2, -3).reshape(*batch, chunks * 2, 8, 4, 2)
    last = words[..., chunks * 4 * WARP :].reshape(*batch, groups % 2, 8, 4, 2)
    x = jnp.concatenate([full, last], -4)  # group g c rh
    x = (x[..., None, None] >> _FIELD_SHIFTS) & np.uint32(3)  # group g c rh field e
    x = jnp.moveaxis(x, -2, -5).reshape(*batch, groups * 8, 8, 4, 2, 2)
    x = x[..., : half_tiles * row_tiles, :, :, :, :]
    return x.reshape(*batch, half_tiles, row_tiles, 8, 4, 2, 2)


# Axes in the einsums, which only transpose: the letters of the module's docstring, x for rh.
def pack_keys(codes: Array) -> Array:
    """Packs one 2-bit plane of keys.

    Args:
        codes: integers 0..3, [..., G tokens, C channels]; G a multiple of 16. C is padded to a multiple of 8 with
            zeros.

    Returns:
        uint32 [..., words], ``words = plane_words(G / 16, ceil(C / 8))``.
    """
    *batch, g, c = codes.shape
    codes = jnp.pad(codes, [(0, 0)] * (len(batch) + 1) + [(0, -c % 8)])
    return _pack_tiles(jnp.einsum("...grxhce->...hrgcxe", codes.reshape(*batch, 8, g // 16, 2, -(-c // 8), 4, 2)))


def unpack_keys(words: Array, page: int, channels: int) -> Array:
    """Inverse of :func:`pack_keys`: uint32 codes [..., page, channels]."""
    x = jnp.einsum("...hrgcxe->...grxhce", _unpack_tiles(words, -(-channels // 8), page // 16))
    return x.reshape(*words.shape[:-1], page, -1)[..., :channels]


def pack_values(codes: Array) -> Array:
    """Packs one 2-bit plane of values.

    Args:
        codes: integers 0..3, [..., G tokens, D channels]; G a multiple of 8, D of 16.

    Returns:
        uint32 [..., words], ``words = plane_words(D / 16, G / 8)``.
    """
    *batch, g, d = codes.shape
    return _pack_tiles(jnp.einsum("...cehrxg->...hrgcxe", codes.reshape(*batch, 4, 2, g // 8, d // 16, 2, 8)))


def unpack_values(words: Array, page: int, head_dim: int) -> Array:
    """Inverse of :func:`pack_values`: uint32 codes [..., page, head_dim]."""
    x = jnp.einsum("...hrgcxe->...cehrxg", _unpack_tiles(words, page // 8, head_dim // 16))
    return x.reshape(*words.shape[:-1], page, head_dim)
