"""Configurations: the named ones, and what is refused at construction."""

import dataclasses

import numpy as np
import pytest

from kitty_jax.cache.config import CACHE_NAMES, CacheConfig, cache_from_name, layer_configs


@pytest.mark.parametrize(
    "name, sink, boost, value_bits",
    [
        ("kivi2", 0, 0, 2),
        ("kivi2_sink", 32, 0, 2),
        ("kivi4", 0, 1, 4),
        ("k2v4", 32, 0, 4),
        ("k4v2", 32, 1, 2),
        ("kitty", 32, 0.125, 2),
        ("kitty_pro", 32, 0.25, 2),
    ],
)
def test_named_caches(name, sink, boost, value_bits):
    config = getattr(CacheConfig, name)()
    assert config == cache_from_name(name) == cache_from_name(f" {name.replace('_', '-').upper()} ")
    assert (config.sink, config.boost, config.value_bits) == (sink, boost, value_bits)
    assert (config.quantized, config.page, config.window, config.selection) == (True, 128, 128, "magnitude")
    assert cache_from_name(name, page=64).page == 64
    fmt = config.page_format(64)
    assert (fmt.page, fmt.head_dim, fmt.boosted, fmt.value_bits) == (128, 64, round(64 * boost), value_bits)
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize("name, like", [("kitty_plus", "kitty"), ("kitty_pro_plus", "kitty_pro")])
def test_plus_has_the_bits_of_what_it_is_named_for(name, like):
    config, paper = cache_from_name(name), cache_from_name(like)
    assert config.page_format(64) == paper.page_format(64)
    assert (config.sink, config.window) == (paper.sink, paper.window)
    assert (config.selection, config.rotate_values, config.value_shrink) == ("sensitivity", True, (0.8,))
    assert config.weighs_queries
    assert not paper.weighs_queries


def test_full_precision():
    assert CacheConfig.full() == cache_from_name("full")
    assert not CacheConfig.full().quantized
    with pytest.raises(ValueError, match="no page format"):
        CacheConfig.full().page_format(64)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="unknown cache 'kity'") as info:
        cache_from_name("kity")
    assert all(name.replace("_", "-") in str(info.value) for name in CACHE_NAMES)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sink": -1}, "sink must be a whole number of tokens, 0 or more, got -1"),
        ({"window": -128}, "window must be .* got -128"),
        ({"page": 100}, "page must be a positive multiple of 16 tokens, got 100"),
        ({"page": 0}, "page must be a positive multiple of 16 tokens, got 0"),
        ({"boost": 1.25}, "boost is a fraction of the key channels from 0 to 1, got 1.25"),
        ({"boost": float("nan")}, "boost is a fraction .* got nan"),
        ({"value_bits": 3}, "value_bits must be 2 or 4, got 3"),
        ({"selection": "largest"}, "selection must be one of magnitude, variance, range, random"),
        ({"key_shrink": ()}, "key_shrink must be one or more factors above 0 and up to 1"),
        ({"key_shrink": (1.0, 0.0)}, "key_shrink must be one or more factors"),
        ({"key_shrink": [1.5]}, "key_shrink must be one or more factors"),
        ({"page": 32.0}, "page must be a whole number of tokens"),
        ({"value_bits": 2.0}, "value_bits must be a whole number of bits"),
        ({"sink": True}, "sink must be a whole number of tokens"),
        ({"boost": "0.5"}, "boost is a fraction"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"selection": 3}, "selection must be a name"),
        ({"selection": (1.5, 2)}, "selection must be a name"),
        ({"key_shrink": 0.8}, "key_shrink must be a tuple of factors"),
        ({"rotate_values": 1}, "rotate_values must be True or False"),
        ({"quantized": False, "boost": 0.5, "window": 64}, "nothing to set, got a change of window, boost"),
    ],
)
def test_refused_at_construction(change, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**change)


@pytest.mark.parametrize(
    "config, head_dim, message",
    [
        (CacheConfig.kitty(), 20, "head_dim must be a multiple of 16 from 16 to 256, got 20"),  # before the boost
        (CacheConfig.kitty(boost=0.1), 128, "12.8 channels, not a whole number; use 13/128 = 0.101562"),
        (CacheConfig.kivi2(), 72, "head_dim must be a multiple of 16 from 16 to 256, got 72"),
        (CacheConfig.kivi2(), 512, "head_dim must be a multiple of 16 from 16 to 256, got 512"),
        (
            CacheConfig.kitty(selection=(1, 2, 3)),
            64,
            "selection lists 3 channels, but boost 0.125 of head size 64 is 8",
        ),
        (CacheConfig.kitty(selection=(1, 1)), 16, "distinct channels from 0 to 15, got"),
        (CacheConfig.kitty(selection=(0, 16)), 16, "distinct channels from 0 to 15, got"),
        (CacheConfig.kitty(selection=((0, 1), (2, -3))), 16, "distinct channels from 0 to 15, got"),
    ],
)
def test_refused_by_the_head_size(config, head_dim, message):
    with pytest.raises(ValueError, match=message):
        config.page_format(head_dim)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_of_the_models(head_dim):
    assert CacheConfig.kitty().page_format(head_dim).boosted == head_dim // 8
    assert CacheConfig.kitty_pro().page_format(head_dim).boosted == head_dim // 4


def test_layers():
    kitty, full = CacheConfig.kitty(), CacheConfig.full()
    assert layer_configs("kitty", 2) == (kitty, kitty)
    assert layer_configs(["full", kitty], 2) == (full, kitty)
    assert layer_configs([CacheConfig.full(), CacheConfig.kitty(window=0)], 2)[1].window == 0
    with pytest.raises(ValueError, match="one per layer: wanted 3, got 2"):
        layer_configs([kitty, kitty], 3)
    with pytest.raises(ValueError, match=r"must agree in \(sink, page\), got \[\(0, 128\), \(32, 128\)\]"):
        layer_configs([kitty, full, CacheConfig.kivi2()], 3)
    with pytest.raises(ValueError, match=r"must agree in \(sink, page\)"):
        layer_configs([kitty, CacheConfig.kitty(page=64)], 2)
    with pytest.raises(ValueError, match="unknown cache 'kit'"):
        layer_configs(["kit", "full"], 2)


def test_lists_of_channels_become_tuples() -> None:
    config = CacheConfig(selection=([1, 2], np.array([3, 4])), boost=0.125, key_shrink=np.array([1.0, 0.5]))
    assert config.selection == ((1, 2), (3, 4))
    assert config.key_shrink == (1.0, 0.5)
    assert config.channel_lists() == ((1, 2), (3, 4))
    assert CacheConfig(selection=np.array([3, 1])).channel_lists() == ((3, 1),)
    assert CacheConfig.kitty().channel_lists() == ()
    assert hash(config) == hash(CacheConfig(selection=((1, 2), (3, 4)), key_shrink=(1.0, 0.5)))


@pytest.mark.parametrize("cache", [None, 3, [None]])
def test_what_is_no_cache_is_refused(cache) -> None:
    with pytest.raises(ValueError, match="cache"):
        layer_configs(cache, 1)
