"""Values of config.json of a wrong type or out of range: refused, and named with what was wanted."""

import math
import reprlib

import pytest

from kitty_jax.models.registry import config_from_hf
from tests.models.checkpoint_files import golden_config

QWEN3 = golden_config("qwen3")
WRONG_VALUES = [
    ("tie_word_embeddings", "false"),
    ("vocab_size", 32.0),
    ("vocab_size", "32"),
    ("num_hidden_layers", 1.0),
    ("num_hidden_layers", True),
    ("num_key_value_heads", 0),
    ("head_dim", -2),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", -1),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", True),
    ("max_position_embeddings", -5),
    ("max_position_embeddings", "a"),
    ("rope_theta", 0),
    ("rope_theta", 10**400),
    ("rope_theta", "1e6"),
    ("rope_parameters", "linear"),
    ("rope_parameters", [1]),
    ("rope_scaling", 0),
    ("partial_rotary_factor", [1]),
    ("architectures", "Qwen3ForCausalLM"),
    ("architectures", 5),
    ("layer_types", "full_attention"),
    ("layer_types", 3),
    ("layer_types", [["full_attention"]]),
    ("use_sliding_window", 0),
    ("torch_dtype", 16),
    ("dtype", "int8"),
]


@pytest.mark.parametrize("key, value", WRONG_VALUES)
def test_values_of_a_wrong_type_or_range_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"{key} .*\((wanted|only) ") as error:
        config_from_hf(QWEN3 | {key: value})
    assert reprlib.repr(value) in str(error.value)


@pytest.mark.parametrize("value", [["qwen3"], 5])
def test_a_model_type_that_is_no_string_is_refused(value):
    with pytest.raises(ValueError, match=r"model_type = .* \(wanted a string\); .*supported: Qwen3ForCausalLM"):
        config_from_hf(QWEN3 | {"model_type": value, "architectures": None})


def test_wrong_values_are_named_together_and_once():
    wrong = {"tie_word_embeddings": "no", "max_position_embeddings": 0, "architectures": 5}
    rope = {"rope_type": "yarn", "rope_theta": 0, "factor": "8", "beta_fast": 0}
    with pytest.raises(ValueError) as error:
        config_from_hf(QWEN3 | wrong | {"rope_parameters": rope})
    for key in (*wrong, *(f"rope_parameters.{key}" for key in rope if key != "rope_type")):
        assert str(error.value).count(f"{key} = ") == 1, key
