"""GGUF files: metadata, tensors and their values, with errors that say what to change.

This module knows nothing about models. The block formats are the `gguf` package's. The header is read here, because
`gguf.GGUFReader` trusts the counts in it: a few wrong bytes cost it gigabytes and minutes. Here nothing is read, and no
memory taken, beyond the end of the file. The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from kitty_jax.models.checkpoint_source import CheckpointError

_VERSIONS = (2, 3)
_SCALARS = {
    kind: np.dtype(kind.name.lower()).newbyteorder("<")
    for kind in GGUFValueType
    if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
}
_MAX_DIMENSIONS = 4
# Rows are dequantized in blocks of about this many values, so that float32 scratch stays small next to the tensor.
_BLOCK_VALUES = 1 << 22


class GgufError(CheckpointError):
    """A file is not GGUF, is incomplete, or uses a part of the format that is not supported."""


class _Tensor(NamedTuple):
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # in numpy order, rows before columns
    offset: int  # of the file
    nbytes: int


class GgufContainer:
    """An open, memory-mapped GGUF file.

    `metadata`: key -> number, string, bool, or list of them. `shapes`: tensor name -> shape in numpy order, rows before
    columns. `nbytes`: tensor name -> stored bytes. `read(name)`: the values of one tensor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        header = _Header(self.path)
        tensor_count, pair_count = header.number(8), header.number(8)
        self.metadata: dict[str, Any] = header.table(pair_count, lambda: header.value(header.number(4)))
        tensors = header.table(tensor_count, header.tensor)
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{path}: damaged: general.alignment = {alignment!r}.")
        start = -(-header.place // alignment) * alignment
        self._tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
        size, needed = header.size, max((t.offset + t.nbytes for t in self._tensors.values()), default=0)
        if needed > size:
            raise GgufError(f"{path}: truncated: its tensors need {needed} bytes, the file has {size}. Fetch it again.")
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.nbytes = {name: tensor.nbytes for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Values of one tensor, dequantized, in a new array of its shape and of `dtype` (default float32).

        Dequantization is in float32 (`gguf.quants.dequantize`), then one rounding to `dtype`; at most one block of
        rows is held in float32.
        """
        kind, shape, offset, nbytes = self._tensors[name]
        columns = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        out = np.empty((rows, columns), np.dtype(dtype or np.float32))
        step = max(1, _BLOCK_VALUES // max(1, columns))
        raw = np.memmap(self.path, mode="r", offset=offset, shape=(nbytes,)).reshape(rows, -1)
        for row in range(0, rows, step):
            try:
                out[row : row + step] = gguf.quants.dequantize(raw[row : row + step], kind)
            except NotImplementedError:
                raise GgufError(
                    f"{self.path}: tensor {name!r} is stored as {kind.name}, which the gguf package cannot turn into "
                    "floats; take a file of another type, such as Q4_K_M, Q8_0 or F16."
                ) from None
        return out.reshape(shape)


class _Header:
    """Reads the header from front to back; what lies beyond the end of the file is an error."""

    def __init__(self, path: Path):
        self.path, self.size, self.place = path, path.stat().st_size, 8
        with open(path, "rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise GgufError(f"{path}: truncated: {self.size} bytes are too few for a GGUF file. Fetch it again.")
            magic, version = struct.unpack("<4sI", head)
            if magic != b"GGUF":
                raise GgufError(f"{path}: not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
            if version & 0xFFFF == 0:
                raise GgufError(f"{path}: a big-endian GGUF file; convert it to little-endian first.")
            if version not in _VERSIONS:
                raise GgufError(f"{path}: GGUF version {version}; versions {_VERSIONS} are supported.")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def take(self, nbytes: int) -> bytes:
        self._need(nbytes)
        self.place += nbytes
        return self._bytes[self.place - nbytes : self.place]

    def _need(self, nbytes: int) -> None:
        if nbytes > self.size - self.place:
            raise GgufError(
                f"{self.path}: truncated or damaged: its header wants {nbytes} bytes from byte {self.place} on, the "
                f"file has {self.size} in all. Fetch it again."
            )

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def string(self) -> str:
        try:
            return self.take(self.number(8)).decode()
        except UnicodeDecodeError as error:
            raise GgufError(
                f"{self.path}: damaged: the text before byte {self.place} is not UTF-8: {error.reason}."
            ) from None

    def table(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """`count` times a name and what `read` returns."""
        out: dict[str, Any] = {}
        for _ in range(count):
            name = self.string()
            if name in out:
                raise GgufError(f"{self.path}: damaged: the name {name!r} stands twice in the header.")
            out[name] = read()
        return out

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.number(4), self.number(8)
        if kind != GGUFValueType.STRING:
            return self._scalars(kind, count)
        self._need(8 * count)
        return [self.string() for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise GgufError(f"{self.path}: damaged: metadata type {kind} before byte {self.place} is not known.")
        return np.frombuffer(self.take(_SCALARS[kind].itemsize * count), _SCALARS[kind]).tolist()

    def tensor(self) -> _Tensor:
        dimensions, place = self.number(4), self.place
        if dimensions > _MAX_DIMENSIONS:
            raise GgufError(f"{self.path}: damaged: a tensor of {dimensions} dimensions at byte {place}.")
        shape = tuple(self.number(8) for _ in range(dimensions))[::-1]
        kind, offset = self.number(4), self.number(8)
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError as error:
            raise GgufError(f"{self.path}: the tensor at byte {place}: {error}; try a newer gguf package.") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or (shape or (1,))[-1] % block:
            raise GgufError(
                f"{self.path}: damaged: a tensor of shape {shape} in {kind.name} blocks of {block} at byte {place}."
            )
        return _Tensor(kind, shape, offset, math.prod(shape) // block * block_bytes)
