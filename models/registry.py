"""From a name, a config.json, or arrays to a decoder: the one place that knows all families."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kitty_jax.models import hf_config, llama3, qwen3
from kitty_jax.models.config_values import checked
from kitty_jax.models.decoder import Decoder, DecoderConfig
from kitty_jax.models.params import abstract_params, model_from_params, param_count, params_of
from kitty_jax.models.sharding import param_shardings, partition_spec

_FAMILIES = {family.model_type: family for family in (qwen3.QWEN3, qwen3.QWEN2, llama3.LLAMA)}

CONFIGS: dict[str, Callable[[], DecoderConfig]] = {
    "qwen3-0.6b": qwen3.qwen3_0_6b,
    "qwen3-1.7b": qwen3.qwen3_1_7b,
    "qwen3-4b": qwen3.qwen3_4b,
    "qwen3-8b": qwen3.qwen3_8b,
    "qwen3-14b": qwen3.qwen3_14b,
    "qwen3-32b": qwen3.qwen3_32b,
    "qwen2.5-0.5b": qwen3.qwen2_5_0_5b,
    "qwen2.5-1.5b": qwen3.qwen2_5_1_5b,
    "qwen2.5-7b": qwen3.qwen2_5_7b,
    "llama3-8b": llama3.llama3_8b,
    "llama3-70b": llama3.llama3_70b,
    "llama3.1-8b": llama3.llama3_1_8b,
    "llama3.2-1b": llama3.llama3_2_1b,
    "llama3.2-3b": llama3.llama3_2_3b,
    "llama3.3-70b": llama3.llama3_3_70b,
    "smollm2-135m": llama3.smollm2_135m,
}
CONFIG_NAMES = tuple(CONFIGS)

BLOCK_ELEMENTS = 2**24  # random numbers drawn at a time

__all__ = [
    "CONFIGS",
    "CONFIG_NAMES",
    "abstract_params",
    "config_from_hf",
    "config_from_name",
    "config_to_hf",
    "model_from_params",
    "param_count",
    "params_of",
    "random_model",
]


def config_from_name(name: str) -> DecoderConfig:
    """One of CONFIG_NAMES -> its configuration, in bfloat16."""
    if name not in CONFIGS:
        raise ValueError(f"no configuration is named {name!r}; known names: {', '.join(CONFIG_NAMES)}")
    return CONFIGS[name]()


def config_from_hf(config: Mapping[str, Any], *, dtype=None, ignore: Collection[str] = ()) -> DecoderConfig:
    """A Hugging Face config.json as a dict -> DecoderConfig.

    dtype: None takes the file's, or bfloat16 where it states none. ignore: keys to drop unread. Raises a ValueError
    that names the known architectures, or everything in the file that is unsupported, unknown or missing.
    """
    problems: list[str] = []
    kind = checked(config, "model_type", "string", problems)
    stated = checked(config, "architectures", "strings", problems) or []
    known = {family.architecture: family for family in _FAMILIES.values()}
    by_architecture = [known[name] for name in stated if name in known]
    family = _FAMILIES.get(kind)
    if kind is None and by_architecture:
        family = by_architecture[0]
    # A reward model or an embedding model has the right model_type and the wrong head.
    if family is None or (stated and family not in by_architecture):
        problems.append(
            f"architecture {stated} with model_type {kind!r} is not supported; supported:"
            f" {', '.join(f'{f.architecture} (model_type {f.model_type!r})' for f in _FAMILIES.values())}"
        )
        raise ValueError("; ".join(problems))
    return hf_config.read(family, config, dtype, ignore)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """DecoderConfig -> the dict of a config.json that config_from_hf reads back as an equal configuration."""
    return hf_config.write(_FAMILIES[config.family], config)


def random_model(config: DecoderConfig, seed: int = 0, mesh: Mesh | None = None) -> Decoder:
    """A decoder with random weights, made leaf by leaf on the devices (sharded over the mesh, if given).

    Leaves of one shape share a compiled function, and a large one is made in blocks: drawing random numbers takes
    several times their float32 size, which for a whole embedding would be gigabytes.
    Matrices are normal with variance 1 / inputs, so activations keep their size; norms are near 1 and biases near 0,
    and neither exactly. The same seed gives the same weights on any mesh.
    """
    shardings = None if mesh is None else param_shardings(mesh, config)
    key = jax.random.key(seed)
    params = {}
    for index, (path, leaf) in enumerate(abstract_params(config).items()):
        sharding = None if shardings is None else shardings[path]
        kind = "matrix" if leaf.ndim > 1 and path[-1] == "weight" else path[-1]
        whole = [axis for axis, name in enumerate(partition_spec(path)) if name is None]
        make = _initializer(kind, leaf.shape, leaf.dtype, sharding, whole[-1] if whole else None)
        params[path] = make(jax.random.fold_in(key, index))
    return model_from_params(config, params)


@functools.cache  # one compilation for all leaves of one shape
def _initializer(
    kind: str, shape: tuple[int, ...], dtype, sharding, axis: int | None
) -> Callable[[jax.Array], jax.Array]:
    """axis: one along which a leaf may be made block by block; on a mesh it must be whole, or blocks would move."""
    center, spread = {"matrix": (0.0, shape[-1] ** -0.5), "weight": (1.0, 0.1), "bias": (0.0, 0.1)}[kind]

    def numbers(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (center + spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def make(key: jax.Array) -> jax.Array:
        blocks = 1 if axis is None else _blocks(math.prod(shape), shape[axis])
        if blocks == 1:
            return numbers(key, shape)
        width = shape[axis] // blocks
        block = (*shape[:axis], width, *shape[axis + 1 :])

        def fill(i: jax.Array, leaf: jax.Array) -> jax.Array:
            made = numbers(jax.random.fold_in(key, i), block)
            return jax.lax.dynamic_update_slice_in_dim(leaf, made, i * width, axis)

        return jax.lax.fori_loop(0, blocks, fill, jnp.zeros(shape, dtype))

    return jax.jit(make, out_shardings=sharding)


def _blocks(elements: int, length: int) -> int:
    """Fewest equal blocks along an axis of `length` that hold BLOCK_ELEMENTS at most, or `length`."""
    fits = (n for n in range(1, length) if length % n == 0 and elements // n <= BLOCK_ELEMENTS)
    return next(fits, length)
