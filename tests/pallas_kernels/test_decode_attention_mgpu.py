"""The Mosaic GPU decode-attention kernel: lowering everywhere, numbers on a GPU against the float32 reference on the
same codes."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.pallas_kernels import ptx
from kitty_jax.pallas_kernels.decode_attention.inputs import DecodeInputs
from kitty_jax.pallas_kernels.decode_attention.kernel import decode_attention_mosaic, unsupported
from kitty_jax.pallas_kernels.decode_attention.operation import decode_attention
from kitty_jax.pallas_kernels.decode_attention.shape import KernelShape, SharedMemory, choose_splits
from kitty_jax.pallas_kernels.page_format import BUFFERS, LayerKV, PageFormat
from kitty_jax.pallas_kernels.quantize import quantize_keys, quantize_values

# Relative error of the norm: over the whole output, and of the worst token. The first is the requirement. What makes
# the second is the rounding of q * scale to float16 (2**-12 of each product): an emulation of that in float64 gives
# 2.1e-3 for the sharpest token here.
TOLERANCE, WORST_TOKEN = 1e-3, 3e-3
G = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes, format, lengths and how the pages are split."""

    lengths: tuple[int, ...]
    tokens: int = 1
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    boosted: int = 16
    value_bits: int = 2
    sink: int = 32
    window: int = 128
    dtype: str = "bfloat16"
    pages: int = 8
    splits: int = 1
    key_scale: float = 1.0
    value_scale: float = 1.0
    query_scale: float = 1.0
    num_new: tuple[int, ...] | None = None
    sharpness: float = 1.0  # size of the logits against that of the other cases; a logit's rounding error grows with it

    @property
    def fmt(self) -> PageFormat:
        return PageFormat(G, self.head_dim, self.boosted, self.value_bits)

    def arguments(self) -> tuple:
        """Shapes of the arguments of decode_attention, as arrays without content."""
        q, *rest = jax.eval_shape(self.random)
        return _struct(jnp.dtype(self.dtype), *q.shape), *rest

    def random(self, seed: int = 0) -> tuple:
        """Arguments with random content: keys with a few strong channels, a scrambled page table, every slot filled."""
        b, k, d, dtype = len(self.lengths), self.kv_heads, self.head_dim, jnp.dtype(self.dtype)
        keys = iter(jax.random.split(jax.random.key(seed), 16))
        channel = jnp.exp(jax.random.normal(next(keys), (k, 1, d)))

        def key_like(*shape):
            return self.key_scale * channel * (0.3 + jax.random.normal(next(keys), (*shape[:1], k, *shape[1:], d)))

        def value_like(*shape):
            return self.value_scale * jax.random.normal(next(keys), (*shape[:1], k, *shape[1:], d))

        pool = b * self.pages
        some = max(pool, 1)  # pages are made, and those that the pool holds taken
        kv = LayerKV(
            key_pages=jax.jit(quantize_keys, static_argnums=1)(key_like(some, G), self.fmt)[:pool],
            value_pages=jax.jit(quantize_values, static_argnums=1)(value_like(some, G), self.fmt)[:pool],
            sink_keys=key_like(b, self.sink).astype(dtype),
            sink_values=value_like(b, self.sink).astype(dtype),
            tail_keys=key_like(b, G).astype(dtype),
            ring_values=value_like(b, self.window + G).astype(dtype),
            fmt=self.fmt,
        )
        q = self.query_scale * 0.4 * jax.random.normal(next(keys), (b, self.tokens, k * self.group, d))
        q = q.astype(dtype).astype(jnp.float32)  # float32 with the buffers' precision: the output is not rounded
        new = [jnp.swapaxes(x(b, self.tokens), 1, 2).astype(dtype) for x in (key_like, value_like)]
        table = jax.random.permutation(next(keys), some)[:pool].reshape(b, self.pages).astype(jnp.int32)
        num_new = self.num_new or (self.tokens,) * b
        return q, *new, kv, table, jnp.array(self.lengths, jnp.int32), jnp.array(num_new, jnp.int32)

    def kernel(self, *arguments):
        return decode_attention_mosaic(DecodeInputs(*arguments), self.head_dim**-0.5, self.splits)[0]

    def inserting_kernel(self, *arguments):
        """The same, and the token goes into the buffers: (attention, layer)."""
        return decode_attention_mosaic(DecodeInputs(*arguments), self.head_dim**-0.5, self.splits, insert=True)


def _struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered_text(f, case: Case) -> str:
    return jax.jit(f).trace(*case.arguments()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2), boosted=0, group=1),
        Case((1, 2), boosted=24, value_bits=4, group=5, splits=2),
        Case((1, 2), boosted=128, value_bits=4, group=16),
        Case((1, 2), head_dim=64, boosted=64, value_bits=4, group=16),
        Case((1, 2), head_dim=64, boosted=8, group=2, splits=3),
        Case((1, 2), tokens=8, group=5, dtype="float16"),
        Case((1, 2), tokens=3, dtype="float32", sink=0, window=0),
        Case((1, 2), pages=0),
    ],
    ids=str,
)
def test_lowers_for_cuda_without_a_gpu(case):
    assert lowered_text(case.kernel, case).count("mosaic_gpu_v2") == (1 if case.splits <= 2 else 2)


BOUNDARIES = (0, 1, 31, 32, 33, 159, 160, 161, 287, 288, 289, 32 + 3 * G - 1, 32 + 3 * G, 32 + 3 * G + 1)
INSERTED = [
    Case(BOUNDARIES, boosted=32),
    Case(BOUNDARIES, splits=3, dtype="float16", num_new=(1, 0) * 7),
    Case(BOUNDARIES, head_dim=64, boosted=8, kv_heads=3, group=3, sink=0, window=0),
    Case(BOUNDARIES, sink=7, window=300, head_dim=64, group=16, splits=2, num_new=(0, 1) * 7),
    Case(BOUNDARIES, dtype="float32"),
]


@pytest.mark.parametrize("case", INSERTED, ids=str)
def test_inserting_kernel_lowers_for_cuda_and_writes_in_place(case):
    text = lowered_text(case.inserting_kernel, case)
    call = next(line for line in text.splitlines() if "mosaic_gpu_v2" in line)
    aliased = 0 if case.dtype == "float32" else 2 if case.sink == 0 else 4
    assert call.count("output_operand_alias<") == aliased


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"one new token a sequence, got q of shape \(1, 2, 8, 128\)"):
        decode_attention(*Case((40,), tokens=2).arguments(), insert=True)
    q, *rest = Case((40,)).arguments()
    with pytest.raises(ValueError, match="query heads must be a multiple of the cache's 2 KV heads, got 7"):
        decode_attention(_struct(q.dtype, 1, 1, 7, 128), *rest)
    with pytest.raises(ValueError, match=r"new_keys: wanted \(1, 2, 2, 128\), got \(1, 1, 2, 128\); new_values: "):
        decode_attention(_struct(q.dtype, 1, 2, 8, 128), *rest)
    with pytest.raises(ValueError, match=r"lengths: wanted \(1,\), got \(2,\)"):
        decode_attention(q, *rest[:-2], _struct(jnp.int32, 2), rest[-1])


def test_says_what_it_does_not_take():
    def reason(scale=0.1, **changes):
        q, _, _, kv, *_ = Case((1,), **changes).arguments()
        return unsupported(q, kv, scale)

    assert reason() is None
    assert "head sizes (64, 128), got 80" in reason(head_dim=80)
    assert "multiples of 8, got 12" in reason(boosted=12)
    assert "got 256" in reason(tokens=32, group=8)
    assert "positive Python number" in reason(scale=-1.0)
    q, _, _, kv, *_ = Case((1,)).arguments()
    other = dataclasses.replace(kv, fmt=PageFormat(64, 128, 16, 2))
    assert "pages of 128 tokens, got 64" in unsupported(q, other, 0.1)
    mixed = dataclasses.replace(kv, ring_values=_struct(jnp.float16, *kv.ring_values.shape))
    assert "buffers of one dtype" in unsupported(q, mixed, 0.1)
    assert "takes q in bfloat16, float16, float32, got float64" in unsupported(_struct(np.float64, *q.shape), kv, 0.1)
    long = dataclasses.replace(kv, ring_values=_struct(jnp.bfloat16, 1, 2, 2**23, 128))
    assert "buffers below 4294967296 bytes" in unsupported(q, long, 0.1)


def test_a_value_has_no_truth():
    def emit(addresses, smem):
        if smem < 1:
            raise AssertionError("a branch was taken while the kernel was written")

    call = ptx.launch(emit, [_struct(jnp.float32, 8)], blocks=1, smem_bytes=16, name="untrue")
    with pytest.raises(TypeError, match="no truth while the kernel is written"):
        jax.jit(call).trace(jnp.zeros(8)).lower(lowering_platforms=("cuda",))


def test_named_kernel_without_a_gpu_is_an_error():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="not an NVIDIA GPU"):
        decode_attention(*Case((1,)).arguments(), implementation="mosaic")


@pytest.mark.parametrize(
    "work_items, pages, low, high",
    [
        (256, 256, 1, 8),
        (8, 1024, 33, 132),
        (2048, 64, 1, 1),
        (1, 0, 1, 1),
        (8, 4, 1, 1),
        (64, 8, 2, 2),
        (8, 32, 2, 2),
        (256, 32, 1, 1),
        (8, 33, 3, 9),
    ],
)
def test_splits_fill_the_device_and_no_more(work_items, pages, low, high):
    assert low <= choose_splits(work_items, pages, smem_bytes=54_000) <= high


@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_of_shared_memory_lie_apart(head_dim):
    fmt = PageFormat(head_dim=head_dim)
    smem = SharedMemory.of(fmt)
    ends = (4 * fmt.key_words, 4 * fmt.value_words, 18 * head_dim, 16)
    starts = (smem.key, smem.value, smem.scaled, smem.barriers, smem.warp_bytes)
    assert all(a + size <= b for a, size, b in zip(starts[:-1], ends, starts[1:], strict=True))
    assert not any(start % 16 for start in starts)


def test_shape_counts_blocks():
    shape = KernelShape.of(DecodeInputs(*Case((1, 2), tokens=3, group=5).arguments()), 0.1, splits=2)
    assert (shape.columns, shape.column_groups, shape.units) == (15, 2, 8)
    assert shape.blocks == 2 * 2 * 2 * 2
    assert KernelShape.of(DecodeInputs(*Case((1, 2)).arguments()), 0.1).splits == 2


NUMERIC = [
    Case(BOUNDARIES),
    Case(BOUNDARIES, splits=3),
    Case((5000, 900, 40, 4097), pages=40, splits=2),
    Case(BOUNDARIES, dtype="float16", splits=2),
    Case(BOUNDARIES, dtype="float32"),
    Case(BOUNDARIES, head_dim=64, boosted=8, kv_heads=3, group=3),
    Case(BOUNDARIES, sink=0, window=0, head_dim=64, boosted=0, splits=3),
    Case(BOUNDARIES, sink=7, window=300),
    Case((1500, 800, 130), sink=3, window=900, pages=12),
    Case((1000, 5), boosted=24),
    Case((1000, 5), boosted=128, value_bits=4, group=1),
    Case((1000, 5), head_dim=64, boosted=24, value_bits=4, splits=2),
    Case((700, 33), group=5, boosted=32),
    Case((700, 33), group=16, splits=2),
    Case((700, 300, 17), tokens=3, boosted=0),
    Case((700, 300, 17), tokens=8, num_new=(8, 3, 0), splits=2),
    Case((700, 300, 17), tokens=8, num_new=(8, 3, 0), splits=12),
    Case((700, 300, 17), tokens=20, num_new=(20, 17, 16)),
    Case((700, 33), key_scale=1e6, query_scale=1e-6),
    Case((700, 33), key_scale=1e-3, query_scale=1e3, value_scale=1e-2, value_bits=4),
    Case((700, 33), value_scale=1e6),
    Case((700, 33), query_scale=8.0, sharpness=4.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", NUMERIC, ids=str)
def test_matches_the_float32_reference(case):
    arguments = case.random()
    reference = functools.partial(decode_attention, scale=case.head_dim**-0.5, implementation="xla")
    want = np.asarray(jax.jit(reference)(*arguments), np.float64)
    got = np.asarray(jax.jit(case.kernel)(*arguments), np.float64)
    assert np.isfinite(got).all()
    real = np.arange(case.tokens) < np.asarray(arguments[-1])[:, None]
    error, size = (np.linalg.norm(x[real].reshape(real.sum(), -1), axis=-1) for x in (got - want, want))
    assert np.linalg.norm(error) / np.linalg.norm(size) < TOLERANCE * case.sharpness
    assert (error / size).max() < WORST_TOKEN * case.sharpness


@pytest.mark.gpu
@pytest.mark.parametrize("case", INSERTED, ids=str)
def test_inserting_kernel_equals_attention_and_insertion(case):
    arguments = case.random()
    out, kv = jax.jit(case.inserting_kernel)(*arguments)
    assert (np.asarray(out) == np.asarray(jax.jit(case.kernel)(*arguments))).all()
    _, want = decode_attention(*arguments, implementation="xla", insert=True)
    for name in BUFFERS:
        assert (np.asarray(getattr(kv, name)) == np.asarray(getattr(want, name))).all(), name


@pytest.mark.gpu
def test_same_bits_from_run_to_run():
    case = Case((5000, 900, 40, 4097), pages=40, splits=5)
    arguments = case.random()
    run = jax.jit(case.kernel)
    first = np.asarray(run(*arguments))
    for _ in range(5):
        assert (np.asarray(run(*arguments)) == first).all()


REGISTERS = """
import jax, jax.numpy as jnp
from tests.pallas_kernels.test_decode_attention_mgpu import Case
for case in (*(Case((1,), boosted=32, splits=splits) for splits in (1, 2, 4)), Case((1,), tokens=4)):
    jax.block_until_ready(jax.jit(case.kernel)(*jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), case.arguments())))
"""


@pytest.mark.gpu
def test_four_blocks_fit_a_multiprocessor():
    """With more than 128 registers a thread only three do. Only the assembler knows, and it comes with the GPU."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", REGISTERS], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = [int(x) for x in re.findall(r"Used (\d+) registers", done.stdout + done.stderr)]
    print(used)
    assert len(used) >= 5  # four kernels and a merge
    assert max(used) <= 128


@pytest.mark.gpu
def test_auto_takes_the_kernel_and_output_has_the_dtype_of_q():
    q, *rest = Case((700, 33)).random()
    q = q.astype(jnp.bfloat16)
    call = functools.partial(decode_attention, q, *rest)
    out = call(implementation="auto")
    assert out.dtype == jnp.bfloat16
    assert (out == call(implementation="mosaic")).all()
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(call(implementation="xla"), np.float32), atol=0.02, rtol=0.02
    )
