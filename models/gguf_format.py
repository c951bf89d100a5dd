"""GGUF files through `gguf.GGUFReader`: metadata, tensors and their values, with errors that say what to change.

This module knows nothing about models. The container is read by `gguf.GGUFReader`, the block formats by `gguf.quants`.
"""

import functools
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kitty_jax.models.checkpoint_source import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED_HEADER = 24  # magic, version, number of tensors, number of metadata pairs
# What GGUFReader and the numpy calls in it raise on bytes that make no sense or are not there.
_READER_ERRORS = (ValueError, IndexError, KeyError, OverflowError)
# No header is longer (a vocabulary of 256,000 tokens takes about 10 MB), and no file is.
_LONGEST_HEADER, _LONGEST_FILE = 1 << 26, 1 << 40
# Rows are dequantized in blocks of about this many values, so that float32 scratch stays small next to the tensor.
_BLOCK_VALUES = 1 << 22


class GgufError(CheckpointError):
    """A file is not GGUF, is incomplete, or uses a part of the format that is not supported."""


class GgufContainer:
    """An open, memory-mapped GGUF file.

    `metadata`: key -> number, string, bool, or list of them. `shapes`: tensor name -> shape in numpy order, rows before
    columns. `nbytes`: tensor name -> stored bytes. `read(name)`: the values of one tensor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        _check_header(self.path)
        try:
            reader = gguf.GGUFReader(self.path)
            # All of it at once, so that the reader, which holds two or more array objects for every token, can go.
            self.metadata: dict[str, Any] = {
                key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
            }
        except _READER_ERRORS as error:
            raise _unreadable(self.path, error) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in self._tensors.items()}
        self.nbytes = {name: tensor.n_bytes for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Values of one tensor, dequantized, in a new array of its shape and of `dtype` (default float32).

        Dequantization is in float32 (`gguf.quants.dequantize`), then one rounding to `dtype`; at most one block of
        rows is held in float32.
        """
        tensor, shape = self._tensors[name], self.shapes[name]
        if not is_readable(tensor.tensor_type):
            raise GgufError(
                f"{self.path}: tensor {name!r} is stored as {tensor.tensor_type.name}, which cannot be turned into "
                f"floats here; readable types: {', '.join(readable_kinds())}."
            )
        columns = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        raw = np.asarray(tensor.data).reshape(rows, -1)
        out = np.empty((rows, columns), np.dtype(dtype or np.float32))
        step = max(1, _BLOCK_VALUES // max(1, columns))
        for row in range(0, rows, step):
            out[row : row + step] = gguf.quants.dequantize(raw[row : row + step], tensor.tensor_type)
        return out.reshape(shape)


def open_gguf(path: str | Path) -> GgufContainer:
    """The container of a file; the last one is kept, and taken again while the file's time and size are the same.

    GGUFReader takes seconds (nearly all of it for the vocabulary and the merges, token by token), and one run wants
    the model, the tokenizer and the stop tokens of the same file.
    """
    path = Path(path)
    state = path.stat()
    return _open_gguf(path.absolute(), state.st_mtime_ns, state.st_size, state.st_ino)


@functools.lru_cache(maxsize=1)
def _open_gguf(path: Path, *_state: int) -> GgufContainer:
    return GgufContainer(path)


def readable_kinds() -> tuple[str, ...]:
    """Names of the tensor types that `GgufContainer.read` takes."""
    return tuple(kind.name for kind in gguf.GGMLQuantizationType if is_readable(kind))


def is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the installed `gguf` package can turn this type into floats."""
    # The package has no public list; it answers "not implemented" for a type before it looks at the data.
    try:
        gguf.quants.dequantize(np.empty((0, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    except ValueError:
        return True  # an implemented type that does not like empty input
    return True


def _check_header(path: Path) -> None:
    """What GGUFReader accepts (big-endian files) or refuses without saying what it found."""
    with open(path, "rb") as file:
        head = file.read(_FIXED_HEADER)
    if len(head) < _FIXED_HEADER:
        raise GgufError(f"{path}: {len(head)} bytes are too few for a GGUF file; the download is probably incomplete.")
    magic, version = struct.unpack_from("<4sI", head)
    if magic != _MAGIC:
        raise GgufError(f"{path}: not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}.")
    if version & 0xFFFF == 0:
        raise GgufError(f"{path}: a big-endian GGUF file; convert it to little-endian first.")
    if version not in _VERSIONS:
        raise GgufError(f"{path}: GGUF version {version}; versions {_VERSIONS} are supported.")


def _unreadable(path: Path, error: Exception) -> GgufError:
    size, needed = path.stat().st_size, _needed_bytes(path)
    if needed is not None and needed > size:
        return GgufError(
            f"{path}: truncated: its tensors need {needed} bytes, the file has {size}. Fetch the file again."
        )
    return GgufError(
        f"{path}: {size} bytes that the gguf package cannot read ({type(error).__name__}: {error}): truncated, "
        "damaged, or newer than the package. Fetch the file again, or try a newer gguf package."
    )


def _needed_bytes(path: Path) -> int | None:
    """Where the last tensor ends by the header of a file that may lack it; None if the header itself cannot be read.

    GGUFReader maps every tensor at once and raises at the first one that is not there, without its extent. So it gets
    the header again, in a file whose missing rest is a hole that takes no space.
    """
    try:
        with open(path, "rb") as file, tempfile.NamedTemporaryFile() as whole:
            whole.write(file.read(_LONGEST_HEADER))
            whole.truncate(_LONGEST_FILE)
            tensors = gguf.GGUFReader(whole.name).tensors
            return max((tensor.data_offset + tensor.n_bytes for tensor in tensors), default=None)
    except (*_READER_ERRORS, OSError):  # OSError: no room for such a file or its mapping
        return None
