"""The code of the page kernels, run on numpy arrays: the reference's bits, and no races, where no GPU is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import metadata_kernel as metadata_mgpu
from kitty_jax.pallas_kernels.dequantize import kernel as dequantize_mgpu
from kitty_jax.pallas_kernels.dequantize.operation import dequantize_pages
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.store import channels as store_channels_mgpu
from kitty_jax.pallas_kernels.store import keys as store_keys_mgpu
from kitty_jax.pallas_kernels.store import tile as store_tile_mgpu
from kitty_jax.pallas_kernels.store import values as store_values_mgpu
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages
from tests.pallas_kernels import ptx_emulator
from tests.pallas_kernels.test_store_mgpu import EXTRAS, make

POOL, HEADS = 4, 2
IDS = (2, POOL, 0)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
KEYS = [
    (128, 32, BF16, "normal", "plain"),
    (128, 128, BF16, "ties", "plain"),
    (64, 5, F16, "wide", "plain"),
    (64, 0, F32, "cancel", "plain"),
    (64, 16, BF16, "constant", "variance"),
    (64, 8, BF16, "cancel", "range"),
    (64, 16, F16, "ties", "weights"),
    (64, 24, F32, "wide", "scores"),
    (64, 8, BF16, "normal", "shrink"),
]
VALUES = [
    (128, 2, BF16, 256, "normal", (1.0,)),
    (128, 4, BF16, 200, "ties", (1.0,)),
    (64, 2, F32, 128, "cancel", (1.0,)),
    (64, 2, F16, 256, "constant", (1.0,)),
    (64, 4, F32, 129, "wide", (1.0,)),
    (128, 2, BF16, 256, "normal", (0.8,)),
    (64, 4, F32, 128, "wide", (0.8,)),
    (128, 2, F16, 128, "constant", (0.8,)),
    (128, 2, BF16, 128, "normal", (1.0, 0.8, 0.9)),
    (64, 2, F32, 128, "cancel", (0.75, 1.0)),
    (64, 4, F16, 200, "ties", (1.0, 0.9, 0.8)),
]
PAGES = [
    ("keys", 128, 32, 2, BF16),
    ("keys", 64, 13, 2, F32),
    ("keys", 64, 64, 2, F16),
    ("keys", 64, 0, 2, BF16),
    ("values", 128, 0, 2, BF16),
    ("values", 64, 0, 4, F32),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    stores = (store_channels_mgpu, store_keys_mgpu, store_tile_mgpu, store_values_mgpu)
    for module in (dequantize_mgpu, metadata_mgpu, *stores):
        monkeypatch.setattr(module, "ptx", ptx_emulator)
        monkeypatch.setattr(module, "sx", ptx_emulator)


def records(words):
    return jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (POOL, HEADS, words), np.uint32))


@pytest.mark.parametrize(
    "head_dim,boosted,dtype,data,extra,metadata",
    [
        *((*case, "float16") for case in KEYS),
        (128, 32, BF16, "normal", "plain", "fixed8"),
        (128, 16, BF16, "wide", "shrink", "fixed8"),
        (64, 5, F16, "ties", "plain", "fixed8"),
        (64, 64, F32, "cancel", "plain", "fixed8"),
        (64, 0, BF16, "constant", "shrink", "fixed8"),
        (64, 8, F32, "apart", "plain", "fixed8"),
        (64, 8, F32, "narrow", "shrink", "fixed8"),
        (64, 8, F32, "tiny", "plain", "fixed8"),
    ],
)
def test_keys(head_dim, boosted, dtype, data, extra, metadata):
    fmt = PageFormat(head_dim=head_dim, boosted=boosted, metadata=metadata)
    keys = make(data, (5, HEADS, 128, head_dim), dtype)[: len(IDS)]
    pool, ids = records(fmt.key_words), jnp.asarray(IDS, jnp.int32)
    options = dict(EXTRAS[extra])
    for name in ("weights", "scores"):
        if options.get(name):
            drawn = np.random.default_rng(len(name)).normal(size=(len(IDS), HEADS, head_dim))
            options[name] = jnp.asarray(drawn, jnp.float32)
    reference = functools.partial(store_key_pages, fmt=fmt, implementation="xla", **options)
    want = jax.jit(reference)(pool, keys, ids)
    scores, weights = options.pop("scores", None), options.pop("weights", None)
    score, shrink = options.pop("score", "magnitude"), options.pop("shrink", (1.0,))
    plan = store_channels_mgpu.KeyPlan(
        fmt=fmt,
        kv_heads=HEADS,
        pool=POOL,
        kind=store_tile_mgpu.KINDS[keys.dtype.name],
        score=score if scores is None else None,
        weighted=weights is not None,
        shrink=shrink,
    )
    operands = [pool, keys, ids, *(x for x in (scores, weights) if x is not None)]
    emit = functools.partial(store_keys_mgpu.emit, plan)
    got = ptx_emulator.run(emit, [np.asarray(x) for x in operands], len(IDS) * HEADS, plan.smem.total)[0]
    np.testing.assert_array_equal(got.view(np.uint32).reshape(pool.shape), want)


@pytest.mark.parametrize(
    "head_dim,value_bits,dtype,slots,data,shrink,metadata",
    [
        *((*case, "float16") for case in VALUES),
        (128, 2, BF16, 256, "normal", (1.0,), "fixed8"),
        (128, 2, BF16, 200, "wide", (0.8,), "fixed8"),
        (64, 4, F32, 128, "cancel", (1.0,), "fixed8"),
        (64, 2, F16, 129, "constant", (1.0, 0.8, 0.9), "fixed8"),
    ],
)
def test_values(head_dim, value_bits, dtype, slots, data, shrink, metadata):
    fmt = PageFormat(head_dim=head_dim, value_bits=value_bits, metadata=metadata)
    values = make(data, (5, HEADS, slots, head_dim), dtype)[: len(IDS)]
    pool, ids = records(fmt.value_words), jnp.asarray(IDS, jnp.int32)
    starts = jnp.asarray([slots - 1, 0, slots // 3] if slots > 128 else [0, 0, 0], jnp.int32)
    reference = functools.partial(store_value_pages, fmt=fmt, shrink=shrink, implementation="xla")
    want = jax.jit(reference)(pool, values, starts, ids)
    kind = store_tile_mgpu.KINDS[values.dtype.name]
    plan = store_values_mgpu.ValuePlan(fmt=fmt, kv_heads=HEADS, pool=POOL, slots=slots, kind=kind, shrink=shrink)
    emit = functools.partial(store_values_mgpu.emit, plan)
    operands = [np.asarray(x) for x in (pool, values, starts, ids)]
    got = ptx_emulator.run(emit, operands, len(IDS) * HEADS, plan.smem.total)[0]
    np.testing.assert_array_equal(got.view(np.uint32).reshape(pool.shape), want)


@pytest.mark.parametrize(
    "side,head_dim,boosted,value_bits,dtype,metadata",
    [
        *((*case, "float16") for case in PAGES),
        ("keys", 128, 32, 2, BF16, "fixed8"),
        ("keys", 64, 13, 2, F32, "fixed8"),
        ("values", 64, 0, 4, F16, "fixed8"),
    ],
)
def test_dequantize(side, head_dim, boosted, value_bits, dtype, metadata):
    fmt = PageFormat(head_dim=head_dim, boosted=boosted, value_bits=value_bits, metadata=metadata)
    pages = make("wide", (5, HEADS, 128, head_dim), BF16)[:POOL]
    pool, every = records(fmt.key_words if side == "keys" else fmt.value_words), jnp.arange(POOL, dtype=jnp.int32)
    store = functools.partial(store_key_pages if side == "keys" else store_value_pages, fmt=fmt, implementation="xla")
    pool = jax.jit(store)(pool, pages, *([every] if side == "keys" else [every, every]))
    ids = jnp.asarray([3, POOL, -1, 0], jnp.int32)
    reference = functools.partial(dequantize_pages, fmt=fmt, side=side, dtype=dtype, implementation="xla")
    want = np.asarray(jax.jit(reference)(pool, ids))
    kind = store_tile_mgpu.KINDS[np.dtype(dtype).name]
    plan = dequantize_mgpu.DequantizePlan(fmt=fmt, keys=side == "keys", kv_heads=HEADS, pool=POOL, kind=kind)
    emit = functools.partial(dequantize_mgpu.emit, plan)
    out = np.full(want.nbytes, 0xCD, np.uint8)
    got = ptx_emulator.run(emit, [np.asarray(pool), np.asarray(ids), out], 4 * HEADS, plan.smem.total)[2]
    assert got.tobytes() == want.tobytes()


def test_the_emulator_sees_a_missing_barrier():
    def emit(addresses, smem, *, barrier):
        tid = ptx_emulator.special_register("tid.x")
        own = ptx_emulator.add(smem, ptx_emulator.mul(tid, 4))
        ptx_emulator.store_shared([tid], own)
        if barrier:
            ptx_emulator.sync_block()
        ptx_emulator.load_shared(1, ptx_emulator.bit_xor(own, ptx_emulator.i32(4)))

    nothing = [np.zeros(4, np.uint32)]
    ptx_emulator.run(functools.partial(emit, barrier=True), nothing, 1, 512)
    with pytest.raises(AssertionError, match="read of another thread's write"):
        ptx_emulator.run(functools.partial(emit, barrier=False), nothing, 1, 512)


def test_without_a_barrier_in_the_kernel_the_test_fails(monkeypatch):
    fmt = PageFormat(head_dim=64, value_bits=2)
    plan = store_values_mgpu.ValuePlan(fmt=fmt, kv_heads=1, pool=1, slots=128, kind="bf16")
    monkeypatch.setattr(ptx_emulator, "sync_block", lambda: None)
    operands = [np.zeros(fmt.value_words, np.uint32), np.zeros((128, 64), np.uint16), *[np.zeros(1, np.int32)] * 2]
    with pytest.raises(AssertionError, match="without a barrier"):
        ptx_emulator.run(functools.partial(store_values_mgpu.emit, plan), operands, 1, plan.smem.total)
