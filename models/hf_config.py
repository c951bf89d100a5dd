"""Reading and writing the model part of a Hugging Face config.json, strictly.

A key that is neither read, nor checked, nor known to be harmless is an error: a checkpoint with a setting that this
package does not implement must not load and then answer slightly wrongly.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kitty_jax.models.config_values import checked
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.rope import read_rope

# Keys that from_hf turns into a DecoderConfig.
_READ = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings dtype torch_dtype"
    " rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings".split()
)
# Keys that cannot change what the model computes at inference: token ids (the tokenizer's business), training,
# book-keeping of the library that wrote the file, and options of its own forward pass.
_HARMLESS = frozenset(
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id bos_token eos_token"
    " initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop gradient_checkpointing use_cache"
    " transformers_version transformers.js_config auto_map name_or_path id2label label2id num_labels problem_type"
    " task_specific_params finetuning_task tokenizer_class prefix return_dict output_attentions output_hidden_states"
    " output_scores chunk_size_feed_forward use_bfloat16 torchscript pruned_heads is_decoder is_llama_config"
    " max_window_layers sliding_window pretraining_tp attn_implementation".split()
)
_DTYPE_DEFAULT = "bfloat16"
_DTYPES = ("bfloat16", "float16", "float32")
_REQUIRED = tuple(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    " rms_norm_eps".split()
)
# The kind of value, in the terms of `checked`, of every key read here; the rotary ones are `read_rope`'s.
_KINDS = {
    **dict.fromkeys(_REQUIRED, "whole"),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), "whole"),
    "rms_norm_eps": "positive",
    "tie_word_embeddings": "bool",
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), "string"),
    **dict.fromkeys(("architectures", "layer_types"), "strings"),
}


class Family(NamedTuple):
    """What distinguishes one Hugging Face model type from another, as far as a DecoderConfig is concerned."""

    model_type: str
    architecture: str
    qk_norm: bool
    qkv_bias: bool
    tied_head: bool = False  # what an absent tie_word_embeddings means
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """Settings that are known and change the maths, and are not the supported ones."""
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "use_mrope": False,
        "rope_interleaved": False,
        "is_encoder_decoder": False,
        "add_cross_attention": False,
        "tie_encoder_decoder": False,
        "quantization_config": None,
    }
    found = []
    for key, only in wanted.items():
        value = config.get(key)
        if value is not None and (type(value) is not type(only) or value != only):  # 0 is not False
            found.append(f"{key} = {value!r} (only {only!r} is supported)")
    return found + [f"unknown key {key!r}" for key in config if key not in _READ | _HARMLESS | {*wanted, "layer_types"}]


def read(family: Family, config: Mapping[str, Any], dtype=None, ignore: Collection[str] = ()) -> DecoderConfig:
    """config.json of one family -> DecoderConfig.

    dtype: of parameters and activations; None takes the file's, or bfloat16 where it states none. ignore: keys to drop
    unread, for a file with additions known to be harmless. Raises one ValueError that names everything wrong.
    """
    config = {key: value for key, value in config.items() if not key.startswith("_") and key not in ignore}
    problems = _unsupported(config)
    problems += [f"missing key {key!r}" for key in _REQUIRED if config.get(key) is None]
    values = {key: checked(config, key, kind, problems) for key, kind in _KINDS.items()}
    if kinds := sorted(set(values["layer_types"] or ()) - {"full_attention"}):
        problems.append(f"layer_types with {kinds} (only 'full_attention' is supported)")
    rope = read_rope(config, problems)
    heads, width = values["num_attention_heads"], values["hidden_size"]
    head_dim = values["head_dim"] or family.default_head_dim
    if not head_dim and heads and width:
        head_dim, rest = divmod(width, heads)
        if rest:
            problems.append(f"head_dim is absent and hidden_size {width} is not a multiple of {heads}")
    stated = values["dtype"] or values["torch_dtype"] or _DTYPE_DEFAULT
    if dtype is None and stated not in _DTYPES:
        problems.append(f"dtype {stated!r} (only {', '.join(_DTYPES)} are supported)")
    problems = list(dict.fromkeys(problems))  # the rotary part may have named a size too
    if problems:
        raise ValueError(
            f"this {family.model_type} configuration cannot be used: "
            + "; ".join(problems)
            + ". A key that is known to be harmless can be dropped with ignore=(key, ...)"
        )
    tied = values["tie_word_embeddings"]
    return DecoderConfig(
        family=family.model_type,
        vocab_size=values["vocab_size"],
        embed_dim=width,
        mlp_dim=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values["num_key_value_heads"] or heads,
        head_dim=head_dim,
        max_position=values["max_position_embeddings"],
        rope=rope,
        rms_eps=values["rms_norm_eps"],
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tied_head=family.tied_head if tied is None else tied,
        dtype=stated if dtype is None else dtype,
    )


def write(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """DecoderConfig -> the config.json that reads back as it. Token ids are not part of a DecoderConfig: add them."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
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
        "rope_parameters": config.rope.to_hf(),
        "tie_word_embeddings": config.tied_head,
        "dtype": config.dtype.name,
    }
