"""Projections that share their input as one parameter: query, key and value, and the MLP's gate and up.

A decode step then reads them with one product each. The numbers are the same in another order, and so is the split over
a mesh: qkv [K, Q + 2, D, E] by KV head, gate_up [2, F, E] by F. Checkpoints know the unfused layout alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from kitty_jax.models.decoder import Decoder, DecoderConfig
from kitty_jax.models.names import Path, abstract_model
from kitty_jax.models.sharding import param_sharding

# Fused layer -> the layers it is made of, in order.
PARTS = {("attn", "qkv"): ("q", "k", "v"), ("mlp", "gate_up"): ("gate", "up")}
_FUSED_OF = {(outer, part): name for (outer, name), parts in PARTS.items() for part in parts}


class Group(NamedTuple):
    """A fused parameter: its path, and those of its parts."""

    path: Path
    parts: tuple[Path, ...]


def fuse(model: Decoder) -> Decoder:
    """The model in the fused layout: the same object, changed in place block by block, each dropping its old arrays.

    So it needs the memory of the weights and of one block, if nothing else holds the weights (a FunctionalModel does).
    Parameters keep their mesh. A fused model is returned as it is.
    """
    return _convert(model, True)


def unfuse(model: Decoder) -> Decoder:
    """The model in the layout of checkpoints; the inverse of `fuse`, in place as well."""
    return _convert(model, False)


def group_of(path: Path) -> Group | None:
    """The fused parameter that an unfused model's parameter is part of, or None.

    ("layers", 0, "attn", "k", "bias") -> the path of "qkv" and those of "q", "k" and "v".
    """
    if len(path) < 3 or tuple(path[-3:-1]) not in _FUSED_OF:
        return None
    *before, outer, part, leaf = path
    name = _FUSED_OF[outer, part]
    return Group((*before, outer, name, leaf), tuple((*before, outer, p, leaf) for p in PARTS[outer, name]))


def fuse_arrays(config: DecoderConfig, path: Path, parts: tuple[jax.Array, ...]) -> jax.Array:
    """The parameter at a fused path from its parts: q [N D, E], k and v [K D, E] -> [K, Q + 2, D, E]; gate and up
    [F, E] -> [2, F, E]; biases the same without E."""
    return _compiled("fuse", path[-2], config.num_kv_heads, config.head_dim, _placement(parts[0], path))(*parts)


def unfuse_array(config: DecoderConfig, group: Group, array: jax.Array) -> tuple[jax.Array, ...]:
    """The inverse of `fuse_arrays`."""
    placements = tuple(_placement(array, path) for path in group.parts)
    return _compiled("unfuse", group.path[-2], config.num_kv_heads, config.head_dim, placements)(array)


def join_arrived(config: DecoderConfig, params: dict[Path, jax.Array], path: Path) -> None:
    """Once every part of the fused parameter that `path` belongs to is in `params`, puts it in their place."""
    group = group_of(path)
    if group is not None and all(part in params for part in group.parts):
        parts = tuple(params.pop(part) for part in group.parts)
        params[group.path] = jax.block_until_ready(fuse_arrays(config, group.path, parts))


def _placement(array: jax.Array, path: Path) -> NamedSharding | None:
    """Where the parameter at `path` lives if `array` is on a mesh; None leaves it to the compiler."""
    sharding = array.sharding
    return param_sharding(sharding.mesh, path, ()) if isinstance(sharding, NamedSharding) else None


@functools.cache  # one compilation for all layers
def _compiled(direction: str, name: str, num_kv_heads: int, head_dim: int, out_shardings: Any) -> Callable:
    function = {"fuse": {"qkv": _join, "gate_up": _stack}, "unfuse": {"qkv": _part, "gate_up": _unstack}}[direction]
    return jax.jit(functools.partial(function[name], num_kv_heads, head_dim), out_shardings=out_shardings)


def _join(num_kv_heads: int, head_dim: int, *parts: jax.Array) -> jax.Array:
    return jnp.concatenate([x.reshape(num_kv_heads, -1, head_dim, *x.shape[1:]) for x in parts], axis=1)


def _part(num_kv_heads: int, head_dim: int, x: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(y.reshape(-1, *x.shape[3:]) for y in (x[:, :-2], x[:, -2], x[:, -1]))


def _stack(num_kv_heads: int, head_dim: int, *parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


def _unstack(num_kv_heads: int, head_dim: int, x: jax.Array) -> tuple[jax.Array, ...]:
    return x[0], x[1]


def _convert(model: Decoder, fused: bool) -> Decoder:
    if model.config.fused == fused:
        return model
    config = dataclasses.replace(model.config, fused=fused)
    # The blocks are all alike: one without arrays is the mould of the new ones.
    small = dataclasses.replace(config, num_layers=1)
    graphdef, mould = nnx.split(abstract_model(small).layers[0])
    mould = nnx.to_flat_state(mould)
    for index in range(config.num_layers):
        here = ("layers", index)
        old = nnx.to_flat_state(nnx.state(model.layers[index], nnx.Param))
        old = {(*here, *path): leaf.get_value() for path, leaf in old}
        new = (_fuse_block if fused else _unfuse_block)(config, old)
        del old
        # Waits, or the old arrays of many blocks would be kept for copies still to come.
        leaves = [(path, leaf.replace(jax.block_until_ready(new[*here, *path]))) for path, leaf in mould]
        model.layers[index] = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    model.config = config
    return model


def _fuse_block(config: DecoderConfig, old: dict[Path, jax.Array]) -> dict[Path, jax.Array]:
    new = {}
    for path, array in old.items():
        group = group_of(path)
        if group is None:
            new[path] = array
        elif path == group.parts[0]:
            new[group.path] = fuse_arrays(config, group.path, tuple(old[part] for part in group.parts))
    return new


def _unfuse_block(config: DecoderConfig, old: dict[Path, jax.Array]) -> dict[Path, jax.Array]:
    new = {}
    for path, array in old.items():
        *before, outer, name, leaf = path
        parts = PARTS.get((outer, name))
        if parts is None:
            new[path] = array
            continue
        group = group_of((*before, outer, parts[0], leaf))
        new.update(zip(group.parts, unfuse_array(config, group, array), strict=True))
    return new
