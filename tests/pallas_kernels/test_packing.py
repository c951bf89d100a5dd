"""Packing of 2-bit planes: bit positions worked out by hand, an independent scalar formula, round trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import packing
from kitty_jax.pallas_kernels.page_format import plane_words

# (page, channels, token, channel) -> (word, lowest bit), worked out from the module's docstring by hand.
KEY_BITS = [
    ((128, 128, 0, 0), (0, 0)),
    ((128, 128, 1, 0), (1, 0)),  # rh = 1: the lane's second word
    ((128, 128, 2, 0), (0, 2)),  # row tile 1: field 1
    ((128, 128, 15, 0), (1, 14)),  # row tile 7, rh = 1
    ((128, 128, 16, 0), (16, 0)),  # g = 1: lane 4, four words a lane
    ((128, 128, 127, 0), (28 * 4 + 1, 14)),
    ((128, 128, 0, 1), (0, 16)),  # e = 1: upper half of the word
    ((128, 128, 0, 2), (4, 0)),  # c = 1: lane 1
    ((128, 128, 0, 7), (12, 16)),
    ((128, 128, 0, 8), (2, 0)),  # half tile 1: second pair of the chunk
    ((128, 128, 0, 16), (128, 0)),  # half tile 2: next chunk
    ((128, 128, 127, 127), (7 * 128 + 31 * 4 + 3, 30)),
    ((128, 8, 16, 0), (8, 0)),  # one group alone: two words a lane
    ((128, 8, 1, 3), (2 + 1, 16)),
    ((128, 24, 16, 16), (128 + 8, 0)),  # the odd last group follows the chunk of the first two
    ((64, 16, 2, 0), (0, 2)),
    ((64, 16, 8, 0), (8, 0)),  # G/8 = 8 tokens a lane; one group alone
    ((64, 16, 0, 8), (0, 8)),  # 4 row tiles: half tile 1 continues the word at field 4
    ((16, 64, 0, 8), (0, 2)),  # 1 row tile: the field is the half tile
    ((16, 64, 2, 0), (8, 0)),  # G/8 = 2 tokens a lane: lane 4 of a lone pair
]
VALUE_BITS = [
    ((128, 128, 0, 0), (0, 0)),
    ((128, 128, 0, 1), (16, 0)),  # channel 1: g = 1, lane 4
    ((128, 128, 0, 8), (1, 0)),  # rh = 1
    ((128, 128, 0, 16), (0, 2)),  # row tile 1
    ((128, 128, 0, 127), (28 * 4 + 1, 14)),
    ((128, 128, 1, 0), (2, 0)),  # half tile 1
    ((128, 128, 2, 0), (128, 0)),  # half tile 2
    ((128, 128, 16, 0), (0, 16)),  # e = 1
    ((128, 128, 32, 0), (4, 0)),  # c = 1
    ((128, 128, 127, 127), (7 * 128 + 31 * 4 + 3, 30)),
    ((128, 64, 1, 0), (0, 8)),  # 4 row tiles: half tile 1 continues the word at field 4
    ((128, 64, 2, 0), (2, 0)),
    ((128, 64, 4, 0), (128, 0)),
]


def _position(half_tile, row_tile, g, c, rh, e, half_tiles, row_tiles):
    """(word, lowest bit) of a code, in scalar arithmetic."""
    tile = half_tile * row_tiles + row_tile
    group, field = tile // 8, tile % 8
    groups = -(-half_tiles * row_tiles // 8)
    lane = 4 * g + c
    if groups % 2 and group == groups - 1:
        word = 64 * group + 2 * lane + rh
    else:
        word = 128 * (group // 2) + 4 * lane + 2 * (group % 2) + rh
    return word, 2 * field + 16 * e


def key_position(page, channels, token, channel):
    g, rest = divmod(token, page // 8)
    half_tile, column = divmod(channel, 8)
    return _position(half_tile, rest // 2, g, column // 2, rest % 2, column % 2, -(-channels // 8), page // 16)


def value_position(page, head_dim, token, channel):
    column, half_tile = divmod(token, page // 8)
    row_tile, row = divmod(channel, 16)
    return _position(half_tile, row_tile, row % 8, column // 2, row // 8, column % 2, page // 8, head_dim // 16)


def _expected(codes, position, words):
    out = np.zeros(words, np.uint64)
    for (token, channel), code in np.ndenumerate(codes):
        word, bit = position(*codes.shape, token, channel)
        out[word] += np.uint64(int(code) << bit)  # + and not |: a bit used twice would carry into its neighbour
    assert out.max(initial=0) < 2**32
    return out.astype(np.uint32)


SIDES = {
    "keys": (packing.pack_keys, packing.unpack_keys, key_position, KEY_BITS),
    "values": (packing.pack_values, packing.unpack_values, value_position, VALUE_BITS),
}


@pytest.mark.parametrize("side", SIDES)
def test_bit_positions_by_hand(side):
    pack, _, position, known = SIDES[side]
    for where, (word, bit) in known:
        page, channels, token, channel = where
        codes = np.zeros((page, channels), np.int32)
        codes[token, channel] = 3
        words = np.asarray(pack(jnp.asarray(codes)))
        assert [(i, int(words[i])) for i in np.flatnonzero(words)] == [(word, 3 << bit)], where
        assert position(*where) == (word, bit), where


@pytest.mark.parametrize(
    "side,page,channels",
    [
        *(("keys", *shape) for shape in [(128, 128), (128, 5), (64, 24), (48, 40), (16, 1), (32, 80)]),
        *(("values", *shape) for shape in [(128, 128), (128, 64), (64, 128), (16, 16), (48, 80), (32, 256)]),
    ],
)
def test_planes_match_the_scalar_formula_and_return(side, page, channels):
    pack, unpack, position, _ = SIDES[side]
    codes = np.random.default_rng(page + channels).integers(0, 4, (page, channels))
    words = pack(jnp.asarray(codes))
    assert words.dtype == jnp.uint32
    tiles = (page // 16, -(-channels // 8)) if side == "keys" else (channels // 16, page // 8)
    assert words.shape == (plane_words(*tiles),)
    np.testing.assert_array_equal(words, _expected(codes, position, words.size))
    np.testing.assert_array_equal(unpack(words, page, channels), codes)


@pytest.mark.parametrize("side", SIDES)
def test_leading_axes_are_independent(side):
    pack, unpack, *_ = SIDES[side]
    codes = np.random.default_rng(0).integers(0, 4, (2, 3, 32, 16))
    words = pack(jnp.asarray(codes))
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(words[index], pack(jnp.asarray(codes[index])))
    np.testing.assert_array_equal(jax.jit(pack)(codes), words)
    np.testing.assert_array_equal(unpack(words, 32, 16), codes)


def test_padding_is_zero():
    """Channels beyond C and tiles beyond the last are stored as zeros, so that records compare equal word by word."""
    words = packing.pack_keys(jnp.full((16, 3), 3, jnp.int32))
    ones = sum(int(word).bit_count() for word in np.asarray(words))
    assert ones == 16 * 3 * 2
