"""What the two kinds of checkpoint, a Hugging Face directory and a .gguf file, have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or holds something unsupported. The message says what to change."""


class CheckpointSource(Protocol):
    """An opened checkpoint: headers are read, tensor data is not.

    path: the directory or file. config: Hugging Face style config dict. shapes: Hugging Face tensor name -> shape.
    nbytes: name -> stored bytes. stored_dtype: the float dtype that holds the tensors, the default of loading.
    """

    path: Path
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: Mapping[str, int]
    stored_dtype: np.dtype

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor in Hugging Face layout, cast to `dtype`, in memory of its own (never a view of the file)."""
        ...
