"""scripts/bench_state.py and bench_mesh.py: a random cache on one device and on several, and steps over it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.state import init_state, nbytes
from kitty_jax.cache.steps import decode_step, functional
from kitty_jax.models.registry import config_from_name, config_to_hf, random_model
from kitty_jax.models.sharding import make_mesh
from kitty_jax.pallas_kernels.page_format import split_record
from scripts import bench_mesh
from scripts.bench_state import random_state

SIZES = {"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 64}
TINY = dataclasses.replace(config_from_name("qwen3-0.6b"), num_layers=2, **SIZES)


def _check(name: str, mesh) -> None:
    def make():
        return init_state(name, TINY, batch=2, capacity=500, mesh=mesh)

    made, real = random_state(make), jax.jit(make)()
    assert jax.tree.structure(made) == jax.tree.structure(real)
    assert nbytes(made) == nbytes(real)
    assert jnp.array_equal(made.page_table, real.page_table)
    for layer in made.layers:
        for x in (np.asarray(leaf) for leaf in jax.tree.leaves(layer) if leaf.size):
            assert x.dtype == np.uint32 or np.isfinite(x.astype(np.float32)).all()
            assert (x != 0).mean() > 0.9
        if name != "full":
            scales = np.asarray(split_record(layer.kv.key_pages, layer.kv.fmt.key_parts)["scale"])
            assert ((scales > 0) & (scales < 10)).all()
    for got, wanted in zip(jax.tree.leaves(made.layers), jax.tree.leaves(real.layers), strict=True):
        assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)


@pytest.mark.parametrize("name", ["full", "kivi2", "kitty_pro", "kitty_plus"])
def test_a_random_state_is_a_sane_state(name) -> None:
    _check(name, None)


@pytest.mark.parametrize("name", ["full", "kitty_plus"])
def test_a_random_state_on_a_mesh(name) -> None:
    _check(name, make_mesh(2, 2, jax.devices()[:4]))


def test_a_step_over_it() -> None:
    state = random_state(lambda: init_state("kitty", TINY, batch=2, capacity=500))
    state = dataclasses.replace(state, lengths=jnp.full(2, 300, jnp.int32))
    logits, state = jax.jit(decode_step)(functional(random_model(TINY)), state, jnp.zeros(2, jnp.int32))
    assert bool(jnp.isfinite(logits).all())
    assert state.lengths.tolist() == [301, 301]


@pytest.mark.slow
def test_bench_mesh(tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_hf(TINY)))
    options = f"--model-shape {path} --layers 1 --batch 2 --length 300 --steps 2 --repeats 2 --ways 1,2"
    assert bench_mesh.main(options.split()) == 0
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["devices"], two["devices"], one["speedup"]) == (1, 2, 1)
    assert two["speedup"] == pytest.approx(one["us"] / two["us"])
    with pytest.raises(SystemExit, match="99 devices asked for"):
        bench_mesh.main([*options.split()[:-1], "99"])
