"""Random caches on one device and on several, steps over them (scripts/bench_mesh.py), and the spread of samples."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.state import init_state, nbytes
from kitty_jax.models.sharding import make_mesh
from kitty_jax.pallas_kernels.page_format import split_record
from scripts import bench_mesh
from scripts.bench_data import random_state
from scripts.bench_timing import Time
from tests.scripts.tiny_shape import TINY, error_of, write_shape


@pytest.mark.parametrize("name, ways", [("kitty_plus", 1), ("full", 2), ("kitty_plus", 2)])
def test_a_random_state_is_a_sane_state(name, ways) -> None:
    mesh = make_mesh(2, 2, jax.devices()[:4]) if ways == 2 else None

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


def test_the_spread_of_samples() -> None:
    assert Time.of([3, 1, 2]) == (2, 1, 3)
    assert Time.of(iter([4, 1])) == (2.5, 1, 4)


@pytest.mark.slow
def test_bench_mesh(tmp_path, capsys) -> None:
    options = f"--model-shape {write_shape(tmp_path)} --layers 1 --batch 2 --length 300 --steps 2 --repeats 2 --ways "
    assert bench_mesh.main(f"{options} 1,2".split()) == 0
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["devices"], two["devices"], one["speedup"]) == (1, 2, 1)
    assert two["speedup"] == pytest.approx(one["us"] / two["us"])
    assert "99 devices asked for" in error_of(bench_mesh.main, f"{options} 99", capsys)
