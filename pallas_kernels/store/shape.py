"""What the quantize-and-pack kernel knows before it runs: the page's shape and the layout of shared memory."""

from __future__ import annotations

import dataclasses
import functools

from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.ptx import THREADS

PAGE = 128  # tokens of a page, the only size the kernel takes
UNROLL = 16  # elements of one pass through a loop over a unit


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """What is fixed when the kernel is built.

    Attributes:
        fmt: page format.
        is_keys: whether units are channels of keys; else tokens of values.
        kv_heads, pool: K and M.
        slots: W, tokens that an entry of the values' array has; the page begins at a run-time one of them.
        kind: "bf16", "f16" or "f32", the dtype of the page.
        score: how channels are scored, or None where scores are given.
        weighted: whether scores are multiplied by given weights.
        shrink: factors of a unit's range to try.
    """

    fmt: PageFormat
    is_keys: bool
    kv_heads: int
    pool: int
    slots: int
    kind: str
    score: str | None = "magnitude"
    weighted: bool = False
    shrink: tuple[float, ...] = (1.0,)

    @property
    def units(self) -> int:
        return self.fmt.head_dim if self.is_keys else self.fmt.page

    @property
    def elements(self) -> int:
        return self.fmt.page if self.is_keys else self.fmt.head_dim

    @property
    def boosted(self) -> int:
        """Units with 4-bit codes."""
        return self.fmt.boosted if self.is_keys else self.units * (self.fmt.value_bits == 4)

    @property
    def chooses(self) -> bool:
        """Whether some units are boosted and others are not."""
        return 0 < self.boosted < self.units

    @property
    def parts(self) -> dict:
        return self.fmt.key_parts if self.is_keys else self.fmt.value_parts

    @property
    def words(self) -> int:
        return self.fmt.key_words if self.is_keys else self.fmt.value_words

    @property
    def itemsize(self) -> int:
        return 4 if self.kind == "f32" else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.fmt.head_dim * self.itemsize

    @property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory: a word more, so that lanes read different banks either way."""
        return self.row_bytes + 4

    @property
    def code_pitch(self) -> int:
        """Bytes from element to element of the codes [elements, units], against bank conflicts of the packing."""
        return self.units + (1 if self.is_keys else 4)

    @functools.cached_property
    def smem(self) -> dict[str, int]:
        """Offsets in shared memory by name, and ``total``. Partial sums and codes are not needed at once."""
        sizes = {
            "tile": PAGE * self.pitch,
            "sums": max(4 * UNROLL * THREADS, self.elements * self.code_pitch),
            "scores": 4 * self.units,
            "ranks": 4 * self.units,
            "channels": self.units,
            "warps": 16,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name], end = end, end + -(-size // 16) * 16
        return offsets | {"total": end}
