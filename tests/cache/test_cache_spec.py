"""Caches as words."""

import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.spec import cache_from_spec, caches_from_spec, save_caches


@pytest.mark.parametrize(
    "spec, wanted",
    [
        ("kitty-pro", CacheConfig.kitty_pro()),
        ("kitty:boost=0.25,selection=range", CacheConfig.kitty(boost=0.25, selection="range")),
        ("kivi2:key_shrink=1/0.9/0.8,sink=4", CacheConfig.kivi2(key_shrink=(1, 0.9, 0.8), sink=4)),
        ("kitty:value_shrink=0.8,rotate_values=True", CacheConfig.kitty(value_shrink=(0.8,), rotate_values=True)),
        ("kitty:boost=0.125,selection=3/7", CacheConfig.kitty(boost=0.125, selection=(3, 7))),
        ("full", CacheConfig.full()),
    ],
)
def test_a_spec_is_its_config(spec, wanted):
    assert cache_from_spec(spec) == wanted


@pytest.mark.parametrize(
    "spec, message",
    [
        ("cat", "unknown cache 'cat'"),
        ("kitty:boost", "wanted FIELD=VALUE"),
        ("kitty:Boost=1", "wanted FIELD=VALUE with a field of quantized"),
        ("kitty:selection=best", "selection must be one of"),
        ("kitty:key_shrink=1/1.5", "key_shrink must be"),
    ],
)
def test_what_is_wrong_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        cache_from_spec(spec)


def test_a_file_has_one_config_per_layer(tmp_path):
    wanted = (CacheConfig.kitty_pro(), CacheConfig.kitty(boost=0.25))
    save_caches(wanted, tmp_path / "some.json")
    assert caches_from_spec(f"@{tmp_path / 'some.json'}") == wanted
    assert caches_from_spec("kitty:boost=0.25") == wanted[1]
    with pytest.raises(OSError, match="absent"):
        caches_from_spec(f"@{tmp_path / 'absent.json'}")
