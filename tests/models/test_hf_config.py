"""config.json: published files read as the named configurations, defaults, both rotary forms, and what is refused."""

import dataclasses
import json
import math
import re
import reprlib

import jax.numpy as jnp
import pytest

from kitty_jax.models.hf_config import config_from_hf, config_to_hf, import_transformers
from kitty_jax.models.registry import CONFIG_NAMES, config_from_name
from kitty_jax.models.rope import RopeConfig

COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
QWEN3_8B = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_3_1_8B = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_5_0_5B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "config, name", [(QWEN3_8B, "qwen3-8b"), (LLAMA_3_1_8B, "llama3.1-8b"), (QWEN2_5_0_5B, "qwen2.5-0.5b")]
)
def test_published_config_reads_as_the_named_one(config, name):
    before = json.dumps(config)
    assert config_from_hf(config) == config_from_name(name)
    assert json.dumps(config) == before


def test_config_survives_writing_and_reading():
    for name in CONFIG_NAMES:
        config = dataclasses.replace(config_from_name(name), dtype="float32")
        assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config, name


def test_dtype():
    assert config_from_hf(QWEN3_8B | {"torch_dtype": None}).dtype == jnp.bfloat16
    assert config_from_hf(QWEN3_8B | {"dtype": "float16"}).dtype == jnp.float16
    assert config_from_hf(QWEN3_8B | {"dtype": "int8"}, dtype=jnp.float32).dtype == jnp.float32


def test_defaults_of_absent_keys_are_those_of_hugging_face():
    absent = {"head_dim", "num_key_value_heads", "tie_word_embeddings"}
    llama = config_from_hf({k: v for k, v in LLAMA_3_1_8B.items() if k not in absent})
    assert (llama.head_dim, llama.num_kv_heads, llama.tied_head) == (128, 32, False)
    small = {k: v for k, v in QWEN3_8B.items() if k not in absent} | {"hidden_size": 1024}
    assert config_from_hf(small).head_dim == 128  # not hidden_size / heads = 32
    assert config_from_hf(QWEN3_8B | {"model_type": None}) == config_from_name("qwen3-8b")
    first = {k: v for k, v in LLAMA_3_1_8B.items() if k != "rope_scaling"} | {"max_position_embeddings": 8192}
    assert config_from_hf(first) == config_from_name("llama3-8b")


def test_keys_that_no_model_reads_are_not_looked_at(capfd):
    others = {"unsloth_version": "2", "temperature": 0.6, "model_max_length": 4, "_note": 1, "problem_type": "x"}
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36}  # in no layer
    assert config_from_hf(QWEN3_8B | others | windows) == config_from_name("qwen3-8b")
    assert capfd.readouterr().err == ""


def read_rope(**keys):
    """The rotary part of a config.json with these keys."""
    return config_from_hf(QWEN3_8B | {"rope_theta": None, "rope_scaling": None} | keys).rope


def test_old_and_new_rotary_forms_read_alike(capfd):
    old = read_rope(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = read_rope(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new == config_from_name("llama3.1-8b").rope
    assert read_rope(rope_theta=1e6) == RopeConfig(theta=1e6)
    assert config_from_hf({k: v for k, v in QWEN3_8B.items() if k != "rope_theta"}).rope == RopeConfig(theta=1e4)
    assert read_rope(rope_parameters=YARN | {"factor": None}).factor == 40960 / 32  # the ratio of the context lengths
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    scaling = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **scaling}}
    assert read_rope(**scaling).original_max_position == 40960
    assert read_rope(**scaling, original_max_position_embeddings=99).original_max_position == 99
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 8},
            "['sliding_attention'] (only 'full",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"] * 18}, "['sliding_attention'] (only 'full_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' (only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True (only False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} (only None"),
        ({"rms_norm_eps": None}, "missing key 'rms_norm_eps'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; only 1.0 is"),
        (
            {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
            "'su' is not supported; supported types: default, linear",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope' is not supported; supported"),
        ({"rope_scaling": {"type": "linear"}}, "Missing required keys in `rope_parameters` for 'rope_type'='linear'"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "RoPE of type 'linear': missing ['factor']"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "surplus ['mscale']"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "speed": 1}}, "'linear': unknown keys ['speed']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "unknown keys ['full_attention']"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 32.0}},
            "32.0 (wanted a whole number above 0)",
        ),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "(wanted more than 1.0, low_"),
    ],
)
def test_what_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config_from_hf(QWEN3_8B | change)
    assert str(error.value).startswith("this qwen3 configuration cannot be used: ")


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        ("tie_word_embeddings", "false", "expected bool, got str"),
        ("use_sliding_window", 0, "expected bool, got int"),
        ("vocab_size", 32.0, "expected int, got float"),
        ("num_hidden_layers", True, "expected int, got bool"),
        ("num_hidden_layers", -1, "wanted a finite number above 0"),
        ("num_key_value_heads", 0, "wanted a finite number above 0"),
        ("head_dim", -2, "wanted a finite number above 0"),
        ("rms_norm_eps", math.nan, "wanted a finite number above 0"),
        ("rms_norm_eps", "x", "expected float, got str"),
        ("max_position_embeddings", "a", "expected int, got str"),
        ("rope_theta", 10**400, "wanted a finite number above 0"),
        ("rope_theta", "1e6", "wanted a finite number above 0"),
        ("rope_parameters", [1], "wanted an object of keys and values"),
        ("rope_scaling", 0, "wanted an object of keys and values"),
        ("layer_types", "full_attention", "expected a list, got str"),
        ("torch_dtype", 16, "only bfloat16, float16, float32 are supported"),
    ],
)
def test_values_of_a_wrong_type_or_range_are_named_in_one_line(key, value, wanted):
    with pytest.raises(ValueError) as error:
        config_from_hf(QWEN3_8B | {key: value})
    text = str(error.value)
    assert key.removeprefix("rope_").removeprefix("torch_") in text
    assert wanted in text
    assert reprlib.repr(value) in text
    assert "\n" not in text


def test_one_error_names_every_unsupported_setting():
    with pytest.raises(ValueError) as error:
        config_from_hf(QWEN3_8B | {"hidden_act": "relu", "vocab_size": None, "head_dim": 0, "dtype": "int8"})
    for part in ("hidden_act = 'relu'", "missing key 'vocab_size'", "head_dim = 0", "dtype = 'int8'"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
        {"architectures": ["Qwen3ForSequenceClassification"]},
        {"architectures": 5},
        {"model_type": "qwen3_moe"},
        {"model_type": ["qwen3"], "architectures": None},
        {"model_type": None, "architectures": None},
        {"model_type": "llama"},  # contradicts the architecture
    ],
)
def test_unknown_architectures_list_the_known_ones(change):
    with pytest.raises(ValueError, match=r"not supported; .*Qwen3ForCausalLM .*Qwen2ForCausalLM .*LlamaForCausalLM"):
        config_from_hf(QWEN3_8B | change)


def test_the_log_level_of_transformers_is_left_as_it_was():
    logging = import_transformers().logging
    before = logging.get_verbosity()
    config_from_hf(QWEN3_8B)
    assert logging.get_verbosity() == before
