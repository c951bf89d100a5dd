"""Page dequantization, by its meaning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels.dequantize import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values

FMT = PageFormat(page=32, head_dim=32, boosted=5, value_bits=4)
POOL, HEADS = 6, 2
IDS = (5, 0, POOL, 3, -1, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_pages_come_back_and_ids_of_no_record_give_zeros(side, dtype):
    x = np.random.default_rng(0).normal(size=(POOL, HEADS, 32, 32))
    x[3] *= 1e7  # a page that needs an exponent
    pool = (quantize_keys if side == "keys" else quantize_values)(jnp.asarray(x, jnp.float32), FMT)
    got = jax.jit(lambda pool, ids: dequantize_pages(pool, ids, FMT, side, dtype=dtype))(pool, jnp.asarray(IDS))
    assert got.shape == (6, HEADS, 32, 32)
    assert got.dtype == dtype
    every = (dequantize_keys if side == "keys" else dequantize_values)(pool, FMT)
    every = np.asarray(every.astype(dtype))
    for page, record in zip(np.asarray(got), IDS, strict=True):
        np.testing.assert_array_equal(page, every[record] if 0 <= record < POOL else np.zeros_like(every[0]))


def test_a_pool_of_the_other_side_is_refused():
    fmt, ids = PageFormat(page=32, head_dim=32, boosted=5), jnp.zeros(3, jnp.int32)
    pool = jnp.zeros((POOL, HEADS, fmt.key_words), jnp.uint32)
    with pytest.raises(ValueError, match=rf"the pool of values must be uint32 \[M, K, {fmt.value_words}\], got uint32"):
        dequantize_pages(pool, ids, fmt, "values")
    with pytest.raises(ValueError, match="side must be 'keys' or 'values', got 'key'"):
        dequantize_pages(pool, ids, fmt, "key")
