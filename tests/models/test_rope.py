"""Rotary embedding: frequencies against direct formulas, reading of both Hugging Face forms, and errors."""

import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.models.rope import RopeConfig, attention_factor, cos_sin, inverse_frequencies, rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_default_and_linear_frequencies():
    plain = inverse_frequencies(RopeConfig(theta=1e6), 128)
    np.testing.assert_allclose(plain, [1e6 ** (-i / 64) for i in range(64)], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=1e6, type="linear", factor=4), 128), plain / 4)
    assert plain.dtype == np.float32


def test_llama3_frequencies_band_by_band():
    config = RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    for got, i in zip(inverse_frequencies(config, 128), range(64), strict=True):
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
    config = RopeConfig.from_hf(
        {
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        }
    )
    ratio = inverse_frequencies(RopeConfig(theta=1e6), 128) / inverse_frequencies(config, 128)
    turns = 32768 * inverse_frequencies(RopeConfig(theta=1e6), 128) / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.8], 4, rtol=1e-6)
    assert np.all(np.diff(ratio) >= -1e-6)
    assert attention_factor(config) == pytest.approx(0.1 * np.log(4) + 1)


def test_yarn_options():
    base = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}

    def read(**more):
        return RopeConfig.from_hf({"max_position_embeddings": 512, "rope_parameters": {**base, **more}})

    assert attention_factor(read(attention_factor=0.7)) == 0.7
    assert attention_factor(read(mscale=1.0, mscale_all_dim=0.5)) == pytest.approx(
        (0.1 * np.log(8) + 1) / (0.05 * np.log(8) + 1)
    )
    assert attention_factor(read(mscale=2.0)) == pytest.approx(0.1 * np.log(8) + 1)  # alone, mscale is not read
    assert read(factor=None).factor == 8.0  # the ratio of the context lengths
    plain, exact = (inverse_frequencies(read(truncate=t), 32) for t in (True, False))
    assert np.abs(plain / exact - 1).max() > 0.01
    narrow, wide = (inverse_frequencies(read(beta_fast=b), 32) for b in (2.0, 32.0))
    assert np.abs(narrow / wide - 1).max() > 0.01


def test_old_and_new_forms_read_alike():
    old = RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = RopeConfig.from_hf({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    assert old == new == RopeConfig(5e5, "llama3", 8.0, original_max_position=8192)
    assert RopeConfig.from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(theta=1e6)
    assert RopeConfig.from_hf({}) == RopeConfig(theta=1e4)
    assert RopeConfig.from_hf({"rope_parameters": new.to_hf()}) == new


def test_original_context_falls_back_to_the_context():
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    config = {"max_position_embeddings": 777, "rope_scaling": {"rope_type": "llama3", **scaling}}
    assert RopeConfig.from_hf(config).original_max_position == 777
    assert RopeConfig.from_hf(config | {"original_max_position_embeddings": 99}).original_max_position == 99


@pytest.mark.parametrize(
    "config, message",
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; .*default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"missing keys \['factor'\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, r"unknown keys \['mscale'\]"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"unknown keys \['full_attention'\]"),
        ({"rope_parameters": {"type": "yarn", "rope_type": "linear"}}, "names two types"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_theta": 1.0}}, "both rope_scaling and"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_position"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor > low"),
    ],
)
def test_unsupported_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        ("factor", "8", "a finite number above 0"),
        ("factor", float("inf"), "a finite number above 0"),
        ("beta_fast", 0, "a finite number above 0"),
        ("mscale", -1, "a finite number of at least 0"),
        ("truncate", "false", "true or false"),
        ("original_max_position_embeddings", 32.0, "a whole number of at least 1"),
        ("rope_type", 5, "a string"),
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused(key, value, wanted):
    assert RopeConfig.from_hf({"rope_parameters": YARN}).factor == 8.0
    with pytest.raises(ValueError) as error:
        RopeConfig.from_hf({"rope_parameters": YARN | {key: value}})
    assert str(error.value) == f"rope_parameters.{key} = {value!r} (wanted {wanted})"


def test_a_null_factor_is_no_factor():
    with pytest.raises(ValueError, match=r"missing keys \['factor'\]"):
        RopeConfig.from_hf({"rope_scaling": {"type": "linear", "factor": None}})
    with pytest.raises(ValueError, match="factor = None needs max_position_embeddings"):
        RopeConfig.from_hf({"rope_parameters": YARN | {"factor": None}})


def test_constructor_checks():
    with pytest.raises(ValueError, match="positive beta_fast and beta_slow, got 0"):
        RopeConfig(type="yarn", original_max_position=8, beta_fast=0)
    with pytest.raises(ValueError, match="'ntk' is not supported; supported types: default"):
        RopeConfig(type="ntk")
    with pytest.raises(ValueError, match="factor must be positive, got 0"):
        RopeConfig(type="linear", factor=0)


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
