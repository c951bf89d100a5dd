"""Which request runs where: the host's side of :mod:`.engine`, without a device.

A request waits until a slot is free and, where slots share a pool, until it can be promised pages. The host knows how
many tokens each sequence has cached, so it counts pages without asking the device.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue: token ids, most new tokens, and the seed of its own random numbers."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0


class Piece(NamedTuple):
    """The next tokens of request ``index``; ``ended`` is "eos" or "length" with its last ones, "" before."""

    index: int
    tokens: list[int]
    ended: str


@dataclasses.dataclass
class _Slot:
    """A running request: its number, the pages promised to it when it was admitted, new tokens of this attempt."""

    index: int
    promised: int
    seen: int = 0


class Schedule:
    """What the host knows of a run: which requests wait, which slot has which, how many pages are promised.

    Args:
        requests: checked; each fits the pool by itself.
        pages: cached tokens -> pages they fill.
        slots, groups: B, and the equal groups that they are split into, each with its own pages.
        pool: pages of each group, or None where every slot owns its own.
        overcommit: see :class:`.engine.Engine`.
        eos: ids that end a sequence.
    """

    def __init__(
        self,
        requests: list[Request],
        pages: Callable[[int], int],
        slots: int,
        groups: int,
        pool: int | None,
        overcommit: bool,
        eos: set[int],
    ):
        self._requests, self._pages, self._pool, self._overcommit, self._eos = requests, pages, pool, overcommit, eos
        self._queue = list(range(len(requests)))  # a heap: the oldest request is always the next
        self._slots: list[_Slot | None] = [None] * slots
        own = slots // groups
        self._groups = [range(g * own, (g + 1) * own) for g in range(groups)]
        self._given = [0] * len(requests)  # new tokens of each request that were handed out

    @property
    def waiting(self) -> bool:
        """Whether a request has no slot."""
        return bool(self._queue)

    @property
    def unfinished(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._queue) or any(slot is not None for slot in self._slots)

    def request(self, row: int) -> Request:
        """The request in a slot."""
        return self._requests[self._slots[row].index]

    def admit(self) -> list[int]:
        """Gives slots to waiting requests, oldest first, and returns the rows. One that does not fit yet holds up all
        behind it, or a long one would never have its turn."""
        rows = []
        while self._queue and (row := self._place(self._queue[0])) is not None:
            index = heapq.heappop(self._queue)
            self._slots[row] = _Slot(index, self._promise(index))
            rows.append(row)
        return rows

    def _place(self, index: int) -> int | None:
        """A free row of the group with the most free rows among those with enough pages."""
        free = [[row for row in rows if self._slots[row] is None] for rows in self._groups]
        fits = [rows for g, rows in enumerate(free) if rows and self._promise(index) <= self._unpromised(g)]
        return max(fits, key=len)[0] if fits else None

    def _most(self, index: int) -> int:
        """Pages that a request can fill; its last new token is not cached."""
        return self._pages(len(self._requests[index].prompt) + self._requests[index].max_new_tokens - 1)

    def _promise(self, index: int) -> int:
        if not self._overcommit:
            return self._most(index)
        # One that is run anew is sure to get as far as it was.
        return min(self._most(index), self._pages(len(self._requests[index].prompt) + self._given[index]) + 1)

    def _held(self, slot: _Slot) -> int:
        return self._pages(len(self._requests[slot.index].prompt) + max(slot.seen - 1, 0))

    def _unpromised(self, group: int) -> float:
        if self._pool is None:
            return float("inf")
        slots = [self._slots[row] for row in self._groups[group] if self._slots[row] is not None]
        return self._pool - sum(max(s.promised, min(self._held(s) + 1, self._most(s.index))) for s in slots)

    def seen(self) -> np.ndarray:
        """int32 [B], new tokens of each slot that have been read."""
        return np.array([slot.seen if slot else 0 for slot in self._slots], np.int32)

    def until(self, chunk: int) -> np.ndarray:
        """int32 [B], new tokens of each slot after ``chunk`` more steps; a prompt step gave one already."""
        aims = [
            min(slot.seen + chunk + (slot.seen == 0), self._requests[slot.index].max_new_tokens) if slot else 0
            for slot in self._slots
        ]
        return np.array(aims, np.int32)

    def read(self, tokens: np.ndarray, going: np.ndarray) -> tuple[list[Piece], np.ndarray, np.ndarray]:
        """Takes in what :func:`.generate_loop.progress` read from :meth:`seen` on.

        Returns:
            Pieces to hand out; bool [B], rows to empty; bool [B], rows that were refused a page and can go on now.
        """
        pieces, refused = [], []
        vacant = np.zeros(len(self._slots), bool)
        for row, slot in enumerate(self._slots):
            if slot is None:
                continue
            new = tokens[row][tokens[row] >= 0].tolist()
            again = max(self._given[slot.index] - slot.seen, 0)  # handed out before it was run anew
            slot.seen += len(new)
            self._given[slot.index] = max(self._given[slot.index], slot.seen)
            ended = ""
            if new and new[-1] in self._eos:
                ended = "eos"
            elif slot.seen == self._requests[slot.index].max_new_tokens:
                ended = "length"
            elif not going[row]:
                refused.append(row)
            if ended:
                self._slots[row], vacant[row] = None, True
            if new[again:] or ended:
                pieces.append(Piece(slot.index, new[again:], ended))
        if refused and not self._overcommit:
            raise RuntimeError(f"slots {refused} were refused pages that had been promised to them")
        for group in self._groups:
            vacant[self._send_back(group, [row for row in refused if row in group])] = True
        resumed = np.zeros_like(vacant)
        resumed[refused] = True
        return pieces, vacant, resumed & ~vacant

    def _send_back(self, group: range, refused: list[int]) -> list[int]:
        """Puts the youngest requests of a group back into the queue until each refused row can have a page.

        The oldest never goes back: it fits the pool alone. So every run ends.
        """
        rows = []
        while refused:
            running = [row for row in group if self._slots[row] is not None]
            if self._pool - sum(self._held(self._slots[row]) for row in running) >= len(refused):
                break
            row = max(running, key=lambda r: self._slots[r].index)
            heapq.heappush(self._queue, self._slots[row].index)
            self._slots[row] = None
            refused = [r for r in refused if r != row]
            rows.append(row)
        return rows
