"""Storing pages in the pool: which records change, where the tokens of a page come from, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import implementation
from kitty_jax.pallas_kernels.dequantize import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import quantize_keys, quantize_values
from kitty_jax.pallas_kernels.store import store_key_pages, store_value_pages, write_records
from kitty_jax.pallas_kernels.store.shape import StoreShape

FMT = PageFormat(page=16, head_dim=32, boosted=4)
POOL, HEADS = 5, 2


def pool(words, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (POOL, HEADS, words), np.uint32))


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_key_pages_go_to_their_records_and_the_id_of_no_record_is_skipped():
    before, keys = pool(FMT.key_words), normal(4, HEADS, 16, 32)
    ids = jnp.asarray([3, POOL, 0, POOL], jnp.int32)
    after = np.asarray(jax.jit(lambda p, k, i: store_key_pages(p, k, i, FMT))(before, keys, ids))
    records = np.asarray(quantize_keys(keys, FMT))
    np.testing.assert_array_equal(after[3], records[0])
    np.testing.assert_array_equal(after[0], records[2])
    np.testing.assert_array_equal(after[[1, 2, 4]], np.asarray(before)[[1, 2, 4]])


def test_options_of_keys_reach_the_quantizer():
    before, keys = pool(FMT.key_words), normal(1, HEADS, 16, 32)
    ids = jnp.asarray([2], jnp.int32)
    scores = normal(1, HEADS, 32, seed=2).astype(jnp.float32)
    weights = jnp.abs(normal(1, HEADS, 32, seed=3)).astype(jnp.float32)
    for options in (
        {"score": "variance"},
        {"score": "range", "weights": weights},
        {"scores": scores},
        {"scores": scores, "weights": weights, "shrink": (1.0, 0.8)},
    ):
        after = store_key_pages(before, keys, ids, FMT, **options)
        np.testing.assert_array_equal(after[2], quantize_keys(keys, FMT, **options)[0])


@pytest.mark.parametrize("value_bits", [2, 4])
def test_value_pages_come_out_of_the_ring(value_bits):
    fmt = PageFormat(page=16, head_dim=32, boosted=0, value_bits=value_bits)
    before, ring = pool(fmt.value_words), normal(4, HEADS, 40, 32)
    ids = jnp.asarray([1, 4, POOL, 2], jnp.int32)
    starts = [0, 24, 3, 33]
    after = np.asarray(store_value_pages(before, ring, jnp.asarray(starts, jnp.int32), ids, fmt))
    for page, start, record in zip(ring, starts, ids, strict=True):
        if record == POOL:
            continue
        tokens = jnp.stack([page[:, (start + i) % 40] for i in range(16)], 1)  # slot 39 is followed by slot 0
        np.testing.assert_array_equal(after[record], quantize_values(tokens, fmt))
    np.testing.assert_array_equal(after[[0, 3]], np.asarray(before)[[0, 3]])


def test_values_without_a_ring():
    before, values = pool(FMT.value_words), normal(2, HEADS, 16, 32)
    after = store_value_pages(before, values, jnp.zeros(2, jnp.int32), jnp.asarray([4, 0], jnp.int32), FMT)
    np.testing.assert_array_equal(after[jnp.asarray([4, 0])], quantize_values(values, FMT))


def test_no_pages_and_an_empty_pool():
    before, none = pool(FMT.key_words), jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(store_key_pages(before, normal(0, HEADS, 16, 32), none, FMT), before)
    empty, ids = jnp.zeros((0, HEADS, FMT.value_words), jnp.uint32), jnp.zeros(2, jnp.int32)
    assert store_value_pages(empty, normal(2, HEADS, 40, 32), ids, ids, FMT).shape == empty.shape
    assert dequantize_pages(before, none, FMT, "keys").shape == (0, HEADS, 16, 32)
    assert not dequantize_pages(empty, ids, FMT, "values").any()


def test_what_does_not_fit_is_refused():
    keys, ids = normal(2, HEADS, 16, 32), jnp.zeros(2, jnp.int32)
    good = pool(FMT.key_words)
    with pytest.raises(ValueError, match=rf"the pool of keys must be uint32 \[M, K, {FMT.key_words}\], got uint32"):
        store_key_pages(pool(FMT.key_words + 4), keys, ids, FMT)
    with pytest.raises(ValueError, match=r"page_ids must be \[X\] and keys \[X, K = 2, tokens, head_dim\], got \[3\]"):
        store_key_pages(good, keys, jnp.zeros(3, jnp.int32), FMT)
    with pytest.raises(ValueError, match=r"keys must end in \[16, 32\], got \[2, 2, 15, 32\]"):
        store_key_pages(good, keys[:, :, :15], ids, FMT)
    with pytest.raises(ValueError, match="score must be one of magnitude, variance, range, got 'mean'"):
        store_key_pages(good, keys, ids, FMT, score="mean")
    with pytest.raises(ValueError, match=r"values must end in at least \[16, 32\], got \[2, 2, 12, 32\]"):
        store_value_pages(pool(FMT.value_words), keys[:, :, :12], ids, ids, FMT)
    with pytest.raises(ValueError, match="implementation must be one of auto, mosaic, xla, got 'cuda'"):
        store_key_pages(good, keys, ids, FMT, implementation="cuda")
    with pytest.raises(ValueError, match=rf"records must be uint32\[2, 2, {FMT.key_words}\] for page_ids \[2\]"):
        write_records(good, good[:1], ids)


# ---------------------------------------------------------------- the kernel
PAGES, IDS = 5, (4, POOL, 0, 3, 1)
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
KEYS = [  # head size, boosted channels, dtype, contents, options
    (128, 32, "bfloat16", "normal", {}),
    (128, 16, "bfloat16", "wide", {"score": "range", "weights": True, "shrink": SHRINKS}),
    (128, 128, "bfloat16", "constant", {"shrink": (0.9,)}),
    (128, 0, "float16", "ties", {}),
    (64, 5, "float16", "ties", {"score": "variance"}),
    (64, 8, "float32", "cancel", {"scores": True}),
    (64, 16, "float32", "wide", {"scores": True, "weights": True, "shrink": (1.0, 0.875, 0.75)}),
    (64, 64, "float32", "wide", {}),
]
VALUES = [  # head size, bits, dtype, slots, contents, shrink
    (128, 2, "bfloat16", 256, "normal", 1.0),
    (128, 2, "bfloat16", 200, "wide", 0.8),
    (128, 4, "float16", 128, "constant", 1.0),
    (64, 2, "float32", 129, "cancel", 0.8),
    (64, 4, "bfloat16", 256, "ties", 1.0),
]


def pages(contents, tokens, head_dim, dtype):
    """Pages [PAGES, HEADS, tokens, D] of one kind of trouble."""
    shape = (PAGES, HEADS, tokens, head_dim)
    rng = np.random.default_rng(len(contents) + head_dim)
    x = rng.normal(size=shape) * rng.uniform(0.1, 3, (*shape[:2], 1, head_dim))
    if contents == "ties":  # small integers over a power of two: quotients that end in one half
        x = rng.integers(-24, 24, shape) / 2.0 ** rng.integers(0, 3, (*shape[:2], 1, head_dim))
    elif contents == "constant":  # constant and zero channels and tokens, zeros of both signs, channels at 1,000
        x[..., ::3] = 1000 * rng.normal(size=(*shape[:2], 1, 1))
        x[..., 1::5] = 0
        x[:, :, ::2, 1::5] *= -0.0
        x[:, :, 7] = 0
    elif contents == "wide":  # beyond float16, and far below
        x[0, 0] *= 3e3
        x[2] *= 10.0 ** rng.integers(-9, 3, (1, 1, head_dim))
        x[0, 1] *= 1e30
        x[3, 0, 5, 7] = 3e38
    elif contents == "cancel":  # numbers next to zero, and a min of the size of a tie: differences that float32 rounds
        x = rng.choice([-1.5, 1.5, 0, 1e-9, -1e-9, 3e-8, -3e-8, 1e-20, 0.5, -0.5], size=shape)
        x[:, :, 0], x[:, :, 1] = -1.5, 1.5
    return jnp.asarray(x, jnp.dtype(dtype))


def key_call(case):
    """(function of (implementation, pool, keys), arguments)."""
    head_dim, boosted, dtype, contents, options = case
    fmt, rng = PageFormat(head_dim=head_dim, boosted=boosted), np.random.default_rng(0)
    given = {
        name: jnp.asarray(rng.normal(size=(PAGES, HEADS, head_dim)), jnp.float32) if value is True else value
        for name, value in options.items()
    }

    def call(which, before, keys):
        return store_key_pages(before, keys, jnp.asarray(IDS, jnp.int32), fmt, **given, implementation=which)

    return call, (pool(fmt.key_words), pages(contents, 128, head_dim, dtype))


def value_call(case):
    """The same for values."""
    head_dim, bits, dtype, slots, contents, shrink = case
    fmt = PageFormat(head_dim=head_dim, value_bits=bits)
    starts = jnp.asarray([0, 5, slots - 1, slots // 2, slots - 128], jnp.int32)

    def call(which, before, values):
        ids = jnp.asarray(IDS, jnp.int32)
        return store_value_pages(before, values, starts, ids, fmt, shrink=(shrink,), implementation=which)

    return call, (pool(fmt.value_words), pages(contents, slots, head_dim, dtype))


CALLS = [pytest.param(key_call(x), id=f"keys-{x}") for x in KEYS] + [
    pytest.param(value_call(x), id=f"values-{x}") for x in VALUES
]


@pytest.mark.parametrize("call", CALLS)
def test_the_kernel_lowers_and_writes_in_place(monkeypatch, call):
    monkeypatch.setattr(implementation, "device_unsupported", lambda: None)
    function, arguments = call
    traced = jax.jit(lambda *x: function("mosaic", *x), donate_argnums=0).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "output_operand_alias" in text


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_records_of_the_kernel_are_those_of_the_reference(call):
    function, arguments = call
    got, want = (jax.jit(lambda *x, which=which: function(which, *x))(*arguments) for which in ("mosaic", "xla"))
    np.testing.assert_array_equal(got, want)


def test_four_blocks_fit_a_multiprocessor():
    for is_keys in (True, False):
        shape = StoreShape(PageFormat(boosted=32), is_keys, kv_heads=8, pool=9, slots=256, kind="bf16")
        assert 4 * (shape.smem["total"] + 1024) <= 228 * 1024


def test_what_the_kernel_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr(implementation, "device_unsupported", lambda: None)
    with pytest.raises(ValueError, match="the kernel takes pages of 128 tokens, got 16; use 'auto' or 'xla'"):
        store_key_pages(
            pool(FMT.key_words), normal(1, HEADS, 16, 32), jnp.zeros(1, jnp.int32), FMT, implementation="mosaic"
        )
    fmt, zero = PageFormat(head_dim=64), jnp.zeros(1, jnp.int32)
    values = normal(1, HEADS, 128, 64)
    with pytest.raises(ValueError, match="the kernel takes one shrink factor of values, got 2"):
        store_value_pages(pool(fmt.value_words), values, zero, zero, fmt, shrink=(1.0, 0.8), implementation="mosaic")
    wide = PageFormat(head_dim=96)
    with pytest.raises(ValueError, match=r"the kernel takes head sizes \(64, 128\), got 96"):
        store_value_pages(pool(wide.value_words), normal(1, HEADS, 128, 96), zero, zero, wide, implementation="mosaic")
