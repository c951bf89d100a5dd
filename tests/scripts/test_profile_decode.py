"""The arithmetic of profile_decode.py; the profile itself needs a GPU."""

import json

import pytest

from kitty_jax.models.registry import config_from_name, config_to_hf
from scripts.profile_decode import busy_ns, main, table


def test_busy_time_is_the_union():
    assert busy_ns([("a", 0, 10), ("b", 4, 6), ("c", 8, 12), ("d", 20, 25)]) == 17
    assert busy_ns([]) == 0


def test_kernels_of_one_name_are_one_row():
    events = [("fusion.1", 0, 4000), ("fusion_2", 5000, 9000), ("gemm", 9000, 29000), ("fusion", 30000, 31000)]
    assert table(events, steps=2) == [
        {"kernel": "gemm", "calls": 0.5, "us": 10.0},
        {"kernel": "fusion", "calls": 1.5, "us": 4.5},
    ]


def test_without_a_gpu_it_says_so(tmp_path):
    config = config_to_hf(config_from_name("qwen3-0.6b")) | {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="a GPU and CUPTI are needed"):
        main(
            ["--model-shape", str(tmp_path), "--batch", "2", "--capacity", "400", "--length", "300", "--cache", "full"]
        )
