"""A model shape for tests of command lines that make their weights themselves."""

import dataclasses
import json
from pathlib import Path

from kitty_jax.models.hf_config import config_to_hf
from kitty_jax.models.registry import config_from_name

SIZES = {"embed_dim": 32, "mlp_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 64}
TINY = dataclasses.replace(config_from_name("qwen3-0.6b"), num_layers=2, **SIZES)


def write_shape(folder: Path) -> str:
    """Writes TINY as a config.json and returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config_to_hf(TINY)))
    return str(path)


def error_of(main, arguments: str, capsys) -> str:
    """The one line on standard error with which a command line refuses; it prints nothing else and returns 2."""
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err
