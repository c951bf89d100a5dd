"""The Mosaic kernels of quantize-and-pack: they lower everywhere; on a GPU they give the reference's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import implementation
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.store.operation import store_key_pages, store_value_pages

POOL, PAGES, HEADS = 7, 5, 3
IDS = (4, POOL, 0, 6, 3)
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
SHRINKS = [(0.8,), (1.0, 0.9, 0.8)]
EXTRAS = {
    "plain": {},
    "variance": {"score": "variance"},
    "range": {"score": "range"},
    "weights": {"weights": True},
    "scores": {"scores": True},
    "shrink": {"shrink": (1.0, 0.875, 0.75), "scores": True, "weights": True},
}


def make(name, shape, dtype):
    """Pages [..., G, D] of one kind of trouble."""
    rng = np.random.default_rng(len(name) + shape[-1])
    x = rng.normal(size=shape) * rng.uniform(0.1, 3, (*shape[:2], 1, shape[3]))
    if name == "ties":  # small integers over a power of two: quotients that end in one half
        x = rng.integers(-24, 24, shape) / 2.0 ** rng.integers(0, 3, (*shape[:2], 1, shape[3]))
    elif name == "constant":  # constant and zero channels and tokens, zeros of both signs, a channel at 1,000
        x[..., ::3] = 1000 * rng.normal(size=(*shape[:2], 1, 1))
        x[..., 1::5] = 0
        x[:, :, ::2, 1::5] *= -0.0
        x[:, :, 7] = 0
    elif name == "wide":  # beyond float16 where the dtype goes there, and far below
        x[0, 0] *= 3e3
        x[2] *= 10.0 ** rng.integers(-9, 3, (1, 1, shape[3]))
        if dtype != jnp.float16:
            x[0, 1] *= 1e30
            x[3, 0, 5, 7] = 3e38
    elif name == "cancel":  # numbers next to zero, and a min of the size of a tie: differences that float32 rounds
        x = rng.choice([-1.5, 1.5, 0, 1e-9, -1e-9, 3e-8, -3e-8, 1e-20, 0.5, -0.5], size=shape)
        x[:, :, 0], x[:, :, 1] = -1.5, 1.5
    elif name in ("apart", "narrow", "tiny"):
        # The ends of grids: equal ranges with mins far apart, ranges of nearly one width, numbers near 2**-24.
        x = rng.uniform(-1, 1, shape)
        x[:, :, 0], x[:, :, 1] = -1, 1
        x = {
            "apart": x + rng.uniform(-1000, 1000, (*shape[:2], 1, shape[3])),
            "narrow": x * rng.uniform(1, 1.2, (*shape[:2], 1, shape[3])),
            "tiny": x * 1e-7,
        }[name]
    return jnp.asarray(x, dtype)


def key_arguments(fmt, dtype, data="normal", extra="plain"):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.integers(0, 2**32, (POOL, HEADS, fmt.key_words), np.uint32))
    keys = make(data, (PAGES, HEADS, fmt.page, fmt.head_dim), dtype)
    options = dict(EXTRAS[extra])
    for name in ("weights", "scores"):
        if options.get(name):
            options[name] = jnp.asarray(rng.normal(size=(PAGES, HEADS, fmt.head_dim)), jnp.float32)
    return pool, keys, jnp.asarray(IDS, jnp.int32), options


def value_arguments(fmt, dtype, slots, data="normal"):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.integers(0, 2**32, (POOL, HEADS, fmt.value_words), np.uint32))
    values = make(data, (PAGES, HEADS, slots, fmt.head_dim), dtype)
    starts = [0] * PAGES if slots == fmt.page else [0, 5, slots - 1, slots // 2, slots - fmt.page]
    return pool, values, jnp.asarray(starts, jnp.int32), jnp.asarray(IDS, jnp.int32)


def store_keys(fmt, which):
    return jax.jit(
        lambda pool, keys, ids, options: store_key_pages(
            pool, keys, ids, fmt, **options, shrink=which[1], score=which[2], implementation=which[0]
        )
    )


def run_keys(fmt, arguments, which):
    pool, keys, ids, options = arguments
    static = {"shrink": (1.0,), "score": "magnitude"} | options
    shrink, score = static.pop("shrink"), static.pop("score")
    return store_keys(fmt, (which, shrink, score)), (pool, keys, ids, static)


def run_values(fmt, which, shrink=(1.0,)):
    return jax.jit(lambda *a: store_value_pages(*a, fmt, shrink=shrink, implementation=which))


def lowered(f, *arguments):
    return jax.jit(f, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def anywhere(monkeypatch):
    """Lets "mosaic" be lowered where no GPU is."""
    monkeypatch.setattr(implementation, "device_unsupported", lambda: None)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("head_dim", [64, 128])
class TestLowering:
    """One custom call that writes the pool it is given."""

    @pytest.mark.parametrize("boosted", [0, 5, 16, 32, None])
    def test_keys(self, dtype, head_dim, boosted):
        fmt = PageFormat(head_dim=head_dim, boosted=head_dim if boosted is None else boosted)
        f, arguments = run_keys(fmt, key_arguments(fmt, dtype), "mosaic")
        text = lowered(f, *arguments)
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "output_operand_alias" in text

    @pytest.mark.parametrize("extra", EXTRAS)
    def test_options_of_keys(self, dtype, head_dim, extra):
        fmt = PageFormat(head_dim=head_dim, boosted=8)
        f, arguments = run_keys(fmt, key_arguments(fmt, dtype, extra=extra), "mosaic")
        assert "output_operand_alias" in lowered(f, *arguments)

    @pytest.mark.parametrize("boosted", [5, 32])
    def test_bytes_as_metadata(self, dtype, head_dim, boosted):
        fmt = PageFormat(head_dim=head_dim, boosted=boosted, metadata="fixed8")
        f, arguments = run_keys(fmt, key_arguments(fmt, dtype, extra="shrink"), "mosaic")
        assert "output_operand_alias" in lowered(f, *arguments)
        text = lowered(run_values(fmt, "mosaic", (0.8,)), *value_arguments(fmt, dtype, 256))
        assert "output_operand_alias" in text

    @pytest.mark.parametrize("value_bits", [2, 4])
    @pytest.mark.parametrize("slots", [128, 200, 256])
    def test_values(self, dtype, head_dim, value_bits, slots):
        fmt = PageFormat(head_dim=head_dim, value_bits=value_bits)
        text = lowered(run_values(fmt, "mosaic"), *value_arguments(fmt, dtype, slots))
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "output_operand_alias" in text

    @pytest.mark.parametrize("value_bits", [2, 4])
    @pytest.mark.parametrize("shrink", SHRINKS, ids=str)
    def test_values_in_a_shrunk_range(self, dtype, head_dim, value_bits, shrink):
        fmt = PageFormat(head_dim=head_dim, value_bits=value_bits)
        text = lowered(run_values(fmt, "mosaic", shrink), *value_arguments(fmt, dtype, 256))
        assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.usefixtures("anywhere")
def test_the_pool_is_written_in_place_inside_a_loop():
    fmt = PageFormat()
    pool, keys, ids, _ = key_arguments(fmt, jnp.bfloat16)

    def f(pool, keys, ids):
        body = lambda i, pool: store_key_pages(pool, keys, (ids + i) % POOL, fmt, implementation="mosaic")  # noqa: E731
        return jax.lax.fori_loop(0, 3, body, pool)

    text = lowered(f, pool, keys, ids)
    assert "output_operand_alias" in text
    assert "stablehlo.while" in text


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "fmt,dtype,reason",
    [
        (PageFormat(page=64), jnp.bfloat16, "the kernel takes pages of 128 tokens, got 64"),
        (PageFormat(head_dim=96), jnp.bfloat16, r"the kernel takes head sizes \(64, 128\), got 96"),
        (PageFormat(head_dim=256), jnp.bfloat16, "got 256"),
        (PageFormat(), jnp.float8_e4m3fn, "the kernel takes bfloat16, float16, float32, got float8_e4m3fn"),
    ],
)
def test_what_the_kernels_do_not_take_is_named_and_auto_goes_on_without(fmt, dtype, reason):
    keys = jax.ShapeDtypeStruct((PAGES, HEADS, fmt.page, fmt.head_dim), dtype)
    ids = jax.ShapeDtypeStruct((PAGES,), jnp.int32)
    for words, store, extra in (
        (fmt.key_words, store_key_pages, ()),
        (fmt.value_words, store_value_pages, (ids,)),
    ):
        pool = jax.ShapeDtypeStruct((POOL, HEADS, words), jnp.uint32)
        with pytest.raises(ValueError, match=f"implementation='mosaic' cannot run: .*{reason}.*use 'auto' or 'xla'"):
            jax.eval_shape(lambda *a, s=store: s(*a, fmt, implementation="mosaic"), pool, keys, *extra, ids)
        assert jax.eval_shape(lambda *a, s=store: s(*a, fmt), pool, keys, *extra, ids).shape == pool.shape


def test_mosaic_without_a_gpu_says_so():
    if jax.default_backend() == "gpu":
        pytest.skip("has a GPU")
    fmt = PageFormat()
    pool, keys, ids, _ = key_arguments(fmt, jnp.bfloat16)
    with pytest.raises(ValueError, match="the default device is cpu, not an NVIDIA GPU"):
        store_key_pages(pool, keys, ids, fmt, implementation="mosaic")


# ---------------------------------------------------------------- on a GPU
def equal_to_both_references(mosaic, xla, arguments):
    """The kernel against the reference on the GPU and on the CPU, and against itself."""
    got = np.asarray(mosaic(*arguments))
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = np.asarray(xla(*jax.device_put(arguments, jax.devices("cpu")[0])))
    np.testing.assert_array_equal(got, on_cpu)
    np.testing.assert_array_equal(np.asarray(xla(*arguments)), on_cpu)
    np.testing.assert_array_equal(np.asarray(mosaic(*arguments)), got)


KEY_CASES = [
    *((128, c, jnp.bfloat16, "normal", "plain") for c in (0, 16, 32, 37, 128)),
    *((64, c, jnp.float16, "normal", "plain") for c in (0, 5, 16, 64)),
    *((d, 24, jnp.float32, "normal", "plain") for d in (64, 128)),
    *((128, 16, jnp.bfloat16, data, "plain") for data in ("ties", "constant", "wide", "cancel")),
    *((64, 8, jnp.float32, data, "plain") for data in ("ties", "constant", "wide", "cancel")),
    *((128, 32, jnp.float16, data, "plain") for data in ("ties", "constant", "wide")),
    *((128, 32, jnp.bfloat16, "normal", extra) for extra in EXTRAS if extra != "plain"),
    *((64, 8, jnp.float32, "ties", extra) for extra in ("variance", "shrink")),
]
VALUE_CASES = [
    *((d, bits, jnp.bfloat16, 256, "normal") for d in (64, 128) for bits in (2, 4)),
    *((128, bits, dtype, 200, "ties") for bits in (2, 4) for dtype in DTYPES),
    *((64, bits, jnp.float32, 128, data) for bits in (2, 4) for data in ("constant", "wide", "cancel")),
    *((128, 2, jnp.bfloat16, 128, data) for data in ("constant", "wide", "cancel")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim,boosted,dtype,data,extra", KEY_CASES)
def test_key_records_equal_the_reference(head_dim, boosted, dtype, data, extra):
    fmt = PageFormat(head_dim=head_dim, boosted=boosted)
    arguments = key_arguments(fmt, dtype, data, extra)
    mosaic, arrays = run_keys(fmt, arguments, "mosaic")
    xla, _ = run_keys(fmt, arguments, "xla")
    equal_to_both_references(mosaic, xla, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim,value_bits,dtype,slots,data", VALUE_CASES)
def test_value_records_equal_the_reference(head_dim, value_bits, dtype, slots, data):
    fmt = PageFormat(head_dim=head_dim, value_bits=value_bits)
    arguments = value_arguments(fmt, dtype, slots, data)
    equal_to_both_references(run_values(fmt, "mosaic"), run_values(fmt, "xla"), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("shrink", SHRINKS, ids=str)
@pytest.mark.parametrize(
    "head_dim,value_bits,dtype,data",
    [
        (128, 2, jnp.bfloat16, "normal"),
        (128, 2, jnp.bfloat16, "ties"),
        (128, 4, jnp.float16, "wide"),
        (64, 2, jnp.float32, "cancel"),
        (64, 4, jnp.bfloat16, "constant"),
    ],
)
def test_value_records_of_a_shrunk_range_equal_the_reference(head_dim, value_bits, dtype, data, shrink):
    fmt = PageFormat(head_dim=head_dim, value_bits=value_bits)
    arguments = value_arguments(fmt, dtype, 256, data)
    equal_to_both_references(run_values(fmt, "mosaic", shrink), run_values(fmt, "xla", shrink), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("data", ["normal", "ties", "constant", "wide", "cancel", "apart", "narrow", "tiny"])
@pytest.mark.parametrize("head_dim,boosted,value_bits,dtype", [(128, 32, 2, DTYPES[0]), (64, 8, 4, DTYPES[2])])
@pytest.mark.parametrize("shrunk", [False, True])
def test_records_with_bytes_as_metadata_equal_the_reference(head_dim, boosted, value_bits, dtype, data, shrunk):
    fmt = PageFormat(head_dim=head_dim, boosted=boosted, value_bits=value_bits, metadata="fixed8")
    arguments = key_arguments(fmt, dtype, data, "shrink" if shrunk else "plain")
    mosaic, arrays = run_keys(fmt, arguments, "mosaic")
    xla, _ = run_keys(fmt, arguments, "xla")
    equal_to_both_references(mosaic, xla, arrays)
    shrink = (0.8,) if shrunk else (1.0,)
    arguments = value_arguments(fmt, dtype, 200, data)
    equal_to_both_references(run_values(fmt, "mosaic", shrink), run_values(fmt, "xla", shrink), arguments)


@pytest.mark.gpu
def test_many_pages_at_once():
    """Prefill: 16 x 64 pages of 8 heads in one call."""
    fmt = PageFormat(boosted=32)
    keys = jax.random.normal(jax.random.key(0), (1024, 8, 128, 128), jnp.bfloat16)
    ids = jax.random.permutation(jax.random.key(1), 1024).astype(jnp.int32)
    keys_of = lambda which: jax.jit(lambda p: store_key_pages(p, keys, ids, fmt, implementation=which))  # noqa: E731
    values_of = lambda which: jax.jit(lambda p: store_value_pages(p, keys, ids, ids, fmt, implementation=which))  # noqa: E731
    for make_store, words in ((keys_of, fmt.key_words), (values_of, fmt.value_words)):
        pool = jnp.zeros((1024, 8, words), jnp.uint32)
        assert jnp.array_equal(make_store("mosaic")(pool), make_store("xla")(pool))
