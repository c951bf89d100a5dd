"""Two ways in, one state: token by token and by chunks of any size end in the same bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache import flush as flush_module
from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.flush import flush
from kitty_jax.cache.quantized_cache import QuantizedCache
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.pallas_kernels.ordering import ordered
from kitty_jax.pallas_kernels.page_format import BUFFERS
from kitty_jax.research.oracle import Oracle
from tests.cache.kv_cases import (
    OPTIMIZED,
    QUICK,
    append,
    append_jit,
    assert_equals_oracle,
    differences,
    fill_oracle,
    insert,
    insert_all_jit,
    open_layer,
    random_kv,
)

K, D = 2, 16
BASE = CacheConfig.kitty(sink=4, page=16, window=16)
# One state with a layer of every kind: they share sink and page, so that one program covers them all.
KINDS = {
    "shrink": dataclasses.replace(BASE, key_shrink=(1.0, 0.9, 0.8)),
    "full": CacheConfig.full(),
    "variance": dataclasses.replace(BASE, selection="variance", boost=0.25, window=0),
    "random": dataclasses.replace(BASE, selection="random", seed=3, window=40),
    "list": dataclasses.replace(BASE, selection=((9, 2), (0, 15)), value_bits=4),
}
LENGTHS = np.array([70, 0, 53, 4, 37])
CAPACITY = 72
flush_jit = jax.jit(flush, compiler_options=QUICK)


@functools.cache
def _kinds(dtype):
    keys, values = random_kv(11, len(LENGTHS), max(LENGTHS), K, D, dtype=jnp.dtype(dtype))
    shape = KVShape(len(KINDS), K, D, keys.dtype)
    empty = init_state(list(KINDS.values()), shape, batch=len(LENGTHS), capacity=CAPACITY)
    return keys, values, empty, insert_all_jit(empty, keys, values, jnp.array(LENGTHS))


def _in_chunks(state, keys, values, lengths, width, most, rng=None):
    """Appends in chunks of ``most`` tokens or, with ``rng``, of random ragged sizes up to that, padded to ``width``."""
    done = np.zeros_like(lengths)
    while (done < lengths).any():
        size = np.full_like(lengths, most) if rng is None else rng.integers(0, most + 1, len(lengths))
        size = np.minimum(size, lengths - done)
        rows = np.minimum(done[:, None] + np.arange(width), keys.shape[1] - 1)
        k, v = (jnp.take_along_axis(x, rows[:, :, None, None], axis=1) for x in (keys, values))
        state = append_jit(state, k, v, jnp.array(size))
        done = done + size
    return state


def test_optimization_of_the_program_changes_no_bit():
    """The other programs are compiled without LLVM's optimizer (QUICK); these are with it, and fuse more."""
    keys, values, empty, wanted = _kinds("float32")
    assert differences(append_jit(empty, keys, values, jnp.array(LENGTHS)), wanted) == []
    optimized = jax.jit(append, compiler_options=OPTIMIZED)
    assert differences(optimized(empty, keys, values, jnp.array(LENGTHS)), wanted) == []
    rows = np.where(LENGTHS > 20, LENGTHS - 1, LENGTHS)
    state = append_jit(empty, keys, values, jnp.array(rows))
    last = (jnp.take_along_axis(x, jnp.array(rows)[:, None, None, None], axis=1)[:, 0] for x in (keys, values))
    optimized = jax.jit(insert, compiler_options=OPTIMIZED)
    assert differences(optimized(state, *last, jnp.array(rows < LENGTHS)), wanted) == []


# Interleaved, so that layers quantized together are not neighbours.
PLUS = CacheConfig.kitty_plus(sink=4, page=16, window=16)
MIXED = (PLUS, KINDS["random"], KINDS["full"], BASE, PLUS, KINDS["random"], BASE)


def test_pages_of_layers_quantized_together_are_those_of_each_alone():
    """Layers of several kinds, each with contents of its own; more due sequences than are taken at a time."""
    lengths = jnp.array([20, 36, 52, 68, 36, 60], jnp.int32)  # five fill a page of keys, some one of values
    state = init_state(list(MIXED), KVShape(len(MIXED), K, D, jnp.float32), batch=len(lengths), capacity=CAPACITY)
    rng = np.random.default_rng(2)
    layers = []
    for layer in state.layers:
        if isinstance(layer, QuantizedCache):
            buffers = {x: jnp.asarray(rng.normal(size=getattr(layer.kv, x).shape), jnp.float32) for x in BUFFERS}
            layer = dataclasses.replace(
                layer,
                kv=dataclasses.replace(layer.kv, **buffers),
                query_squares=jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape), x.dtype), layer.query_squares),
            )
        layers.append(layer)
    state = dataclasses.replace(state, layers=tuple(layers), lengths=lengths)
    together = jax.device_get(flush_jit(state, lengths - 1).layers)
    for layer, got in zip(layers, together, strict=True):
        alone = flush_jit(dataclasses.replace(state, layers=(layer,)), lengths - 1)
        assert differences(got, alone.layers[0]) == []
    quantized = [x.kv for x in together if isinstance(x, QuantizedCache)]
    for kv in quantized:
        assert kv.key_pages.any(axis=(1, 2)).sum() == 5
        assert kv.value_pages.any(axis=(1, 2)).sum() == (4 if kv.window == 16 else 1)
    # All pages differ, so that layers mixed up would be seen.
    assert len({kv.key_pages.tobytes() for kv in quantized}) == len(MIXED) - 1


@pytest.mark.parametrize("width, most", [(70, 7), (70, 33)])
def test_several_chunks_end_where_tokens_end(width, most):
    """Chunks shorter than a page and longer; even ones, then ragged ones with rows of no token."""
    keys, values, empty, wanted = _kinds("float32")
    assert differences(_in_chunks(empty, keys, values, LENGTHS, width, most), wanted) == []
    ragged = _in_chunks(empty, keys, values, LENGTHS, width, most, np.random.default_rng(most))
    assert differences(ragged, wanted) == []


def test_tokens_after_a_chunk_end_where_tokens_end():
    keys, values, empty, wanted = _kinds("float32")
    rows = np.minimum(LENGTHS, 29)
    state = append_jit(empty, keys, values, jnp.array(rows))
    rest = [np.minimum(rows[:, None] + np.arange(max(LENGTHS)), max(LENGTHS) - 1)]
    k, v = (jnp.take_along_axis(x, rest[0][:, :, None, None], axis=1) for x in (keys, values))
    assert differences(insert_all_jit(state, k, v, jnp.array(LENGTHS - rows)), wanted) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_layer_equals_the_oracle(dtype):
    keys, values, _, state = _kinds(dtype)
    for layer, config in enumerate(KINDS.values()):
        opened = open_layer(state, layer)
        for b, length in enumerate(LENGTHS):
            oracle = fill_oracle(Oracle(config, K, D, layer), keys[b], values[b], length)
            assert_equals_oracle(opened, b, oracle)


@pytest.mark.parametrize("sink, page, window", [(0, 32, 0), (3, 48, 64)])
def test_other_sizes(sink, page, window):
    config = CacheConfig.kitty(sink=sink, page=page, window=window, selection="magnitude" if sink else "range")
    longest = sink + window + 2 * page + 1
    lengths = np.array([longest, longest - 1, longest - 2, sink + page, max(sink - 1, 0)])
    keys, values = random_kv(page + window, len(lengths), longest, 1, D)
    empty = init_state(config, KVShape(1, 1, D, jnp.float32), batch=len(lengths), capacity=longest)
    wanted = insert_all_jit(empty, keys, values, jnp.array(lengths))
    assert differences(append_jit(empty, keys, values, jnp.array(lengths)), wanted) == []
    assert differences(_in_chunks(empty, keys, values, lengths, longest, 2 * page // 3), wanted) == []
    opened = open_layer(wanted)
    for b, length in enumerate(lengths):
        assert_equals_oracle(opened, b, fill_oracle(Oracle(config, 1, D), keys[b], values[b], length))


def test_padding_never_reaches_the_state():
    keys, values, empty, wanted = _kinds("float32")
    real = (np.arange(keys.shape[1]) < LENGTHS[:, None])[:, :, None, None]
    nan_keys, nan_values = (jnp.where(real, x, jnp.nan) for x in (keys, values))
    assert differences(append_jit(empty, nan_keys, nan_values, jnp.array(LENGTHS)), wanted) == []


def test_ordered_changes_nothing():
    x = jnp.array([-0.0, 1e30, -3, jnp.inf], jnp.bfloat16).reshape(1, 1, 2, 2)
    for value in (0, 1, -1, jnp.nan, jnp.inf, -jnp.inf):
        after = jnp.full((1, 1, 4, 2), value, jnp.bfloat16)
        assert differences(jax.jit(ordered)(x, after), x) == []


@pytest.mark.parametrize("page, by_kernel", [(128, True), (16, False)])
def test_the_kernel_is_chosen_with_the_page_format(monkeypatch, page, by_kernel):
    """Where the kernel does not take a format, the reference takes a few rows at a time, on a GPU too."""
    monkeypatch.setattr(flush_module, "choose", lambda implementation, reason: "xla" if reason else "mosaic")
    (layer,) = init_state(CacheConfig.kitty(page=page), KVShape(1, 1, 128, jnp.bfloat16), batch=1, capacity=8).layers
    assert flush_module._by_kernel(layer, "auto") == by_kernel
