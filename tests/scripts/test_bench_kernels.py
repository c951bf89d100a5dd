"""scripts/bench_kernels.py without a GPU: its inputs, through the references, and what it says there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.pallas_kernels.page_format import PageFormat
from scripts import bench_kernels as script
from tests.scripts.tiny_shape import error_of

FORMAT = PageFormat(head_dim=64, boosted=16)


def test_inputs_of_decode_attention() -> None:
    shape = script.DecodeShape(2, 400, kv_heads=2, group=2, fmt=FORMAT)
    first, second = script.decode_inputs(shape, 2)
    assert first.kv.key_pages is second.kv.key_pages
    assert not set(first.page_table.ravel().tolist()) & set(second.page_table.ravel().tolist())
    outs = [np.asarray(jax.jit(script.decode_reference)(x), np.float32) for x in (first, second)]
    assert outs[0].shape == (2, 1, 4, 64)
    assert np.isfinite(outs).all()
    assert not np.allclose(*outs)
    # 368 tokens after the sink: 2 pages, and 112 in the key tail; 1 page of values, and 240 in the ring.
    dense = 2 * 64 * (2 * 32 + 112 + 240 + 2)
    pages = 4 * (2 * FORMAT.key_words + FORMAT.value_words)
    assert shape.bytes_read == 2 * 2 * (pages + dense + 2 * 2 * 64 * 2)


def test_inputs_of_the_store() -> None:
    for case in (script.StoreCase("keys", "", 3, FORMAT), script.StoreCase("values", "", 3, FORMAT, slots=256)):
        case = dataclasses.replace(case, kv_heads=2)
        x = jax.random.normal(jax.random.key(0), (3, 2, case.slots, 64), jnp.bfloat16)
        pool = jnp.zeros((3, 2, case.record_words), jnp.uint32)
        store = jax.jit(functools.partial(script.store, case, "xla"))
        made = store(pool, x, jnp.array([2, 3, 0], jnp.int32))  # 3 stores nothing
        assert (np.asarray(made) != 0).any((1, 2)).tolist() == [True, False, True]


def test_without_a_gpu_it_says_so(capsys) -> None:
    assert "the kernels need an NVIDIA GPU" in error_of(script.main, "store", capsys)
    assert "argument --head-dim: must be a whole number" in error_of(script.main, "decode --head-dim 0", capsys)
