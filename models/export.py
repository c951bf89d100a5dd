"""Writing a checkpoint as a Hugging Face directory, one weight file at a time."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kitty_jax.models.checkpoint import CheckpointPlan, Progress, plan_checkpoint
from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.hf_config import config_to_hf
from kitty_jax.models.safetensors_dir import CONFIG, INDEX, WEIGHTS, write_safetensors
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids

GENERATION_CONFIG = "generation_config.json"
# Files of a tokenizer that are copied from a directory as they are, where present.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
DEFAULT_SHARD_BYTES = 2_000_000_000


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: Any = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write anything that `load_model` reads as a Hugging Face directory; returns the names of the files written.

    dtype: of every tensor written; None as in `load_model`. max_shard_bytes: above it the weights are split, with an
    index; a tensor is never split. tokenizer: also write a tokenizer; a .gguf file whose tokenizer cannot be rebuilt
    then refuses before anything is written, and a directory's files are copied where present. force: write into a
    directory that is not empty, replacing its checkpoint: weights, configs and tokenizer files.

    A weight file is in memory whole until it is written: `max_shard_bytes`, or the largest tensor if that is larger,
    and the tensor being read. config.json comes last, so a conversion that was cut short does not look like a
    checkpoint.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if not max_shard_bytes > 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    _check_destination(source, destination, force)  # before the source is opened, which can take long
    plan = plan_checkpoint(source, dtype=dtype)
    rebuilt = load_tokenizer(source) if tokenizer and source.is_file() else None  # may fail: nothing is written yet
    destination.mkdir(parents=True, exist_ok=True)
    # What is left of an earlier checkpoint would be read in place of, or mixed with, the new one.
    stale = [destination / name for name in (CONFIG, INDEX, GENERATION_CONFIG, *TOKENIZER_FILES)]
    for old in [*stale, *destination.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    written = _write_weights(plan, destination, max_shard_bytes, progress)
    if rebuilt is not None:
        written += [Path(name).name for name in rebuilt.save_pretrained(destination) if Path(name).is_file()]
    elif tokenizer:
        written += _copy(source, destination, TOKENIZER_FILES)
    written += _write_generation_config(source, destination, plan.source.config)
    _write_json(destination / CONFIG, _config(plan))
    return [*written, CONFIG]


def shard_names(nbytes: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """File name -> tensor names in order, each file filled up to the limit; one `model.safetensors` if that will do."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, count in nbytes.items():
        if shards[-1] and size + count > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _check_destination(source: Path, destination: Path, force: bool) -> None:
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError(f"{destination}: a file; the destination must be a directory or not exist yet.")
    if destination.resolve() == source.resolve():
        raise CheckpointError(f"{destination}: source and destination are the same directory; write to another one.")
    if any(destination.iterdir()) and not force:
        raise CheckpointError(
            f"{destination}: not empty; give another directory, or --force to write into it and replace its checkpoint."
        )


def _write_weights(
    plan: CheckpointPlan, destination: Path, max_shard_bytes: int, progress: Progress | None
) -> list[str]:
    dtype = np.dtype(plan.config.dtype)
    nbytes = {name: int(np.prod(target.shape)) * dtype.itemsize for name, target in plan.targets.items()}
    shards = shard_names(nbytes, max_shard_bytes)
    tensors = plan.tensors(progress)
    for file, names in shards.items():
        # No name for the dict: it is gone before the next one fills.
        write_safetensors(destination / file, dict(itertools.islice(tensors, len(names))))
    next(tensors, None)  # lets the last tensor report its progress
    if len(shards) == 1:
        return list(shards)
    weight_map = {name: file for file, names in shards.items() for name in names}
    _write_json(destination / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map})
    return [*shards, INDEX]


def _config(plan: CheckpointPlan) -> dict[str, Any]:
    """The source's config with the dtype written; for a .gguf file the model's own, in Hugging Face's newest form."""
    if plan.source.path.is_dir():
        config = {key: value for key, value in plan.source.config.items() if key != "torch_dtype"}
        return {**config, "dtype": np.dtype(plan.config.dtype).name}
    tokens = {key: value for key, value in plan.source.config.items() if key.endswith("_token_id")}
    return {**config_to_hf(plan.config), **tokens}


def _write_generation_config(source: Path, destination: Path, config: dict[str, Any]) -> list[str]:
    if copied := _copy(source, destination, (GENERATION_CONFIG,)):
        return copied
    stops = stop_token_ids(source)
    generation: dict[str, Any] = {"eos_token_id": stops[0] if len(stops) == 1 else list(stops)} if stops else {}
    generation |= {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    if not generation:
        return []
    _write_json(destination / GENERATION_CONFIG, generation)
    return [GENERATION_CONFIG]


def _copy(source: Path, destination: Path, names: tuple[str, ...]) -> list[str]:
    found = [name for name in names if source.is_dir() and (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, destination / name)
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
