"""Rotary embedding: frequencies against direct formulas, the rotation, and impossible parameters."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.models.rope import RopeConfig, attention_factor, cos_sin, inverse_frequencies, rotate

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(1e4, "yarn", 8.0, 64)


def test_default_and_linear_frequencies():
    plain = inverse_frequencies(RopeConfig(theta=1e6), 128)
    np.testing.assert_allclose(plain, [1e6 ** (-i / 64) for i in range(64)], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=1e6, type="linear", factor=4), 128), plain / 4)
    assert plain.dtype == np.float32


def test_llama3_frequencies_band_by_band():
    for got, i in zip(inverse_frequencies(LLAMA3, 128), range(64), strict=True):
        plain = 5e5 ** (-i / 64)
        wavelength = 2 * np.pi / plain
        if wavelength < 8192 / 4:
            want = plain
        elif wavelength > 8192:
            want = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            want = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(want, rel=1e-6)


def test_yarn_keeps_short_wavelengths_and_stretches_long_ones():
    config = RopeConfig(1e6, "yarn", 4.0, 32768)
    plain = inverse_frequencies(RopeConfig(theta=1e6), 128)
    ratio = plain / inverse_frequencies(config, 128)
    rotations = 32768 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[rotations > 40], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[rotations < 0.8], 4, rtol=1e-6)
    assert np.all(np.diff(ratio) >= -1e-6)
    assert attention_factor(config) == pytest.approx(0.1 * np.log(4) + 1)


def test_yarn_options():
    def read(**more):
        return dataclasses.replace(YARN, **more)

    assert attention_factor(read(attention_factor=0.7)) == 0.7
    assert attention_factor(read(mscale=1.0, mscale_all_dim=0.5)) == pytest.approx(
        (0.1 * np.log(8) + 1) / (0.05 * np.log(8) + 1)
    )
    assert attention_factor(read(mscale=2.0)) == pytest.approx(0.1 * np.log(8) + 1)  # alone, mscale is not read
    assert attention_factor(read(factor=0.5)) == 1.0
    plain, exact = (inverse_frequencies(read(truncate=truncate), 32) for truncate in (True, False))
    np.testing.assert_array_equal(plain, inverse_frequencies(YARN, 32))
    assert np.abs(plain / exact - 1).max() > 0.01
    narrow, wide, default = (inverse_frequencies(read(beta_fast=beta), 32) for beta in (2.0, 32.0, None))
    np.testing.assert_array_equal(wide, default)
    assert np.abs(narrow / wide - 1).max() > 0.01
    step = inverse_frequencies(read(beta_fast=1.0, beta_slow=1.0, truncate=False), 32)  # a band of no width
    assert np.isfinite(step).all()


@pytest.mark.parametrize(
    "config, change, message",
    [
        (RopeConfig(), {"type": "ntk"}, "'ntk' is not supported; supported types: default, linear, llama3, yarn"),
        (RopeConfig(), {"theta": 1.0}, r"theta = 1.0 \(wanted a number above 1\)"),
        (RopeConfig(), {"theta": float("inf")}, r"theta = inf \(wanted a finite number above 0\)"),
        (RopeConfig(), {"factor": 2.0}, r"type 'default': surplus \['factor'\]"),
        (LLAMA3, {"high_freq_factor": None}, r"type 'llama3': missing \['high_freq_factor'\]"),
        (LLAMA3, {"high_freq_factor": 1.0}, r"high_freq_factor = 1.0 \(wanted more than 1.0, low_freq_factor\)"),
        (YARN, {"original_max_position": None}, r"missing \['original_max_position'\]"),
        (YARN, {"original_max_position": 32.0}, r"original_max_position = 32.0 \(wanted a whole number above 0\)"),
        (YARN, {"factor": "8", "beta_fast": 0}, r"factor = '8' \(wanted a finite .*, beta_fast = 0 \(wanted a finite"),
        (YARN, {"factor": True}, r"factor = True \(wanted a finite number above 0\)"),
        (YARN, {"mscale": -1}, r"mscale = -1 \(wanted a finite number above 0\)"),
        (YARN, {"truncate": "false"}, r"truncate = 'false' \(wanted true or false\)"),
    ],
)
def test_impossible_parameters_are_named(config, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_hugging_face_takes_an_mscale_of_zero_for_none():
    assert attention_factor(dataclasses.replace(YARN, mscale=0, mscale_all_dim=1.0)) == attention_factor(YARN)


def test_rotation_turns_each_pair_by_its_angle():
    config = RopeConfig(theta=100.0)
    positions = jnp.asarray([[0, 3, 1000]])
    cos, sin = cos_sin(config, positions, 8, jnp.float32)
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    pairs = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * inverse_frequencies(config, 8))
    np.testing.assert_allclose(got[..., :4], turned.real, atol=2e-4)
    np.testing.assert_allclose(got[..., 4:], turned.imag, atol=2e-4)
    np.testing.assert_array_equal(got[:, 0], x[:, 0])  # position 0 is left alone
