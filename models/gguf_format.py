"""The GGUF container: metadata and tensor directory of one file, read from a memory map.

Layout (all little-endian), after the GGUF specification of the ggml project, versions 2 and 3: magic "GGUF", uint32
version, uint64 number of tensors, uint64 number of key-value pairs, the pairs, the tensor infos (name, dimensions
from the fastest to the slowest, type, offset), padding to `general.alignment`, tensor data. Strings are a uint64
length and UTF-8 bytes.

This reader knows nothing about models. `gguf.GGUFReader` is not used because it builds several small arrays for every
string: tens of seconds for a vocabulary of 150,000 tokens and its merges. The block formats themselves are left to
`gguf.quants`.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kitty_jax.models.checkpoint_source import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Rows are dequantized in blocks of about this many values, so that float32 scratch stays small next to the tensor.
_BLOCK_VALUES = 1 << 22


class GgufError(CheckpointError):
    """A file is not GGUF, is incomplete, or uses a part of the format that is not supported."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored. `shape` is in numpy order, rows before columns; `nbytes` as stored."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GgufContainer:
    """An open GGUF file: `metadata` (key -> value), `tensors` (name -> GgufTensor), `read` for the values of one."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 24:
            raise GgufError(
                f"{self.path}: {size} bytes are too few for a GGUF file; the download is probably incomplete."
            )
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self.path, memoryview(self._bytes))
        self.version = _check_magic_and_version(cursor)
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            if key in self.metadata:
                raise GgufError(f"{self.path}: metadata key {key!r} appears twice.")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = self._tensor_directory(cursor, tensor_count)
        self._check_complete()

    def _tensor_directory(self, cursor: "_Cursor", count: int) -> dict[str, GgufTensor]:
        infos = []
        for _ in range(count):
            name, dimensions = cursor.string(), cursor.scalar("I")
            if dimensions > _MAX_DIMENSIONS:
                raise GgufError(
                    f"{self.path}: tensor {name!r} claims {dimensions} dimensions; at most {_MAX_DIMENSIONS} are "
                    "allowed."
                )
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
            infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0 or alignment & (alignment - 1):
            raise GgufError(f"{self.path}: general.alignment is {alignment}; it must be a power of two.")
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind_id, offset in infos:
            if name in tensors:
                raise GgufError(f"{self.path}: tensor {name!r} appears twice.")
            kind = _kind(self.path, name, kind_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            columns = shape[-1] if shape else 1
            if columns % block:
                raise GgufError(
                    f"{self.path}: tensor {name!r} has rows of {columns} values, not a multiple of the {kind.name} "
                    f"block, {block}."
                )
            nbytes = math.prod(shape) // block * block_bytes
            tensors[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        return tensors

    def _check_complete(self) -> None:
        cut = [t for t in self.tensors.values() if t.offset + t.nbytes > self._bytes.size]
        if cut:
            needed = max(t.offset + t.nbytes for t in cut)
            raise GgufError(
                f"{self.path}: truncated: the tensor directory needs {needed} bytes, the file has {self._bytes.size}; "
                f"{len(cut)} of {len(self.tensors)} tensors are cut, the first is {cut[0].name!r}. Fetch the file "
                "again."
            )

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Values of one tensor, dequantized, in a new array of its `shape` and of `dtype` (default float32).

        Dequantization is in float32 (`gguf.quants.dequantize`), then one rounding to `dtype`; at most one block of
        rows is held in float32.
        """
        tensor = self.tensors[name]
        if not is_readable(tensor.kind):
            raise GgufError(
                f"{self.path}: tensor {name!r} is stored as {tensor.kind.name}, which cannot be turned into floats "
                f"here; readable types: {', '.join(readable_kinds())}."
            )
        columns = tensor.shape[-1] if tensor.shape else 1
        rows = math.prod(tensor.shape[:-1])
        raw = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
        out = np.empty((rows, columns), np.dtype(dtype or np.float32))
        step = max(1, _BLOCK_VALUES // max(1, columns))
        for row in range(0, rows, step):
            block = np.ascontiguousarray(raw[row : row + step])
            out[row : row + step] = gguf.quants.dequantize(block, tensor.kind)
        return out.reshape(tensor.shape)


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


def _check_magic_and_version(cursor: "_Cursor") -> int:
    magic = bytes(cursor.take(4))
    if magic != _MAGIC:
        raise GgufError(f"{cursor.path}: not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}.")
    version = cursor.scalar("I")
    if version & 0xFFFF == 0:
        raise GgufError(f"{cursor.path}: a big-endian GGUF file; convert it to little-endian first.")
    if version not in _VERSIONS:
        raise GgufError(f"{cursor.path}: GGUF version {version}; versions {_VERSIONS} are supported.")
    return version


def _kind(path: Path, name: str, kind_id: int) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(kind_id)
    except ValueError:
        raise GgufError(
            f"{path}: tensor {name!r} has type number {kind_id}, unknown to the installed gguf package; a newer one "
            "may know it."
        ) from None


class _Cursor:
    """A position in the header that refuses to read past the end of the file."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.position, self._data = path, 0, data

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise GgufError(
                f"{self.path}: truncated: the header goes on to byte {end}, the file has {len(self._data)}. Fetch the "
                "file again."
            )
        part = self._data[self.position : end]
        self.position = end
        return part

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(
                f"{self.path}: a string that ends at byte {self.position} is not UTF-8 ({error.reason})."
            ) from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
            return [self.value(item) for _ in range(count)]
        raise GgufError(f"{self.path}: metadata value of unknown type number {kind} at byte {self.position}.")
