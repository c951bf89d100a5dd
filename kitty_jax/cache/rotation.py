"""Rotation of values by a Hadamard matrix, so that no channel of a token stands out and widens its range.

The matrix is orthonormal and its own inverse: the cache holds rotated values, attention sums them as it would any
others, and the same rotation takes the sum back. Pages and kernels know nothing of it.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix, float32 [size, size], in blocks of the largest power of two that divides size."""
    block = size & -size
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(size // block), matrix * block**-0.5).astype(np.float32)


def rotate(x: Array) -> Array:
    """x [..., D] times the matrix, in float32 and back in x's dtype; twice gives x again."""
    matrix = hadamard(x.shape[-1])
    out = jnp.einsum("...d,de->...e", x.astype(jnp.float32), matrix, precision="highest")
    return out.astype(x.dtype)
