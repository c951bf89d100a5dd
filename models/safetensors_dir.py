"""A Hugging Face directory (config.json, one model.safetensors or shards with an index) as a source, and a writer.

Nothing is fetched: files are read where they are.
"""

import collections
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from kitty_jax.models.checkpoint_source import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}


class SafetensorsDirectory:
    """A checkpoint source over a directory (see `kitty_jax.models.checkpoint_source`); opening reads headers only.

    `stored_dtype` is the dtype that holds the most bytes, which need not be what config.json says.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / CONFIG).is_file():
            raise CheckpointError(
                f"{self.path}: no {CONFIG} in this directory ({_listing(self.path)}); give a Hugging Face model "
                "directory."
            )
        self.config = read_json(self.path / CONFIG)
        self._file_of: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nbytes: dict[str, int] = {}
        by_dtype: collections.Counter[str] = collections.Counter()
        odd = {}
        for shard, expected in self._shards():
            handle = _open(shard)
            names = set(handle.keys())
            if expected is not None and names != expected:
                raise CheckpointError(
                    f"{shard}: its tensors are not those that {INDEX} lists for it. In the index only: "
                    f"{sorted(expected - names)}; in the file only: {sorted(names - expected)}. Shards of two "
                    "different checkpoints may be mixed."
                )
            for name in names:
                piece = handle.get_slice(name)
                kind, shape = piece.get_dtype(), tuple(piece.get_shape())
                if kind not in DTYPES:
                    odd[name] = kind
                    continue
                self._file_of[name], self.shapes[name] = handle, shape
                self.nbytes[name] = math.prod(shape) * DTYPES[kind].itemsize
                by_dtype[kind] += self.nbytes[name]
        if odd:
            raise CheckpointError(
                f"{self.path}: tensors of unsupported dtypes: {odd}; supported: {', '.join(DTYPES)}. Quantized Hugging "
                "Face checkpoints are not read: use the original one, or a .gguf file."
            )
        if not by_dtype:
            raise CheckpointError(f"{self.path}: the weight files hold no tensors.")
        self.stored_dtype = DTYPES[by_dtype.most_common(1)[0][0]]

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor, in memory of its own, in `dtype` (default: as stored)."""
        try:
            values = self._file_of[name].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} cannot be read: {error}.") from None
        return values if dtype is None else values.astype(dtype, copy=False)

    def _shards(self) -> list[tuple[Path, set[str] | None]]:
        """Weight files, each with the names that the index promises (None where there is no index)."""
        if (self.path / WEIGHTS).is_file():
            return [(self.path / WEIGHTS, None)]
        if not (self.path / INDEX).is_file():
            raise CheckpointError(
                f"{self.path}: neither {WEIGHTS} nor {INDEX} in this directory ({_listing(self.path)}). PyTorch .bin "
                "files are not read; save the model with safetensors."
            )
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{self.path / INDEX}: 'weight_map' must map tensor names to file names.")
        expected: dict[str, set[str]] = collections.defaultdict(set)
        for tensor, name in weight_map.items():
            expected[name].add(tensor)
        if outside := sorted(name for name in expected if Path(name).name != name):
            raise CheckpointError(f"{self.path / INDEX}: shards must lie beside the index; these do not: {outside}.")
        if missing := sorted(name for name in expected if not (self.path / name).is_file()):
            raise CheckpointError(
                f"{self.path}: {len(missing)} of {len(expected)} shards named by {INDEX} are missing: "
                f"{', '.join(missing)}."
            )
        return [(self.path / name, expected[name]) for name in sorted(expected)]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; damaged files and other values are refused by name and position."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(value).__name__}.")
    return value


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file, to be read by transformers too; names the file if that fails (a full disk, say).

    Its permissions are those of any new file (by the umask), or stay those of the file that it replaces.
    """
    # save_file takes the memory behind an array as it lies, whatever its strides.
    dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(dense, path, metadata={"format": "pt"})  # transformers refuses a file without the format
        if path.stat().st_mode != mode:  # safetensors makes a file that its owner alone can read
            path.chmod(stat.S_IMODE(mode))
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}.") from None


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: {path.stat().st_size} bytes that are not a complete safetensors file ({error}). Fetch the file "
            "again."
        ) from None


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return (
        "it is empty"
        if not names
        else "it has " + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    )
