"""The names of a decoder's parameters, here and in Hugging Face checkpoints, in both directions.

A path is a tuple such as ("layers", 0, "attn", "q", "weight"). Shapes agree on both sides: no tensor is transposed.
"""

import functools
import re
from types import MappingProxyType
from typing import NamedTuple

import jax
from flax import nnx

from kitty_jax.models.decoder import Decoder, DecoderConfig

Path = tuple[str | int, ...]

# Hugging Face name -> path. {i} is the layer. LLaMA, Qwen2 and Qwen3 differ only in which of these they have.
NAME_TABLE = {
    "model.embed_tokens.weight": "embed/weight",
    "model.layers.{i}.input_layernorm.weight": "layers/{i}/input_norm/weight",
    "model.layers.{i}.self_attn.q_proj.weight": "layers/{i}/attn/q/weight",
    "model.layers.{i}.self_attn.q_proj.bias": "layers/{i}/attn/q/bias",
    "model.layers.{i}.self_attn.k_proj.weight": "layers/{i}/attn/k/weight",
    "model.layers.{i}.self_attn.k_proj.bias": "layers/{i}/attn/k/bias",
    "model.layers.{i}.self_attn.v_proj.weight": "layers/{i}/attn/v/weight",
    "model.layers.{i}.self_attn.v_proj.bias": "layers/{i}/attn/v/bias",
    "model.layers.{i}.self_attn.o_proj.weight": "layers/{i}/attn/o/weight",
    "model.layers.{i}.self_attn.q_norm.weight": "layers/{i}/attn/q_norm/weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers/{i}/attn/k_norm/weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers/{i}/post_norm/weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers/{i}/mlp/gate/weight",
    "model.layers.{i}.mlp.up_proj.weight": "layers/{i}/mlp/up/weight",
    "model.layers.{i}.mlp.down_proj.weight": "layers/{i}/mlp/down/weight",
    "model.norm.weight": "norm/weight",
    "lm_head.weight": "head/weight",
}
_BY_PATH = {path: name for name, path in NAME_TABLE.items()}
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Target(NamedTuple):
    """Where a checkpoint tensor goes: the path of the parameter, and the shape that both have."""

    path: Path
    shape: tuple[int, ...]


def path_text(path: Path) -> str:
    """("layers", 0, "attn", "q", "weight") -> "layers/0/attn/q/weight"."""
    return "/".join(map(str, path))


def hf_name_of(path: Path) -> str:
    """The Hugging Face name of the parameter at a path; KeyError for a path that no decoder has."""
    layer = next((part for part in path if isinstance(part, int)), None)
    template = path_text(tuple("{i}" if isinstance(part, int) else part for part in path))
    return _BY_PATH[template].replace("{i}", str(layer))


def abstract_model(config: DecoderConfig) -> Decoder:
    """The decoder with ShapeDtypeStructs for leaves: no memory, milliseconds."""
    return nnx.eval_shape(lambda: Decoder(config))


def params_of(model: Decoder) -> dict[Path, object]:
    """Every parameter of a model (concrete or abstract) by its path."""
    return {tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@functools.lru_cache(maxsize=32)
def _abstract_params(config: DecoderConfig) -> MappingProxyType[Path, jax.ShapeDtypeStruct]:
    return MappingProxyType(params_of(abstract_model(config)))


def abstract_params(config: DecoderConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter that a model of this configuration has."""
    return dict(_abstract_params(config))


def hf_names(config: DecoderConfig) -> dict[str, Target]:
    """The exact set of tensors that a Hugging Face checkpoint of this configuration has: name -> Target.

    Raises ValueError for a fused configuration, whose layout no checkpoint has.
    """
    if config.fused:
        raise ValueError(
            "checkpoints have no fused projections: unfuse the model (kitty_jax.models.fused.unfuse), or give its"
            " config with fused=False"
        )
    params = abstract_params(config)
    return {hf_name_of(path): Target(path, leaf.shape) for path, leaf in params.items()}


def may_ignore(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor outside hf_names(config) is harmless: a tied model's copy of its head, or rotary frequencies."""
    return (config.tied_head and name == "lm_head.weight") or _RECOMPUTED.fullmatch(name) is not None
