"""What the cache of one layer offers, whichever kind it is, and what a step tells it."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig
from kitty_jax.pallas_kernels.implementation import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What a step's attention needs beside q, k and v.

    Attributes:
        lengths: int32 [B], tokens cached before the step.
        num_new: int32 [B], real tokens of the step.
        page_table: int32 [B, P], with the step's pages handed out.
        implementation: for the operations on pages.
        rows: int32 [B], the sequence of the cache that each row of the step belongs to, counted within its group of
            the mesh; None where the rows are all sequences in order. A number past the last sequence is a padding row.
        mesh: the cache's.
        fresh: promise that ``lengths`` is 0 wherever ``num_new`` is not; no buffer is read then.
    """

    lengths: Array
    num_new: Array
    page_table: Array
    implementation: Implementation = dataclasses.field(default="auto", metadata={"static": True})
    rows: Array | None = None
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def sequences(self) -> Array:
        """int32 [B], the sequence of the cache that each row belongs to."""
        return jnp.arange(self.lengths.shape[0]) if self.rows is None else self.rows


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer's cache.

    Attributes:
        batch, capacity: B, and most tokens of a sequence.
        kv_heads, head_dim, dtype: of the model.
        pages: M, records of the pool.
        index: number of the layer.
        shards: devices that share the KV heads, the size of the mesh's "model" axis.
    """

    batch: int
    capacity: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    pages: int
    index: int = 0
    shards: int = 1


class LayerCache(abc.ABC):
    """Keys and values of one layer: a frozen dataclass that is a pytree. A third kind of cache subclasses this.

    Attributes:
        heads_axis: the axis of its arrays that counts KV heads; the first axis counts sequences or pages.
        writes_first: whether :meth:`attend` sees the step's tokens in the cache, so that it follows the writing.
            Otherwise it is handed a cache without them and attends to k and v themselves.
    """

    heads_axis: ClassVar[int]
    writes_first: ClassVar[bool]

    @classmethod
    @abc.abstractmethod
    def empty(cls, config: CacheConfig, shape: LayerShape) -> Self:
        """A cache without tokens."""

    @abc.abstractmethod
    def attend(self, step: Step, q: Array, k: Array, v: Array) -> Array:
        """Attention of the step's tokens, q [B, T, N, D], over what is cached and causally over themselves,
        k and v [B, T, K, D]: [B, T, N, D] in q's dtype."""

    @abc.abstractmethod
    def append(self, step: Step, q: Array, k: Array, v: Array) -> Self:
        """The cache with the step's tokens; every page that they fill is quantized."""

    @abc.abstractmethod
    def decode(self, step: Step, q: Array, k: Array, v: Array) -> tuple[Array, Self]:
        """:meth:`attend` and the insertion of one token per sequence, T = 1. Pages that it fills are left to
        :func:`.flush.flush`, which takes all layers at once."""

    @abc.abstractmethod
    def take_rows(self, rows: Array | None) -> Self:
        """The cache of sequences ``rows`` int32 [X] alone: what is a sequence's own is copied, pages are shared."""

    @abc.abstractmethod
    def copy_rows(self, source: Array, target: Array) -> Self:
        """The cache with sequences ``target`` int32 [X] holding what ``source`` [X] held; targets from B on are passed
        over. Pages are shared."""

    @abc.abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes by part, see :func:`.state.nbytes`."""

    def full_pages(self, lengths: Array) -> Array | None:
        """int32 [B], pages that sequences of ``lengths`` fill; None for a cache without pages."""
        del lengths
        return None


def rows_of(x: Array, rows: Array | None) -> Array:
    """x [B, ...] of sequences ``rows`` int32 [X]; None: all. A padding row reads the last sequence."""
    return x if rows is None else x.at[rows].get(mode="clip")


def copy_rows_of(x: Array, source: Array, target: Array) -> Array:
    """x [B, ...] with entries ``target`` int32 [X] as entries ``source`` [X] were; targets from B on are dropped."""
    return x.at[target].set(x[source], mode="drop") if x.size else x


def size_in_bytes(*trees) -> int:
    """Bytes of all arrays, or of what ``jax.eval_shape`` says of them."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))
