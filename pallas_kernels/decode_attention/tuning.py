"""Tuning of the kernels, by device and shape."""

from __future__ import annotations

import dataclasses

import jax

from kitty_jax.pallas_kernels.decode_attention.shape import PAIR_PAGES

SHARED_MEMORY = 233_472  # bytes a multiprocessor has for its blocks (compute capability 9.0)
RESERVED_PER_BLOCK = 1_024


@dataclasses.dataclass(frozen=True)
class DecodeTuning:
    """How decode attention is split.

    Attributes:
        multiprocessors: of the device.
        blocks_per_multiprocessor: at most; registers set it, shared memory may lower it.
        whole_pages, pair_pages: pages of a sequence up to which one block takes it (for each KV head), and up to which
        two do where there is a multiprocessor for each: a second kernel to merge would cost more than some pages in
        a row.
        long_waves, short_waves: blocks to aim at, in blocks the device runs at once, when there are many pages a
        block, and few.
        splits: fixed number of splits instead, or 0.
    """

    multiprocessors: int = 132
    blocks_per_multiprocessor: int = 4
    whole_pages: int = 4
    pair_pages: int = PAIR_PAGES
    long_waves: float = 2.0
    short_waves: float = 0.5
    splits: int = 0


LONG_PAGES = 64  # pages of a warp, without splits, from which a sequence is long


DECODE_TUNINGS: dict[str, DecodeTuning] = {
    "NVIDIA H200": DecodeTuning(),
    "NVIDIA H100 80GB HBM3": DecodeTuning(),
    "NVIDIA H100 PCIe": DecodeTuning(multiprocessors=114),
}


def decode_tuning() -> DecodeTuning:
    """The tuning of the default device; the H200's where there is no GPU or none that was measured."""
    return DECODE_TUNINGS.get(jax.devices()[0].device_kind, DecodeTuning())


def decode_splits(tuning: DecodeTuning, *, work_items: int, pages: int, warps: int, smem_bytes: int) -> int:
    """Blocks that share one sequence and KV head.

    Lengths are not known when the kernel is built, so the longest sequence that the page table has room for counts.
    One block a work item is best where that fills the device: nothing has to be merged.
    """
    if tuning.splits:
        return tuning.splits
    per_sm = max(1, min(tuning.blocks_per_multiprocessor, SHARED_MEMORY // (smem_bytes + RESERVED_PER_BLOCK)))
    slots = tuning.multiprocessors * per_sm
    if work_items >= slots or pages <= tuning.whole_pages:
        return 1
    if pages <= tuning.pair_pages:
        return 2 if work_items <= tuning.multiprocessors else 1
    waves = tuning.long_waves if work_items * pages // warps > LONG_PAGES * slots // 4 else tuning.short_waves
    return max(1, min(-(-pages // warps), round(waves * slots / work_items)))
