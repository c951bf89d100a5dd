"""Several devices: the sharded cache and generation equal those of one device."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.state import KVShape, init_state, nbytes
from kitty_jax.inference.engine import Engine
from kitty_jax.inference.generate import generate, prepare
from kitty_jax.inference.sampling import Sampling
from kitty_jax.inference.scheduler import Scheduler
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.sharding import make_mesh
from tests.inference.generate_cases import small_cache

SIZES = {"vocab_size": 96, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CONFIG = dataclasses.replace(config_from_name("qwen3-0.6b"), num_layers=1, dtype=jnp.float32, **SIZES)
PROMPTS = [np.random.default_rng(i).integers(0, 96, n).tolist() for i, n in enumerate((70, 3, 41))]
SAMPLER = Sampling(temperature=1.2)
LISTS = ((0, 5), (3, 9))  # two boosted channels, another pair for each KV head


CACHES = {
    "full": small_cache("full"),
    "kitty_pro": small_cache("kitty_pro"),
    "kitty_plus": small_cache("kitty_plus"),
    "random": dataclasses.replace(small_cache("kitty_pro"), selection="random"),
    "lists": dataclasses.replace(small_cache("kitty"), selection=LISTS),
}


QUICK = {("full", 2), ("kitty_pro", 2)}  # compilations take most of the time


@pytest.mark.parametrize(
    "name, data, model",
    [
        pytest.param(name, data, 2, marks=[] if (name, data) in QUICK else pytest.mark.slow)
        for name in CACHES
        for data in (1, 2)
        if data == 1 or name not in ("random", "lists")  # splitting sequences does not touch the choice of channels
    ],
)
def test_sharded_generation_equals_one_device(name, data, model):
    """Three prompts on two places of "data": a padding sequence is added, and nothing of it is seen."""
    mesh = make_mesh(data, model, jax.devices()[: data * model])
    options = {"cache": CACHES[name], "max_new_tokens": 40, "capacity": 128, "seed": 3}
    options |= {"sampler": SAMPLER}
    pool = 24 if (name, data) == ("kitty_pro", 2) else None
    wanted = generate(random_model(CONFIG), PROMPTS, **options)
    got = generate(random_model(CONFIG, mesh=mesh), PROMPTS, mesh=mesh, keep_state=True, pool_pages=pool, **options)
    assert got.sequences() == wanted.sequences()
    assert got.tokens.shape == (3, 40)
    assert len({tuple(row) for row in got.sequences()}) == 3
    layer = got.state.layers[0]
    parts = layer.keys if name == "full" else layer.kv.key_pages
    assert len({s.index for s in parts.addressable_shards}) == data * model  # every device holds a part of its own
    assert sum(s.data.nbytes for s in parts.addressable_shards) == parts.nbytes
    if pool:  # each place hands out its own half of the pages
        pages = [max(n - 4, 0) // 16 for n in got.state.lengths.tolist()]
        assert got.state.pool.num_free.tolist() == [12 - pages[0] - pages[1], 12 - pages[2] - pages[3]]
        table = np.asarray(got.state.page_table)
        for group in (table[:2], table[2:]):
            ids = group[group >= 0]
            assert len(set(ids.tolist())) == len(ids)
            assert ids.max(initial=0) < 12


def test_the_engine_on_a_mesh_gives_what_each_request_gets_alone(monkeypatch):
    """Two places of two slots and six pages; prompts in parts, sampled, and preempted where the pages run out."""
    preempted, original = [], Scheduler._preempt

    def record(self, group, refused):
        preempted.extend(rows := original(self, group, refused))
        return rows

    monkeypatch.setattr(Scheduler, "_preempt", record)
    prompts = [np.random.default_rng(i).integers(0, 96, n).tolist() for i, n in enumerate((70, 20, 20, 20, 20, 3))]
    options = {"cache": small_cache("kitty_pro"), "capacity": 128, "sampler": SAMPLER, "prefill_tokens": 64}
    one = random_model(CONFIG)
    wanted = [generate(one, [p], seed=i, max_new_tokens=40, **options).sequences()[0] for i, p in enumerate(prompts)]
    mesh = make_mesh(2, 2, jax.devices()[:4])
    some = Engine(random_model(CONFIG, mesh=mesh), slots=4, pool_pages=14, overcommit=True, mesh=mesh, **options)
    assert [result.tokens for result in some.run(prompts, max_new_tokens=40)] == wanted
    assert some.state.pool.num_free.tolist() == [7, 7]
    assert preempted


def _moved(text: str) -> list[int]:
    """Elements of each array that a collective of compiled HLO makes."""
    made = re.findall(r"= (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)", text)
    shapes = [shape for types in made for shape in re.findall(r"[a-z]+[0-9]+\[([0-9,]*)\]", types)]
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


def test_a_step_gathers_no_cache():
    """Attention and stores need no exchange: no collective of the compiled loop makes an array as large as a device's
    own part of a pool or a ring, and no pool is copied."""
    mesh = make_mesh(2, 2, jax.devices()[:4])
    model = random_model(CONFIG, mesh=mesh)
    generation = prepare(model, PROMPTS, cache=small_cache("kitty_pro"), max_new_tokens=9, capacity=512, mesh=mesh)
    run = generation.programs.empty(generation.seeds)()
    call = generation.programs.advance(run, np.full(4, 9, np.int32))
    text = call.func.lower(*call.args, **call.keywords).compile().as_text()
    kv = run.cache.layers[0].kv
    local = [x.addressable_shards[0].data for x in (kv.key_pages, kv.value_pages, kv.ring_values)]
    moved = _moved(text)
    assert moved  # the products of the model need some
    assert max(moved) < min(x.size for x in local)
    shape = f"u32[{','.join(map(str, local[0].shape))}]"
    assert shape in text
    assert [line for line in text.splitlines() if shape in line.split(" copy(")[0] and " copy(" in line] == []


def test_a_gathered_pool_would_be_found():
    mesh = make_mesh(1, 2, jax.devices()[:2])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    pool = jax.device_put(jnp.zeros((64, 7), jnp.uint32), split)
    assert max(_moved(jax.jit(lambda x: x, out_shardings=whole).lower(pool).compile().as_text())) == pool.size


def test_bytes_are_divided():
    mesh = make_mesh(2, 2, jax.devices()[:4])
    make = jax.jit(lambda: init_state(CacheConfig.kitty(), KVShape(1, 2, 64), batch=4, capacity=300, mesh=mesh))
    state = make()
    for x in jax.tree.leaves(state.layers):
        assert x.addressable_shards[0].data.nbytes * 4 == x.nbytes
    assert nbytes(state)["total"] == sum(x.nbytes for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": 3}, "multiple of the mesh's 2 'data' places, got 3"),
        ({"pool_pages": 5}, "pool_pages must be a multiple"),
        ({"heads": 3}, "3 KV heads cannot be split over a 'model' axis of 2"),
    ],
)
def test_sizes_that_do_not_divide(changes, message):
    mesh = make_mesh(2, 2, jax.devices()[:4])
    shape = KVShape(1, changes.pop("heads", 2), 64)
    with pytest.raises(ValueError, match=message):
        init_state("kitty", shape, **{"batch": 4, "capacity": 300, "mesh": mesh, **changes})


def test_meshes_that_are_refused():
    with pytest.raises(ValueError, match="one place on 'data', got 2"):
        prepare(random_model(CONFIG), PROMPTS, max_new_tokens=3, samples=2, mesh=make_mesh(2, 1, jax.devices()[:2]))
    with pytest.raises(ValueError, match="make_mesh"):
        prepare(random_model(CONFIG), PROMPTS, max_new_tokens=3, mesh=jax.make_mesh((2,), ("x",)))
    options = {"capacity": 96, "cache": "kitty_pro", "mesh": make_mesh(2, 1, jax.devices()[:2])}
    with pytest.raises(ValueError, match="slots must be a multiple of the mesh's 2 'data' places, got 3"):
        Engine(random_model(CONFIG), slots=3, **options)
    small = Engine(random_model(CONFIG), slots=4, **options | {"cache": small_cache("kitty_pro")}, pool_pages=8)
    with pytest.raises(ValueError, match="pool has 4 at each of the mesh's 2 'data' places; raise pool_pages to 10"):
        small.run([[1] * 60], max_new_tokens=30)
