"""The grid of fixed8 metadata, against rational numbers, and what pages lose by it against float16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import metadata, quantize
from kitty_jax.pallas_kernels.metadata import Grid
from kitty_jax.pallas_kernels.page_format import PageFormat, split_record

HALF = PageFormat(page=32, head_dim=32, boosted=8)
FIXED = dataclasses.replace(HALF, metadata="fixed8")


def ends():
    """Lower and upper ends, float32 [n] each: of every kind a page can have, and some more at random."""
    by_hand = [
        (0, 0), (1, 1), (-1, -1), (-3.7, -3.7), (0, 1e-6), (-1e-6, 0), (0, 1e-30), (0, 2.0**-24), (0.1, 0.1 + 1e-7),
        (-8191.99, 8191.99), (8191, 8192), (-8192, -8191), (0, 8191.99), (1000, 1000.5), (-1000.5, -1000), (5, 5.001),
        (239, 478), (0, 239), (0, 239.00002), (-1792, -1791), (1792, 1792), (1792.0001, 1792.0001), (-120, 119),
        (-0.0, 0.0), (15.999, 254.999), (-31.999, 207),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    centre = rng.normal(size=3000) * 2.0 ** rng.integers(-20, 11, 3000)
    width = np.abs(rng.normal(size=3000)) * 2.0 ** rng.integers(-20, 11, 3000)
    random = np.stack([centre - width, centre + width], -1)
    return np.concatenate([np.array(by_hand), random]).astype(np.float32).T


@functools.cache
def grids():
    low, high = ends()
    return low, high, *(np.asarray(x) for x in jax.jit(metadata.choose_grid)(low, high))


def test_every_number_is_a_float16_and_every_byte_comes_back():
    _, _, step, base = grids()
    assert step.min() == -24
    assert step.max() == 7
    assert base.min() >= -113
    assert base.max() <= 112
    every = np.arange(256, dtype=np.uint8)
    grid = Grid(jnp.asarray(step)[:, None], jnp.asarray(base)[:, None])
    numbers = np.asarray(jax.jit(metadata.to_numbers)(every[None], grid))
    want = (16.0 * base[:, None] + every) * 2.0 ** step[:, None].astype(np.float64)
    np.testing.assert_array_equal(numbers, want)
    # Numbers over 65,504 belong to no page: those between the ends are below 2**13.
    small = np.abs(want) < 65504
    np.testing.assert_array_equal(want.astype(np.float16)[small], want[small])
    back = jax.jit(metadata.to_bytes)(numbers, grid)
    np.testing.assert_array_equal(back, np.broadcast_to(every, back.shape))


def test_nothing_between_the_ends_is_off_by_over_half_a_step():
    low, high, step, base = grids()
    x = np.linspace(low, high, 41, dtype=np.float32)
    x = np.clip(np.concatenate([x, np.nextafter(low, high)[None], np.nextafter(high, low)[None]]), low, high)
    got = np.asarray(jax.jit(metadata.round_to)(x, Grid(step, base)), np.float64)
    assert (np.abs(got - x) <= 2.0 ** step.astype(np.float64) / 2).all()


def test_the_step_is_the_least_that_does():
    """A step of half the size would leave the span over 239 levels, or the farther end over 1,792 from zero."""
    low, high, step, _ = (x.astype(np.float64) for x in grids())
    half = 2.0 ** (step - 1)
    rounding = 1 - 2.0**-22  # of the difference and of 1 / 239 to float32
    too_fine = ((high - low) / half > 239 * rounding) | (np.maximum(abs(low), abs(high)) / half > 1792 * rounding)
    assert (too_fine | (step == -24)).all()


def test_rounding_goes_to_even_and_stops_at_the_ends():
    grid = Grid(jnp.int32(1), jnp.int32(-1))  # -16 * 2 = -32 is byte 0
    x = jnp.asarray([-32, -31, -29, -28.9, 0, 1, 3, 478, 479, 1e6, -33, -1e6], jnp.float32)
    np.testing.assert_array_equal(metadata.to_bytes(x, grid), [0, 0, 2, 2, 16, 16, 18, 255, 255, 255, 0, 0])


def test_ceil_log2_on_powers_and_their_neighbours():
    e = np.arange(-126, 128)
    power = np.ldexp(np.float32(1), e).astype(np.float32)
    np.testing.assert_array_equal(metadata.ceil_log2(jnp.asarray(power)), e)
    np.testing.assert_array_equal(metadata.ceil_log2(jnp.asarray(np.nextafter(power, np.float32(np.inf)))), e + 1)
    np.testing.assert_array_equal(metadata.ceil_log2(jnp.asarray(np.nextafter(power[1:], np.float32(0)))), e[1:])
    assert metadata.ceil_log2(jnp.float32(0)) == -127


@functools.partial(jax.jit, static_argnames=("fmt", "shrink"))
def there_and_back(x, fmt, shrink=(1.0,)):
    """Keys and values both: what comes back, and the parts."""
    keys, values = quantize.quantize_keys(x, fmt, shrink=shrink), quantize.quantize_values(x, fmt, shrink=shrink)
    back = quantize.dequantize_keys(keys, fmt), quantize.dequantize_values(values, fmt)
    return back, (split_record(keys, fmt.key_parts), split_record(values, fmt.value_parts))


def like_keys(seed, spread=0.5, offset=0.5):
    """[8, 32, 32]: channels that differ in size and offset, tokens that differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, 32, 32)) * np.exp(rng.normal(size=(8, 32, 1)) * 0.3)
    return (x + rng.normal(size=(8, 1, 32)) * offset) * np.exp(rng.normal(size=(8, 1, 32)) * spread)


OUTLIER = np.where(np.arange(32) == 5, 10, 1)
DATA = {
    "random": like_keys(1),
    "wide": like_keys(2, spread=1.0),
    "one channel of ten times the rest": like_keys(3) * OUTLIER,
    "one number in a hundred of ten times the rest": like_keys(4)
    * np.where(np.random.default_rng(5).random((8, 32, 32)) < 0.01, 10, 1),
    "negative": -np.abs(like_keys(6)),
    "huge": like_keys(7) * 1e6,
    "tiny": like_keys(8) * 1e-3,
}


@pytest.mark.parametrize("shrink", [(1.0,), (1.0, 0.9, 0.8), (0.8,)], ids=str)
def test_the_error_is_that_of_float16_and_a_little(shrink):
    """Root mean square over all: at most 2 % more, with a page's channels within a factor of a hundred or so."""
    x = jnp.asarray(np.stack(list(DATA.values())), jnp.float32)
    for half, fixed in zip(*(there_and_back(x, fmt, shrink)[0] for fmt in (HALF, FIXED)), strict=True):
        errors = [np.sqrt(np.mean(np.square(np.asarray(y - x, np.float64)), (1, 2, 3))) for y in (half, fixed)]
        ratio = dict(zip(DATA, errors[1] / errors[0], strict=True))
        assert all(r < 1.02 for r in ratio.values()), ratio
        assert any(r != 1 for r in ratio.values())


def test_one_large_channel_takes_the_steps_of_the_others():
    """A page has one grid: up to a hundred times their size costs the other channels little, a thousand much."""
    sizes = (1, 3, 10, 30, 70, 100, 1000)
    x = np.stack([like_keys(9) * np.where(np.arange(32) == 5, size, 1) for size in sizes])
    half, fixed = (np.asarray(there_and_back(jnp.asarray(x, jnp.float32), fmt)[0][0]) for fmt in (HALF, FIXED))
    errors = [np.sqrt(np.mean(np.square(np.delete(y - x, 5, -1)), (1, 2, 3))) for y in (half, fixed)]
    ratio = errors[1] / errors[0]
    assert (ratio[:-1] < 1.1).all(), ratio
    assert ratio[-1] > 1.5


def test_huge_numbers_have_an_exponent():
    (keys, _), parts = there_and_back(jnp.asarray(DATA["huge"], jnp.float32), FIXED)
    assert all((p["exponent"] > 0).all() for p in parts)
    assert np.isfinite(np.asarray(keys)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -7.25, 1000.0, 2.0**-24, 1.5 * 2.0**20])
def test_a_constant_page_comes_back(value):
    back, parts = there_and_back(jnp.full((1, 32, 32), value, jnp.float32), FIXED)
    for x, p in zip(back, parts, strict=True):
        np.testing.assert_array_equal(x, np.full((1, 32, 32), value, np.float32))
        assert not np.asarray(p["scale"]).any()
        assert not np.asarray(p["low"]).any()  # codes
        if value == 0:  # one zero makes one record
            assert [int(x[0]) for grid in metadata.read_grids(p["grid"]) for x in grid] == [-24, 0, -24, 0]
            assert not np.asarray(p["min"]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(value):
    x = jnp.asarray(DATA["random"][:1], jnp.float32).at[0, 3, 5].set(value)
    for back in there_and_back(x, FIXED)[0]:
        assert not np.isfinite(back).any()


def test_a_grid_is_the_pages_own():
    """Records depend on the page alone, whatever stands beside it."""
    x = jnp.asarray(DATA["random"] * 10.0 ** np.arange(-4, 4)[:, None, None], jnp.float32)
    shrink = (1.0, 0.9, 0.8)
    make = jax.jit(lambda x: (quantize.quantize_keys(x, FIXED, shrink=shrink), quantize.quantize_values(x, FIXED)))
    together = make(x)
    for record, alone in zip(together, make(x[5]), strict=True):
        np.testing.assert_array_equal(record[5], alone)
    grid = np.asarray(split_record(together[0], FIXED.key_parts)["grid"])
    assert len({tuple(row) for row in grid}) > 6
