"""A decoder's parameters by path, and where each tensor of a Hugging Face checkpoint lies in them.

A path is a tuple such as ("layers", 0, "attn", "qkv", "weight"). No tensor is transposed, and several
may share a parameter.
"""

import functools
import math
import re
from collections.abc import Mapping
from types import EllipsisType
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from kitty_jax.models.decoder import Decoder, DecoderConfig

Path = tuple[str | int, ...]
Index = tuple[int | slice | EllipsisType, ...]

# Module that has a parameter -> the Hugging Face modules whose tensors it holds, each with its index in the parameter.
# qkv [K, Q + 2, D, ...] and gate_up [2, F, E] hold several, every other parameter is one tensor. {i} is the layer.
TENSORS: dict[str, dict[str, Index]] = {
    "embed": {"model.embed_tokens": (...,)},
    "layers/{i}/input_norm": {"model.layers.{i}.input_layernorm": (...,)},
    "layers/{i}/attn/qkv": {
        "model.layers.{i}.self_attn.q_proj": (slice(None), slice(None, -2)),
        "model.layers.{i}.self_attn.k_proj": (slice(None), -2),
        "model.layers.{i}.self_attn.v_proj": (slice(None), -1),
    },
    "layers/{i}/attn/q_norm": {"model.layers.{i}.self_attn.q_norm": (...,)},
    "layers/{i}/attn/k_norm": {"model.layers.{i}.self_attn.k_norm": (...,)},
    "layers/{i}/attn/o": {"model.layers.{i}.self_attn.o_proj": (...,)},
    "layers/{i}/post_norm": {"model.layers.{i}.post_attention_layernorm": (...,)},
    "layers/{i}/mlp/gate_up": {"model.layers.{i}.mlp.gate_proj": (0,), "model.layers.{i}.mlp.up_proj": (1,)},
    "layers/{i}/mlp/down": {"model.layers.{i}.mlp.down_proj": (...,)},
    "norm": {"model.norm": (...,)},
    "head": {"lm_head": (...,)},
}
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Target(NamedTuple):
    """Where a checkpoint tensor goes: params[path][index], with its dimensions flattened to `shape`, the tensor's."""

    path: Path
    index: Index
    shape: tuple[int, ...]


def path_text(path: Path) -> str:
    """("layers", 0, "attn", "o", "weight") -> "layers/0/attn/o/weight"."""
    return "/".join(map(str, path))


def abstract_model(config: DecoderConfig) -> Decoder:
    """The decoder with ShapeDtypeStructs for leaves: no memory, milliseconds."""
    return nnx.eval_shape(lambda: Decoder(config))


def params_of(model: Decoder) -> dict[Path, jax.Array]:
    """Every parameter of a model (concrete or abstract) by its path."""
    return {tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@functools.lru_cache(maxsize=32)
def _abstract_params(config: DecoderConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    return params_of(abstract_model(config))


def abstract_params(config: DecoderConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter that a model of this configuration has."""
    return dict(_abstract_params(config))


def param_count(config: DecoderConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(leaf.size for leaf in abstract_params(config).values())


def model_from_params(config: DecoderConfig, params: Mapping[Path, jax.Array]) -> Decoder:
    """Build a decoder around existing arrays, without copying them.

    params: exactly the paths, shapes and dtypes of abstract_params(config); one ValueError names everything that
    differs.
    """
    wanted = abstract_params(config)
    problems = [f"missing {path_text(path)}" for path in wanted if path not in params]
    problems += [f"surplus {path_text(path)}" for path in params if path not in wanted]
    for path, leaf in wanted.items():
        got = params.get(path)
        if got is not None and (got.shape, got.dtype) != (leaf.shape, leaf.dtype):
            problems.append(f"{path_text(path)} is {got.dtype}{got.shape}, wanted {leaf.dtype}{leaf.shape}")
    if problems:
        raise ValueError("parameters do not fit the configuration: " + "; ".join(problems))
    graphdef, state = nnx.split(abstract_model(config))
    leaves = [(path, leaf.replace(params[tuple(path)])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def tensors_of(module: Path) -> dict[str, Index]:
    """Path of a module that has a parameter -> the Hugging Face modules in it, as in TENSORS; KeyError for others."""
    layer = module[1] if module[0] == "layers" else None
    names = TENSORS[path_text(module if layer is None else ("layers", "{i}", *module[2:]))]
    return {name.format(i=layer): index for name, index in names.items()}


def hf_targets(config: DecoderConfig) -> dict[str, Target]:
    """The exact set of tensors that a Hugging Face checkpoint of this configuration has: name -> Target.

    Tensors of one parameter follow each other, so that a reader can fill one parameter at a time.
    """
    targets = {}
    for path, leaf in abstract_params(config).items():
        is_matrix = leaf.ndim > 1 and path[-1] == "weight"
        for module, index in tensors_of(path[:-1]).items():
            part = np.broadcast_to(False, leaf.shape)[index].shape
            shape = (math.prod(part[:-1]), part[-1]) if is_matrix else (math.prod(part),)
            targets[f"{module}.{path[-1]}"] = Target(path, index, shape)
    return targets


def hf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint with a model's weights, on the host, by name."""
    params = params_of(model)
    return {
        name: np.asarray(params[path])[index].reshape(shape)
        for name, (path, index, shape) in hf_targets(model.config).items()
    }


def may_ignore(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor outside hf_targets(config) is harmless: a tied model's copy of its head, rotary frequencies."""
    return (config.tied_head and name == "lm_head.weight") or _RECOMPUTED.fullmatch(name) is not None
