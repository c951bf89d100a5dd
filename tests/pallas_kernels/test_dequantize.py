"""Page dequantization: the reference by its meaning, the Mosaic kernel by its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import implementation
from kitty_jax.pallas_kernels.dequantize.operation import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import (
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)

POOL, HEADS = 6, 2
IDS = (5, 0, POOL, 3, -1, 0)
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


def make_pool(fmt, side, seed=0):
    """Records of pages, one of which needs an exponent."""
    x = np.random.default_rng(seed).normal(size=(POOL, HEADS, fmt.page, fmt.head_dim))
    x[3] *= 1e7
    quantizer = quantize_keys if side == "keys" else quantize_values
    return jax.jit(lambda x: quantizer(x, fmt))(jnp.asarray(x, jnp.float32))


def dequantize(fmt, side, dtype, which):
    return jax.jit(lambda pool, ids: dequantize_pages(pool, ids, fmt, side, dtype=dtype, implementation=which))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_pages_come_back_and_ids_of_no_record_give_zeros(side, dtype):
    fmt = PageFormat(page=32, head_dim=32, boosted=5, value_bits=4)
    pool = make_pool(fmt, side)
    got = dequantize(fmt, side, dtype, "auto" if jax.default_backend() == "cpu" else "xla")(pool, jnp.asarray(IDS))
    assert got.shape == (6, HEADS, 32, 32)
    assert got.dtype == dtype
    every = (dequantize_keys if side == "keys" else dequantize_values)(pool, fmt)
    if dtype == jnp.float16:
        every = jnp.where(jnp.abs(every) < 65520, every, jnp.sign(every) * jnp.inf)
    every = np.asarray(every.astype(dtype))
    for page, record in zip(np.asarray(got), IDS, strict=True):
        np.testing.assert_array_equal(page, every[record] if 0 <= record < POOL else np.zeros_like(every[0]))


def test_what_does_not_fit_is_refused():
    fmt, ids = PageFormat(page=32, head_dim=32, boosted=5), jnp.zeros(3, jnp.int32)
    pool = jnp.zeros((POOL, HEADS, fmt.key_words), jnp.uint32)
    with pytest.raises(ValueError, match="side must be 'keys' or 'values', got 'key'"):
        dequantize_pages(pool, ids, fmt, "key")
    with pytest.raises(
        ValueError, match=rf"a pool of values must be uint32 \[M, K, {fmt.value_words}\], got uint32\[6, 2"
    ):
        dequantize_pages(pool, ids, fmt, "values")
    with pytest.raises(ValueError, match=r"page_ids must be int32 \[X\], got shape \(3, 1\)"):
        dequantize_pages(pool, ids[:, None], fmt, "keys")
    with pytest.raises(
        ValueError, match="cannot run: the kernel takes pages of 128 tokens, got 32; use 'auto' or 'xla'"
    ):
        dequantize_pages(pool, ids, fmt, "keys", implementation="mosaic")


FORMATS = [
    PageFormat(head_dim=d, boosted=c, value_bits=b) for d in (64, 128) for c, b in ((0, 2), (5, 4), (32, 2), (d, 4))
] + [PageFormat(head_dim=d, boosted=c, value_bits=b, metadata="fixed8") for d, c, b in ((64, 5, 4), (128, 32, 2))]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_the_kernel_lowers(monkeypatch, side, fmt, dtype):
    monkeypatch.setattr(implementation, "device_unsupported", lambda: None)
    words = fmt.key_words if side == "keys" else fmt.value_words
    pool, ids = jax.ShapeDtypeStruct((POOL, HEADS, words), jnp.uint32), jax.ShapeDtypeStruct((6,), jnp.int32)
    text = dequantize(fmt, side, dtype, "mosaic").trace(pool, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_the_kernel_equals_the_reference(side, fmt, dtype):
    pool, ids = make_pool(fmt, side), jnp.asarray(IDS, jnp.int32)
    got = np.asarray(dequantize(fmt, side, dtype, "mosaic")(pool, ids))
    want = np.asarray(dequantize(fmt, side, dtype, "xla")(pool, ids))
    # By bytes, so that zeros must agree in sign.
    assert got.tobytes() == want.tobytes()
