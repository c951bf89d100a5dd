"""Loading: from a Hugging Face directory or a .gguf file on disk to a Flax model, one parameter at a time.

The source is memory-mapped. The tensors of one parameter are read (dequantized), cast, put on their device or devices,
and dropped before the next are read: the host never holds more than the largest parameter and one of its tensors.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.models.checkpoint_source import CheckpointError, CheckpointSource
from kitty_jax.models.decoder import DTYPES, Decoder, DecoderConfig
from kitty_jax.models.hf_config import config_from_hf
from kitty_jax.models.params import Index, Target, abstract_params, hf_targets, may_ignore, model_from_params
from kitty_jax.models.sharding import param_shardings

Progress = Callable[[int, int, str], None]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """A model with the weights of a checkpoint on this machine (nothing is downloaded).

    path: a Hugging Face directory (config.json; model.safetensors, or shards with model.safetensors.index.json) or a
      .gguf file of architecture llama, qwen2 or qwen3, of any type that the `gguf` package can dequantize.
    dtype: float32, bfloat16 or float16 for every parameter and the activations. None keeps a directory's stored dtype
      (that of most bytes, if mixed) and means float32 for .gguf.
    mesh: each parameter goes straight to its NamedSharding (`kitty_jax.models.sharding`); None: the default device.
    progress: called after each tensor with (bytes of the source done, bytes in total, tensor name).

    A tied model (`tie_word_embeddings`) has no head of its own. If its checkpoint holds `lm_head.weight` all the
    same, that must equal the embedding bit for bit, and is then left out; if it differs, loading refuses.

    Raises FileNotFoundError if there is no such path, else CheckpointError or ValueError; missing, surplus and
    misshapen tensors are all named at once.
    """
    plan = plan_checkpoint(path, dtype=dtype)
    leaves = abstract_params(plan.config)
    shardings = None if mesh is None else param_shardings(mesh, plan.config)  # refuses before the first byte is read
    params = {}
    for path, tensors in itertools.groupby(plan.tensors(progress), lambda item: plan.targets[item[0]].path):
        values = _joined(leaves[path], ((plan.targets[name].index, tensor) for name, tensor in tensors))
        if shardings is None:
            array = jax.device_put(values)
        else:
            # By callback, not device_put: each process of several hands out only the slices of its own devices.
            array = jax.make_array_from_callback(values.shape, shardings[path], values.__getitem__)
        # Waits, or the host copies of many parameters would pile up in the transfer queue.
        params[path] = jax.block_until_ready(array)
    return model_from_params(plan.config, params)


def _joined(leaf: jax.ShapeDtypeStruct, tensors: Iterable[tuple[Index, np.ndarray]]) -> np.ndarray:
    """A parameter from its checkpoint tensors, each of them at its index; a single one is taken as it is."""
    values = np.empty(leaf.shape, leaf.dtype)
    for index, tensor in tensors:
        if tensor.size == leaf.size:
            return tensor.reshape(leaf.shape)
        values[index] = tensor.reshape(values[index].shape)
    return values


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint whose config and tensor names, shapes and dtypes are checked, and whose data is still unread."""

    source: CheckpointSource
    config: DecoderConfig
    targets: dict[str, Target]

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, values in config.dtype), one at a time; keep none of them to keep memory bounded."""
        total = sum(self.source.nbytes[name] for name in self.targets)
        done = 0
        for name in self.targets:
            yield name, self.read(name)
            done += self.source.nbytes[name]
            if progress is not None:
                progress(done, total, name)

    def read(self, name: str) -> np.ndarray:
        """One tensor in config.dtype. Values that float16 cannot hold are an error, never infinity."""
        dtype = np.dtype(self.config.dtype)
        with np.errstate(over="ignore"):  # looked for just below, with the tensor's name
            values = self.source.read(name, dtype)
        if dtype == np.float16 and not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.source.path}: tensor {name!r} has values outside float16; load with dtype bfloat16 or float32."
            )
        return values


def plan_checkpoint(path: str | Path, *, dtype: Any = None) -> CheckpointPlan:
    """Open a checkpoint and check all that can be checked without reading tensor data. Arguments as in `load_model`."""
    wanted = None if dtype is None else _dtype(dtype)
    source = open_checkpoint(path)
    stored = wanted if wanted is not None else _dtype(source.stored_dtype, f"{source.path} stores")
    layers = source.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(source.shapes):  # everything below takes time and memory by layers
        raise CheckpointError(f"{source.path}: {layers} layers, but {len(source.shapes)} tensors in all.")
    try:
        config = config_from_hf(source.config, dtype=stored)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    targets = hf_targets(config)
    _check_tensors(source, config, targets)
    if _HEAD in source.shapes and _HEAD not in targets:
        _check_tied_head(source)
    return CheckpointPlan(source, config, targets)


def open_checkpoint(path: str | Path) -> CheckpointSource:
    """The source for a path: a directory or a .gguf file."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or directory. Checkpoints are read from disk and never downloaded: give the path of "
            "a Hugging Face model directory or of a .gguf file."
        )
    if path.is_dir():
        from kitty_jax.models.safetensors_dir import SafetensorsDirectory

        return SafetensorsDirectory(path)
    if path.suffix.lower() == ".gguf":
        from kitty_jax.models.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    raise CheckpointError(
        f"{path}: neither a directory nor a .gguf file. Give the directory that holds config.json and the weight "
        "files, or a .gguf file."
    )


def _dtype(dtype: Any, what: str = "dtype") -> np.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise CheckpointError(f"{what} {name}: give one of dtype={', '.join(DTYPES)}.")
    return jnp.dtype(name)


def _check_tensors(source: CheckpointSource, config: DecoderConfig, targets: dict[str, Target]) -> None:
    missing = [name for name in targets if name not in source.shapes]
    surplus = sorted(name for name in source.shapes if name not in targets and not may_ignore(config, name))
    misshapen = [
        f"{name} is {list(source.shapes[name])}, the config wants {list(target.shape)}"
        for name, target in targets.items()
        if name in source.shapes and tuple(source.shapes[name]) != tuple(target.shape)
    ]
    problems = [
        f"{title} ({len(names)}): {', '.join(names)}"
        for title, names in (("missing", missing), ("surplus", surplus), ("wrong shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"{source.path}: the tensors do not fit the config: {'; '.join(problems)}.")


def _check_tied_head(source: CheckpointSource) -> None:
    same_shape = source.shapes[_HEAD] == source.shapes[_EMBEDDING]
    if not same_shape or not np.array_equal(source.read(_HEAD), source.read(_EMBEDDING)):
        raise CheckpointError(
            f"{source.path}: the config ties the head to the embedding (tie_word_embeddings), but {_HEAD} is in the "
            f"file and differs from {_EMBEDDING}. Set tie_word_embeddings to false to use it, or remove the tensor."
        )
