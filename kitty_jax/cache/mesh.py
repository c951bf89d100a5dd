"""Where arrays of a batch live on a mesh: sequences and pages over "data", KV heads over "model"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def partition_specs(tree: Any, heads: int | None = None) -> Any:
    """A ``PartitionSpec`` for every array: the first axis over "data", axis ``heads``, where given, over "model"."""

    def spec(x) -> PartitionSpec:
        axes = ["data", *[None] * (x.ndim - 1)]
        if heads is not None:
            axes[heads] = "model"
        return PartitionSpec(*axes)

    return jax.tree.map(spec, tree)


def constrain_to(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """The arrays of ``tree``, split over the mesh as ``specs`` says."""
    return jax.tree.map(lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs)


def on_mesh(mesh: Mesh | None, function: Callable, arguments: tuple, in_specs: tuple, out_specs: Any) -> Any:
    """``function(*arguments)``; on a mesh each device runs it on its own part, by itself (``shard_map``)."""
    if mesh is None:
        return function(*arguments)
    # Loops of the function run as long as their own part needs, which the check of replication cannot follow.
    split = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return split(*arguments)


def to_host(tree: Any) -> Any:
    """The arrays as numpy arrays. Where other hosts hold a part of them every host must call this, and gets all."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
