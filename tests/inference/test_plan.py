"""The memory plan: what is planned is what is allocated, and what fits is what fits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from kitty_jax.cache.config import CACHE_NAMES, CacheConfig
from kitty_jax.cache.state import KVShape, init_state, nbytes
from kitty_jax.inference.memory import format_bytes
from kitty_jax.inference.memory_plan import KVPlan, cache_bytes
from scripts.model_shapes import read_shape, weight_shapes

TINY = KVShape(2, 4, 32, jnp.dtype(jnp.bfloat16))
QWEN3_8B = KVShape(36, 8, 128)
LLAMA3_70B = KVShape(80, 8, 128)
GB = 10**9


def held(state) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_the_plan_is_what_a_state_holds(name) -> None:
    plan = KVPlan.for_batch(TINY, name, batch=3, length=700)
    state = init_state(name, TINY, batch=3, capacity=700)
    assert plan.parts == nbytes(state)
    assert plan.parts["total"] == held(state) == cache_bytes(name, TINY, batch=3, capacity=700).total
    assert plan.per_sequence == nbytes(init_state(name, TINY, batch=1, capacity=700))
    if name != "full":
        small = KVPlan.for_batch(TINY, name, batch=3, length=700, pool_pages=7).parts["total"]
        assert small == held(init_state(name, TINY, batch=3, capacity=700, pool_pages=7)) < plan.parts["total"]
        assert small == cache_bytes(name, TINY, batch=3, capacity=700, pool_pages=7).total


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_big_states_by_their_shapes(name) -> None:
    plan = KVPlan.for_budget(QWEN3_8B, name, length=8192, budget=80 * GB, weights=16 * GB)
    state = jax.eval_shape(lambda: init_state(name, QWEN3_8B, batch=plan.batch, capacity=8192))
    assert plan.parts == nbytes(state)
    assert plan.parts["total"] <= 56 * GB == plan.room
    more = jax.eval_shape(lambda: init_state(name, QWEN3_8B, batch=plan.batch + 1, capacity=8192))
    assert nbytes(more)["total"] > 56 * GB


def test_layers_may_differ() -> None:
    caches = [CacheConfig.full(), CacheConfig.kitty(window=64)]
    plan = KVPlan.for_batch(TINY, caches, batch=2, length=500)
    assert plan.parts == nbytes(init_state(caches, TINY, batch=2, capacity=500))


@pytest.mark.parametrize("name", ["full", "kivi2", "kitty_pro"])
def test_the_greatest_length_and_not_one_token_more(name) -> None:
    budget = 3_000_000
    plan = KVPlan.for_budget(TINY, name, batch=5, budget=budget, workspace=1000)
    assert held(init_state(name, TINY, batch=5, capacity=plan.length)) + 1000 <= budget
    assert held(init_state(name, TINY, batch=5, capacity=plan.length + 1)) + 1000 > budget
    assert plan.free >= 0


@pytest.mark.parametrize("length", [20, 150, 700])
def test_the_largest_batch_and_not_one_sequence_more(length) -> None:
    budget = 2_000_000
    plan = KVPlan.for_budget(TINY, "kitty", length=length, budget=budget, reserve=0.25)
    assert plan.workspace == 500_000
    assert held(init_state("kitty", TINY, batch=plan.batch, capacity=length)) <= 1_500_000
    assert held(init_state("kitty", TINY, batch=plan.batch + 1, capacity=length)) > 1_500_000


def test_the_papers_example() -> None:
    """32 requests of 128k tokens of a LLaMA3-70B: 1.2 TB in 16 bits (binary terabytes)."""
    plan = KVPlan.for_requests(LLAMA3_70B, "full", [128_000] * 32)
    assert plan.parts["full_precision"] == 80 * 8 * 128 * 2 * 2 * 128_000 * 32
    assert plan.total / 2**40 == pytest.approx(1.22, abs=0.01)
    assert plan.ratio == pytest.approx(1, abs=1e-6)
    assert KVPlan.for_requests(LLAMA3_70B, "kitty_pro", [128_000] * 32).ratio == pytest.approx(6.3, abs=0.01)


def test_requests_share_a_pool_of_what_they_need() -> None:
    lengths = [32 + 128, 32 + 127, 32 + 5 * 128 + 1, 1]
    plan = KVPlan.for_requests(TINY, "kitty", lengths)
    assert (plan.batch, plan.length, plan.pool_pages, plan.tokens) == (4, 673, 1 + 0 + 5 + 0, sum(lengths))
    assert plan.parts["total"] == held(init_state("kitty", TINY, batch=4, capacity=673, pool_pages=6))
    # Two places of two requests: the first needs 3 + 2 pages, the second 1 + 0, and both get what the first needs.
    split = KVPlan.for_requests(TINY, "kitty", np.array([32 + 384, 32 + 256, 32 + 128, 32]), data=2)
    assert (split.batch, split.pool_pages) == (4, 2 * 5)
    alike = KVPlan.for_requests(TINY, "kitty", [300] * 4)
    assert alike.parts == KVPlan.for_batch(TINY, "kitty", batch=4, length=300).parts


@pytest.mark.parametrize(
    "name, pool_pages", [("full", None), ("kitty_pro", None), ("kitty_plus", None), ("kitty_pro", 6)]
)
def test_a_mesh_holds_what_was_planned_on_every_device(name, pool_pages) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plan = KVPlan.for_batch(TINY, name, batch=6, length=500, pool_pages=pool_pages, data=2, model=4)
    state = jax.jit(lambda: init_state(name, TINY, batch=6, capacity=500, pool_pages=pool_pages, mesh=mesh))()
    for device in mesh.devices.flat:
        shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == device]
        assert sum(s.data.nbytes for s in shards) == plan.parts["total"]


def test_channel_lists_of_each_head_on_a_mesh() -> None:
    config = CacheConfig.kitty(selection=tuple(tuple(range(h, h + 4)) for h in range(4)))
    plan = KVPlan.for_batch(TINY, config, batch=2, length=500, model=2)
    half = KVShape(2, 2, 32, TINY.dtype)
    assert plan.parts == nbytes(init_state("kitty", half, batch=2, capacity=500))


def test_a_mesh_multiplies_the_batch() -> None:
    one = KVPlan.for_budget(QWEN3_8B, "kitty", length=8192, budget=80 * GB)
    two = KVPlan.for_budget(QWEN3_8B, "kitty", length=8192, budget=80 * GB, data=2)
    assert two.batch == 2 * one.batch
    assert two.parts == one.parts
    split = KVPlan.for_budget(QWEN3_8B, "kitty", length=8192, budget=80 * GB, weights=16 * GB, model=2)
    assert split.weights == 8 * GB
    assert split.batch > 2 * one.batch * 0.85


def test_weights_are_counted() -> None:
    config = read_shape("qwen3-8b")
    arrays = {"a": jnp.zeros((3, 5), jnp.bfloat16), "b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    assert KVPlan.for_batch(TINY, "full", batch=1, length=1, weights=arrays).weights == 30 + 28
    assert KVPlan.for_batch(TINY, "full", batch=1, length=1, weights=weight_shapes(config)).weights == 16_381_470_720
    # What has no sharding is divided by `model`, rounded up; what has one counts as its own shard says.
    assert KVPlan.for_batch(TINY, "full", batch=1, length=1, weights=arrays, model=4).weights == 15
    sharding = NamedSharding(AbstractMesh((2, 4), ("data", "model")), PartitionSpec(None, "model"))
    arrays["c"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    assert KVPlan.for_batch(TINY, "full", batch=1, length=1, weights=arrays, model=4).weights == 15 + 8 * 4
    # On a mesh every matrix is divided; norms are whole on each device.
    norms = 36 * (2 * 4096 + 2 * 128) * 2 + 4096 * 2
    split = KVPlan.for_batch(QWEN3_8B, "full", batch=1, length=1, weights=weight_shapes(config, 1, 4), model=4)
    assert split.weights == (16_381_470_720 - norms) // 4 + norms


def test_numpy_numbers_are_as_good_as_any() -> None:
    for kind in (int, np.int64, np.uint64, np.array):
        assert KVPlan.for_batch(TINY, "full", batch=1, length=1, weights=kind(16 * GB), model=2).weights == 8 * GB
    n = np.int64
    options = {"budget": n(10**7), "weights": n(1000), "data": n(2), "model": n(2), "reserve": np.float32(0.25)}
    plans = [
        KVPlan.for_batch(TINY, "kitty", batch=n(2), length=n(300), pool_pages=n(2), **options),
        KVPlan.for_budget(TINY, "kitty", length=n(300), **options),
        KVPlan.for_budget(TINY, "kitty", batch=n(2), **options),
        KVPlan.for_requests(TINY, "kitty", n([300, 500]), **options),
    ]
    for plan in plans:
        assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
        assert plan.workspace == 2_500_000


@pytest.mark.parametrize("lengths", [5, None, np.array(5)])
def test_requests_are_a_sequence(lengths) -> None:
    with pytest.raises(ValueError, match=r"lengths must be a sequence .* a single one is \[tokens\]"):
        KVPlan.for_requests(TINY, "kitty", lengths)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weights": 16 * GB, "budget": 10 * GB, "length": 10}, r"10\.00 GB leaves nothing .* 16\.00 GB .* 17\.78 GB"),
        (
            {"weights": 16 * GB, "budget": 17 * GB, "length": 8192, "workspace": 0},
            r"leaves 1\.00 GB .* 207\.96 MB",
        ),
        ({"budget": GB, "batch": 10**6}, "or shorter or fewer sequences"),
        ({"budget": GB}, "either a length, for the largest batch, or a batch"),
        ({"budget": GB, "length": 10, "batch": 10}, "either a length, for the largest batch, or a batch"),
        ({"budget": 0, "length": 10}, "budget .bytes of one device. must be a whole number"),
        ({"budget": 1.5, "length": 10}, "budget .bytes of one device. must be a whole number"),
        ({"budget": GB, "length": 0}, "length must be a whole number"),
        ({"budget": GB, "length": 10, "reserve": 1.0}, "from 0 up to but not 1, got 1.0"),
        ({"budget": GB, "length": 10, "reserve": "0.1"}, "a number from 0 up to but not 1, got '0.1'"),
        ({"budget": GB, "length": 10, "reserve": float("nan")}, "a number from 0 up to but not 1, got nan"),
        ({"budget": GB, "length": 10, "reserve": True}, "a number from 0 up to but not 1, got True"),
        (
            {"budget": GB, "length": 10, "reserve": 0.5, "workspace": 7},
            "the fraction or the bytes, got reserve=0.5 and workspace=7",
        ),
        ({"budget": GB, "length": 10, "weights": -1}, "weights .bytes. must be"),
        ({"budget": GB, "length": 10, "weights": np.float64(1.5)}, "weights .bytes. must be"),
        ({"budget": GB, "length": 10, "weights": [16 * GB]}, r"number of bytes, .*; got 16000000000 at \[0\]"),
        ({"budget": GB, "length": 10, "weights": {"w": np.int64(7)}}, r"number of bytes, .*; got np.int64\(7\) at"),
        ({"budget": GB, "length": 10, "weights": "16GB"}, "number of bytes, .*; got '16GB'$"),
        ({"budget": GB, "length": 10, "model": 3}, "8 KV heads cannot be split over a 'model' axis of 3"),
        ({"budget": GB, "batch": 3, "data": 2}, "batch must be a multiple of the mesh's 2 'data' places, got 3"),
    ],
)
def test_errors_say_what_is_needed(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        KVPlan.for_budget(QWEN3_8B, "full", **options)


def test_a_budget_just_above_what_the_error_names_is_enough() -> None:
    with pytest.raises(ValueError, match="give more than"):
        KVPlan.for_budget(TINY, "full", length=1, budget=1000, weights=9000)
    assert KVPlan.for_budget(TINY, "full", length=1, budget=10_000 + 2000, weights=9000).batch >= 1


def test_it_reads_well_and_knows_when_it_does_not_fit() -> None:
    plan = KVPlan.for_batch(QWEN3_8B, "kitty_pro", batch=400, length=8192, budget=80 * GB, weights=16 * GB)
    assert not plan.fits
    text = str(plan)
    assert "400 sequences of up to 8,192 tokens" in text
    assert "5.49 times less than 483.18 GB" in text
    assert "missing" in text
    assert "free" not in text
    rows = {line[:18].strip(): line[18:].strip() for line in text.splitlines()[2:]}
    assert rows["cache"] == "87.99 GB"
    assert rows["missing"] == format_bytes(plan.parts["total"] - 56 * GB)
    assert json.loads(json.dumps(plan.to_json()))["parts"] == plan.parts
