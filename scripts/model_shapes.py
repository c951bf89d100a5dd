"""Model shapes for command lines: by name, from a checkpoint or a config.json, and what their weights take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

from kitty_jax.models.checkpoint import plan_checkpoint
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.hf_config import config_from_hf
from kitty_jax.models.params import abstract_params
from kitty_jax.models.registry import CONFIG_NAMES, config_from_name
from kitty_jax.models.sharding import param_sharding


def read_shape(text: str, layers: int | None = None) -> DecoderConfig:
    """One of CONFIG_NAMES, or the path of a config.json, of a folder that holds one, or of a .gguf file.

    layers: instead of the model's own.
    """
    path = Path(text).expanduser()
    if text in CONFIG_NAMES:
        config = config_from_name(text)
    elif path.suffix.lower() == ".gguf":
        config = plan_checkpoint(path).config
    else:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"{text!r} is neither a known shape ({', '.join(CONFIG_NAMES)}) nor a config.json, a folder with one "
                "or a .gguf file"
            )
        config = config_from_hf(json.loads(path.read_text()))
    return config if layers is None else dataclasses.replace(config, num_layers=layers)


def weight_shapes(config: DecoderConfig, data: int = 1, model: int = 1) -> list[jax.ShapeDtypeStruct]:
    """Every parameter, with what a mesh of data x model devices makes of it; nothing is allocated.

    Raises ValueError where the mesh does not divide a parameter.
    """
    mesh = AbstractMesh((data, model), ("data", "model"))
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param_sharding(mesh, path, leaf.shape))
        for path, leaf in abstract_params(config).items()
    ]
