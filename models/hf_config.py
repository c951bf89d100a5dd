"""A Hugging Face config.json as a DecoderConfig, and back.

transformers' own configuration classes read it: they have the defaults of absent keys, check types, and know the older
and the newer form of the rotary part. A key that the class of a model type does not have changes nothing that the model
computes, so it is not looked at. A setting that it has and no model here implements is refused: a checkpoint must not
load and then answer slightly wrongly.
"""

import contextlib
import copy
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kitty_jax.models.decoder import DTYPES, DecoderConfig
from kitty_jax.models.rope import ROPE_TYPES, RopeConfig


class Family(NamedTuple):
    """What distinguishes one Hugging Face model type from another, as far as a DecoderConfig is concerned."""

    model_type: str
    architecture: str
    qk_norm: bool
    qkv_bias: bool


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, qkv_bias=False),
        Family("qwen2", "Qwen2ForCausalLM", qk_norm=False, qkv_bias=True),
        Family("llama", "LlamaForCausalLM", qk_norm=False, qkv_bias=False),
    )
}
# Sizes for which a default of the class would only hide that the file is incomplete.
_REQUIRED = tuple(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    " rms_norm_eps".split()
)
# Keys that the models read though not every class declares them: the head size, and the rotary part of older files,
# which the classes move into rope_parameters.
_UNDECLARED = ("head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
# Fields of RopeConfig with another name in rope_parameters.
_ROTARY_NAMES = {
    "theta": "rope_theta",
    "type": "rope_type",
    "original_max_position": "original_max_position_embeddings",
}
# Settings that change the maths, each with the only value that the models here implement.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_mrope": False,
    "quantization_config": None,
}


def config_from_hf(config: Mapping[str, Any], *, dtype=None) -> DecoderConfig:
    """A Hugging Face config.json as a dict -> DecoderConfig.

    dtype: of parameters and activations; None takes the file's, or bfloat16 where it states none. Raises a ValueError
    that names the known architectures, or what is unsupported, missing or impossible.
    """
    family = _family(config)
    try:
        if problems := _problems(config, dtype):
            raise ValueError("; ".join(problems))
        read = _read(family, config)
        return DecoderConfig(
            family=family.model_type,
            vocab_size=read.vocab_size,
            embed_dim=read.hidden_size,
            mlp_dim=read.intermediate_size,
            num_layers=read.num_hidden_layers,
            num_heads=read.num_attention_heads,
            num_kv_heads=read.num_key_value_heads,
            head_dim=getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
            max_position=read.max_position_embeddings,
            rope=rope_from_hf(read.rope_parameters, read.max_position_embeddings),
            rms_eps=read.rms_norm_eps,
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            tied_head=read.tie_word_embeddings,
            dtype=_stated_dtype(config) if dtype is None else dtype,
        )
    except Exception as error:  # the classes raise several kinds
        text = " ".join(str(error).split())
        raise ValueError(f"this {family.model_type} configuration cannot be used: {text}") from error


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """DecoderConfig -> the dict of a config.json that config_from_hf reads back as an equal configuration.

    Token ids are not part of a DecoderConfig: add them.
    """
    return {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {
            _ROTARY_NAMES.get(name, name): value for name, value in vars(config.rope).items() if value is not None
        },
        "tie_word_embeddings": config.tied_head,
        "dtype": config.dtype.name,
    }


def _family(config: Mapping[str, Any]) -> Family:
    kind, stated = config.get("model_type"), config.get("architectures") or []
    names = stated if isinstance(stated, list) else [stated]
    for family in FAMILIES.values():
        # A reward model or an embedding model has the right model_type and the wrong head.
        if kind in (None, family.model_type) and (family.architecture in names if names else kind):
            return family
    raise ValueError(
        f"architecture {stated} with model_type {kind!r} is not supported; supported:"
        f" {', '.join(f'{f.architecture} (model_type {f.model_type!r})' for f in FAMILIES.values())}"
    )


def _stated_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype") or "bfloat16"


def _problems(config: Mapping[str, Any], dtype: Any) -> list[str]:
    """What transformers' classes would take, or not name: missing sizes, impossible ones, unsupported settings."""
    problems = [f"missing key {key!r}" for key in _REQUIRED if config.get(key) is None]
    for key in (*_REQUIRED, "num_key_value_heads", "head_dim"):
        if isinstance(value := config.get(key), int | float) and not 0 < value < math.inf:
            problems.append(f"{key} = {reprlib.repr(value)} (wanted a finite number above 0)")
    for key in ("rope_scaling", "rope_parameters"):
        block = {} if config.get(key) is None else config[key]
        if not isinstance(block, Mapping):
            problems.append(f"{key} = {reprlib.repr(block)} (wanted an object of keys and values)")
        elif (kind := block.get("rope_type", block.get("type", "default"))) not in ROPE_TYPES:
            problems.append(f"{key} type {kind!r} is not supported; supported types: {', '.join(ROPE_TYPES)}")
    for key, only in _ONLY.items():
        if config.get(key) not in (None, only):
            problems.append(f"{key} = {reprlib.repr(config[key])} (only {only!r} is supported)")
    if dtype is None and (stated := _stated_dtype(config)) not in DTYPES:
        problems.append(f"dtype = {stated!r} (only {', '.join(DTYPES)} are supported)")
    return problems


def _read(family: Family, config: Mapping[str, Any]) -> Any:
    """The configuration object of transformers; what it would write to the log about is checked here, or harmless."""
    transformers = import_transformers()
    kind = transformers.CONFIG_MAPPING[family.model_type]
    given = {key: config[key] for key in kind.__annotations__ if key in config}
    given |= {key: config[key] for key in _UNDECLARED if config.get(key) is not None}
    with _quiet(transformers.logging):
        read = kind(**copy.deepcopy(given))  # it writes into rope_parameters
        read.standardize_rope_params()  # as the models do: not every key was there the first time
    if other := sorted(set(getattr(read, "layer_types", None) or ()) - {"full_attention"}):
        raise ValueError(f"layers of the types {other} (only 'full_attention' is supported)")
    return read


def rope_from_hf(parameters: Mapping[str, Any], max_position: int = 0) -> RopeConfig:
    """rope_parameters, as transformers' classes complete them -> RopeConfig. max_position: of the model, for YaRN."""
    own_names = {theirs: ours for ours, theirs in _ROTARY_NAMES.items()}
    values = {own_names.get(key, key): value for key, value in parameters.items() if value is not None}
    kind = values.get("type", "default")
    if (part := values.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor {part} is not supported; only 1.0 is")
    # Null, the factor is the ratio of the context lengths.
    if kind == "yarn" and "factor" not in values:
        values["factor"] = max_position / values["original_max_position"]
    if unknown := sorted(set(values) - set(RopeConfig.__dataclass_fields__), key=str):
        raise ValueError(f"rope_parameters of type {kind!r}: unknown keys {unknown}")
    return RopeConfig(**values)


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def import_transformers() -> Any:
    """The transformers module, imported without its advice that no torch is installed: nothing here needs torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
