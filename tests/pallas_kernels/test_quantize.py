"""Quantization of pages: what a code, a scale and a chosen channel must be, against float64 and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import quantize
from kitty_jax.pallas_kernels.page_format import PageFormat, split_record

SMALL = PageFormat(page=32, head_dim=32, boosted=8)


@functools.partial(jax.jit, static_argnames=("fmt", "score", "shrink"))
def quantize_keys(keys, fmt, **options):
    return quantize.quantize_keys(keys, fmt, **options)


@functools.partial(jax.jit, static_argnames=("fmt",))
def quantize_values(values, fmt):
    return quantize.quantize_values(values, fmt)


@functools.partial(jax.jit, static_argnames=("fmt",))
def restore_keys(records, fmt):
    parts = split_record(records, fmt.key_parts)
    return quantize.dequantize_keys(records, fmt), quantize.key_codes(parts, fmt), parts


@functools.partial(jax.jit, static_argnames=("fmt",))
def restore_values(records, fmt):
    parts = split_record(records, fmt.value_parts)
    return quantize.dequantize_values(records, fmt), quantize.value_codes(parts, fmt), parts


def normal(seed, *shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def literal(x, bits):
    """Codes, scale and min of the rows of float64 x [n, count], as the module's docstring says them.

    The range is divided in float32, by a product with the rounded reciprocal, before it is rounded to float16.
    """
    levels = 2.0 ** np.asarray(bits, np.float64) - 1
    low = x.min(-1).astype(np.float16)
    base = low.astype(np.float64)
    width = np.maximum(x.max(-1) - base, 0).astype(np.float32)
    scale = (width * (1 / levels).astype(np.float32)).astype(np.float16)
    step = np.where(scale > 0, scale, 1).astype(np.float64)
    codes = np.clip(np.round((x - base[:, None]) / step[:, None]), 0, np.broadcast_to(levels, low.shape)[:, None])
    return codes, scale, low


@pytest.mark.parametrize(
    "side,fmt",
    [
        ("keys", PageFormat()),
        ("keys", PageFormat(head_dim=64, boosted=0)),
        ("keys", PageFormat(head_dim=64, boosted=64)),
        ("keys", PageFormat(page=16, head_dim=16, boosted=1)),
        ("keys", PageFormat(page=48, head_dim=80, boosted=33)),
        ("values", PageFormat()),
        ("values", PageFormat(head_dim=64, value_bits=4)),
        ("values", PageFormat(page=32, head_dim=256)),
    ],
    ids=str,
)
def test_codes_scale_and_min_are_the_literal_ones(side, fmt):
    x = normal(fmt.page + fmt.head_dim, fmt.page, fmt.head_dim, dtype=jnp.bfloat16, scale=3)
    if side == "keys":
        restored, codes, parts = jax.tree.map(np.asarray, restore_keys(quantize_keys(x, fmt), fmt))
        restored, codes, x = restored.T, codes.T, x.T
        bits = np.where(np.isin(np.arange(fmt.head_dim), parts["channels"]), 4, 2)
        assert len(parts["channels"]) == fmt.boosted
    else:
        restored, codes, parts = jax.tree.map(np.asarray, restore_values(quantize_values(x, fmt), fmt))
        bits = fmt.value_bits
    want, scale, low = literal(np.asarray(x, np.float64), bits)
    np.testing.assert_array_equal(parts["scale"], scale)
    np.testing.assert_array_equal(parts["min"], low)
    np.testing.assert_array_equal(codes, want)
    assert parts["exponent"] == 0
    exact = want * scale.astype(np.float64)[:, None] + low.astype(np.float64)[:, None]
    np.testing.assert_array_equal(restored, exact.astype(np.float32))


def test_a_constant_channel_and_a_zero_token_are_kept():
    keys = np.array(normal(1, 32, 32))
    keys[:, 3], keys[:, 4], keys[:, 5] = 0, -7.25, 1000
    restored, codes, parts = restore_keys(quantize_keys(jnp.asarray(keys), SMALL), SMALL)
    for channel, value in ((3, 0), (4, -7.25), (5, 1000)):
        assert (restored[:, channel] == value).all()
        assert (codes[:, channel] == 0).all()
        assert parts["scale"][channel] == 0
    values = np.array(normal(2, 32, 32))
    values[7], values[8] = 0, 0.5
    restored, _, parts = restore_values(quantize_values(jnp.asarray(values), SMALL), SMALL)
    assert (restored[7] == 0).all()
    assert (restored[8] == 0.5).all()
    everything = jnp.zeros((32, 32), jnp.bfloat16)
    assert not np.asarray(restore_keys(quantize_keys(everything, SMALL), SMALL)[0]).any()
    assert not np.asarray(restore_values(quantize_values(everything, SMALL), SMALL)[0]).any()


def test_a_constant_that_float16_rounds_up_stays_close():
    """min above every element: no negative range, no negative code."""
    keys = jnp.full((32, 32), 1000.3, jnp.float32)  # float16 has 1000.5
    restored, codes, parts = restore_keys(quantize_keys(keys, SMALL), SMALL)
    assert (parts["min"] == 1000.5).all()
    assert not np.asarray(codes).any()
    assert (restored == 1000.5).all()


def test_zero_has_one_sign():
    """Which zero a min of both signs is would be left to the order of the reduction; the record holds +0."""
    for fill in (np.array([0.0, -0.0]), np.array([-0.0, 0.0])):
        keys = jnp.asarray(np.tile(np.repeat(fill, 16)[:, None], (1, 32)), jnp.bfloat16)
        for parts in (
            restore_keys(quantize_keys(keys, SMALL), SMALL)[2],
            restore_values(quantize_values(keys, SMALL), SMALL)[2],
            restore_values(quantize_values(keys.T, SMALL), SMALL)[2],
        ):
            assert not np.asarray(parts["min"]).view(np.uint16).any()


def test_halves_round_to_the_even_code():
    """Steps of 1 and numbers between them: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, 3.5 -> 4, and so on."""
    fmt = PageFormat(page=16, head_dim=16, boosted=1)
    keys = np.zeros((16, 16), np.float32)
    keys[:, :] = np.array([0, 0.5, 1.5, 2.5, 3, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 1, 2, 0, 3, 3])[:, None]
    keys[:, 9] = np.arange(16) - 0.5
    keys[0, 9], keys[15, 9] = 0, 15
    scores = jnp.zeros(16).at[9].set(1)
    _, codes, parts = restore_keys(quantize_keys(jnp.asarray(keys), fmt, scores=scores), fmt)
    assert list(np.asarray(parts["channels"])) == [9]
    np.testing.assert_array_equal(codes[:, 0], [0, 0, 2, 2, 3, 0, 1, 1, 2, 2, 3, 1, 2, 0, 3, 3])
    np.testing.assert_array_equal(codes[:, 9], [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 15])


def test_ties_of_steps_that_are_no_powers_of_two_round_to_even():
    """(i + 1/2) * step and its two neighbours in float32, for many steps: where a quotient by reciprocal goes wrong."""
    rng = np.random.default_rng(17)
    step = rng.integers(1025, 2048, 512).astype(np.float32) * np.float32(2.0**-10)
    i = rng.integers(0, 15, 512)
    tie = (i + 0.5).astype(np.float32) * step
    for x, want in (
        (tie, i + i % 2),
        (np.nextafter(tie, np.float32(np.inf)), i + 1),
        (np.nextafter(tie, np.float32(0)), i),
    ):
        got = jax.jit(quantize._round_quotient)(jnp.asarray(x)[:, None], jnp.asarray(step)[:, None], jnp.float32(15))
        np.testing.assert_array_equal(got[:, 0], want)


@pytest.mark.parametrize("dtype,big", [(jnp.bfloat16, 3e38), (jnp.float32, 1e5)])
def test_numbers_beyond_float16_stay_finite_and_close(dtype, big):
    keys = np.array(normal(3, 2, 32, 32))
    keys[0, 4, 6], keys[0, 9, 6] = big, -big
    keys = jnp.asarray(keys, dtype)
    x = np.asarray(keys, np.float64)
    top = np.abs(x[0]).max()
    for restored, _, parts in (
        restore_keys(quantize_keys(keys, SMALL), SMALL),
        restore_values(quantize_values(keys, SMALL), SMALL),
    ):
        restored = np.asarray(restored)
        assert np.isfinite(restored).all()
        # The range is 2 * top in three or fifteen steps, and the metadata has 11 bits.
        assert np.abs(restored[0] - x[0]).max() <= top / 3 * (1 + 2.0**-8)
        assert np.isfinite(np.asarray(parts["scale"], np.float32)).all()
        assert np.isfinite(np.asarray(parts["min"], np.float32)).all()
        # The other page knows nothing of it.
        assert parts["exponent"][1] == 0
        assert np.abs(restored[1] - x[1]).max() < 2
    assert int(restore_keys(quantize_keys(keys, SMALL), SMALL)[2]["exponent"][0, 0]) == np.floor(np.log2(top)) + 1 - 13


@pytest.mark.parametrize(
    "limit,quantizer,restore", [(13, quantize_keys, restore_keys), (5, quantize_values, restore_values)]
)
def test_the_exponent_is_the_smallest_that_fits(limit, quantizer, restore):
    for top, want in (
        (2.0**limit * (1 - 2**-20), 0),
        (2.0**limit, 1),
        (2.0 ** (limit + 1), 2),
        (2.0 ** (limit + 9) - 1, 9),
    ):
        for sign in (1, -1):
            x = np.array(normal(4, 32, 32))
            x[3, 3] = sign * top
            parts = restore(quantizer(jnp.asarray(x), SMALL), SMALL)[2]
            assert int(parts["exponent"][0]) == want


def test_power_of_two_is_exact():
    e = np.arange(-126, 128)
    np.testing.assert_array_equal(quantize.power_of_two(jnp.asarray(e, jnp.int8)), 2.0 ** e.astype(np.float64))


def test_half_is_float16():
    """Every finite float16, and float32 numbers between: rounded like numpy rounds."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    np.testing.assert_array_equal(jax.jit(quantize._half)(every).view(np.uint32), every.view(np.uint32))
    x = np.random.default_rng(18).normal(size=4096) * 2.0 ** np.random.default_rng(19).integers(-30, 15, 4096)
    want = x.astype(np.float32).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(quantize._half)(jnp.asarray(x, jnp.float32)), want)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 48, 100])
def test_tree_sum_is_a_sum(count):
    x = np.random.default_rng(count).integers(-1000, 1000, (3, count, 5)).astype(np.float32)
    np.testing.assert_array_equal(quantize.tree_sum(jnp.asarray(x), 1), x.sum(1))
    np.testing.assert_array_equal(quantize.tree_sum(jnp.asarray(x), -2), x.sum(1))


def test_tree_sum_adds_the_second_half_to_the_first():
    """The order itself, on which kernels rely: ((x0 + x4) + (x2 + x6)) + ((x1 + x5) + (x3 + x7))."""
    x = np.random.default_rng(0).normal(size=8).astype(np.float32) * np.float32(10) ** np.arange(
        -4, 4, dtype=np.float32
    )
    want = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    assert quantize.tree_sum(jnp.asarray(x), 0) == want
    assert want != x.astype(np.float64).sum().astype(np.float32)  # or the order would not show


def numpy_scores(x, score):
    if score == "magnitude":
        return np.abs(x).mean(-2)
    return x.var(-2) if score == "variance" else np.ptp(x, axis=-2)


@pytest.mark.parametrize("score", quantize.SCORES)
def test_scores_against_numpy(score):
    keys = normal(5, 3, 128, 64) * jnp.linspace(0.1, 4, 64) + jnp.linspace(-3, 3, 64)
    got = jax.jit(quantize.channel_scores, static_argnums=1)(keys, score)
    # Deviations have 12 bits when they are squared.
    np.testing.assert_allclose(
        got, numpy_scores(np.asarray(keys, np.float64), score), rtol=2e-4 if score == "variance" else 1e-6
    )


@pytest.mark.parametrize("score", quantize.SCORES)
def test_the_boosted_channels_are_those_of_highest_score_in_ascending_order(score):
    fmt = PageFormat(page=128, head_dim=64, boosted=13)
    spread = np.random.default_rng(6).permutation(np.linspace(0.5, 4, 64))
    keys = normal(7, 128, 64) * spread.astype(np.float32)
    channels = np.asarray(restore_keys(quantize_keys(keys, fmt, score=score), fmt)[2]["channels"])
    want = np.sort(np.argsort(-numpy_scores(np.asarray(keys, np.float64), score))[:13])
    np.testing.assert_array_equal(channels, want)


def test_ties_go_to_the_lowest_channel():
    scores = np.zeros(32, np.float32)
    scores[[4, 9, 17, 20, 31]] = 1
    np.testing.assert_array_equal(quantize.select_channels(jnp.asarray(scores), 3), [4, 9, 17])
    np.testing.assert_array_equal(quantize.select_channels(jnp.asarray(scores), 7), [0, 1, 4, 9, 17, 20, 31])
    same = jnp.ones((32, 32), jnp.float32)  # every channel alike
    np.testing.assert_array_equal(restore_keys(quantize_keys(same, SMALL), SMALL)[2]["channels"], np.arange(8))


def test_weights_multiply_and_scores_replace():
    keys = normal(8, 2, 32, 32)
    ban = jnp.ones(32).at[jnp.arange(16)].set(0)
    channels = np.asarray(restore_keys(quantize_keys(keys, SMALL, weights=ban), SMALL)[2]["channels"])
    assert (channels >= 16).all()
    # A weight for each leading index, against the same by hand.
    weights = jnp.asarray(np.random.default_rng(9).uniform(0.1, 2, (2, 32)), jnp.float32)
    got = restore_keys(quantize_keys(keys, SMALL, weights=weights), SMALL)[2]["channels"]
    want = np.argsort(-np.abs(np.asarray(keys, np.float64)).mean(1) * np.asarray(weights), axis=-1)[:, :8]
    np.testing.assert_array_equal(got, np.sort(want, -1))
    fixed = jnp.asarray(np.random.default_rng(10).normal(size=(2, 32)), jnp.float32)
    got = restore_keys(quantize_keys(keys, SMALL, scores=fixed), SMALL)[2]["channels"]
    np.testing.assert_array_equal(got, np.sort(np.argsort(-np.asarray(fixed), -1)[:, :8], -1))


def test_boost_index_is_the_inverse_of_the_channel_list():
    channels = jnp.asarray([[2, 5, 31], [0, 1, 7]], jnp.uint8)
    got = np.asarray(quantize.boost_index(channels, 32))
    assert got.dtype == np.uint8
    assert got.shape == (2, 32)
    for row, listed in zip(got, np.asarray(channels), strict=True):
        np.testing.assert_array_equal(row[listed], [0, 1, 2])
        assert (np.delete(row, listed) == 255).all()
    assert (quantize.boost_index(channels[:, :0], 32) == 255).all()


def test_shrink_keeps_the_factor_of_least_squared_error():
    factors = (1.0, 0.9, 0.75, 0.6)
    rng = np.random.default_rng(11)
    keys = rng.normal(size=(32, 32)) * np.where(
        rng.random((32, 32)) < 0.05, 4, 1
    )  # outliers that a narrower range sheds
    keys = jnp.asarray(keys, jnp.float32)
    fixed = jnp.asarray(rng.normal(size=32), jnp.float32)
    x = np.asarray(keys, np.float64)
    single = [restore_keys(quantize_keys(keys, SMALL, scores=fixed, shrink=(f,)), SMALL) for f in factors]
    errors = np.stack([np.square(np.asarray(y[0], np.float64) - x).sum(0) for y in single])
    _, codes, parts = restore_keys(quantize_keys(keys, SMALL, scores=fixed, shrink=factors), SMALL)
    best = errors.argmin(0)
    assert len(set(best.tolist())) > 1
    second = np.sort(errors, 0)
    clear = second[1] > second[0] * (1 + 1e-3)  # errors are summed with 12 bits each
    assert clear.sum() > 20
    for channel in np.flatnonzero(clear):
        chosen = single[best[channel]]
        assert parts["scale"][channel] == chosen[2]["scale"][channel]
        assert parts["min"][channel] == chosen[2]["min"][channel]
        np.testing.assert_array_equal(codes[:, channel], chosen[1][:, channel])


def test_shrink_ties_go_to_the_first_factor():
    keys = jnp.tile(jnp.asarray([0.0, 3.0], jnp.float32), (32, 16))  # constant channels: no error at any factor
    np.testing.assert_array_equal(quantize_keys(keys, SMALL, shrink=(1.0, 0.5)), quantize_keys(keys, SMALL))


CASES = {
    "plain": {},
    "variance": {"score": "variance"},
    "range": {"score": "range"},
    "shrink": {"shrink": (1.0, 0.875, 0.7)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_bits_depend_on_the_page_alone(options):
    """Jitted or not, and whatever the pages quantized beside it: the same record."""
    fmt = PageFormat(page=48, head_dim=32, boosted=8)
    keys = normal(12, 3, 48, 32, dtype=jnp.bfloat16) * jnp.linspace(0.25, 4, 32, dtype=jnp.bfloat16)
    together = quantize_keys(keys, fmt, **options)
    np.testing.assert_array_equal(quantize.quantize_keys(keys, fmt, **options), together)
    for i in range(3):
        np.testing.assert_array_equal(quantize_keys(keys[i], fmt, **options), together[i])


@pytest.mark.parametrize("value_bits", [2, 4])
def test_bits_of_values_depend_on_the_page_alone(value_bits):
    fmt = PageFormat(page=32, head_dim=32, boosted=0, value_bits=value_bits)
    values = normal(13, 3, 32, 32, dtype=jnp.bfloat16)
    together = quantize_values(values, fmt)
    np.testing.assert_array_equal(quantize.quantize_values(values, fmt), together)
    for i in range(3):
        np.testing.assert_array_equal(quantize_values(values[i], fmt), together[i])


def test_the_dtype_of_the_input_does_not_matter():
    keys = normal(14, 32, 32, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(quantize_keys(keys, SMALL), quantize_keys(keys.astype(jnp.float32), SMALL))
    np.testing.assert_array_equal(quantize_values(keys, SMALL), quantize_values(keys.astype(jnp.float32), SMALL))


def test_shapes_and_scores_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"keys must end in \[page, head_dim\] = \[32, 32\], got shape \(2, 32, 16\)"):
        quantize.quantize_keys(jnp.zeros((2, 32, 16)), SMALL)
    with pytest.raises(ValueError, match=r"values must end in \[page, head_dim\] = \[32, 32\], got shape \(31, 32\)"):
        quantize.quantize_values(jnp.zeros((31, 32)), SMALL)
    with pytest.raises(ValueError, match="score must be one of magnitude, variance, range, got 'entropy'"):
        quantize.quantize_keys(jnp.zeros((32, 32)), SMALL, score="entropy")
