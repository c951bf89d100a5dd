"""Which request runs where: the host's side of :mod:`.engine`, without a device.

A request waits until a slot is free and, where slots share a pool, until pages can be reserved for it. The host knows
how many tokens each sequence has cached, so it counts pages without asking the device.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kitty_jax.inference.detokenize import StoppedText


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids.
        max_new_tokens: most new tokens.
        seed: of its own random numbers.
        stop: texts that end it; its text is cut before the first of them. They need an engine with ``decode``.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    stop: Sequence[str] = ()


class Piece(NamedTuple):
    """The next tokens of request ``index``.

    ``ended`` is "eos", "stop" or "length" with its last ones, "" before. After a stop string, the tokens up to the next
    look at the sequence are among them. ``text``: with the last ones, and where the engine has ``decode``, all new text
    of the request without stop string; None otherwise.
    """

    index: int
    tokens: list[int]
    ended: str
    text: str | None = None


@dataclasses.dataclass
class _Job:
    """A request on its way: its text, new tokens that were handed out, new tokens of this attempt, reserved pages."""

    index: int
    request: Request
    text: StoppedText | None
    given: int = 0
    seen: int = 0
    reserved: int = 0


class Scheduler:
    """What the host knows of a run: which requests wait, which slot has which, how many pages are reserved.

    Args:
        requests: checked; each fits the pool by itself.
        pages: cached tokens -> pages they fill.
        slots, groups: B, and the equal groups that they are split into, each with its own pages.
        pool: pages of each group, or None where every slot owns its own.
        overcommit, decode: see :class:`.engine.Engine`.
        eos: ids that end a sequence.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pages: Callable[[int], int],
        *,
        slots: int,
        groups: int,
        pool: int | None,
        overcommit: bool,
        eos: set[int],
        decode: Callable[[list[int]], str] | None = None,
    ):
        self._pages, self._pool, self._overcommit, self._eos = pages, pool, overcommit, eos
        self._jobs = [_Job(i, r, StoppedText(decode, r.stop) if decode else None) for i, r in enumerate(requests)]
        self._queue = list(range(len(self._jobs)))  # a heap: the oldest request is always the next
        self._slots: list[_Job | None] = [None] * slots
        own = slots // groups
        self._groups = [range(g * own, (g + 1) * own) for g in range(groups)]

    @property
    def waiting(self) -> bool:
        """Whether a request has no slot."""
        return bool(self._queue)

    @property
    def unfinished(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._queue) or any(self._slots)

    def request(self, row: int) -> Request:
        """The request in a slot."""
        return self._slots[row].request

    def admit(self) -> list[int]:
        """Gives slots to waiting requests, oldest first, and returns the rows. One that does not fit yet holds up all
        behind it, or a long one would wait for ever."""
        rows = []
        while self._queue and (row := self._place(self._jobs[self._queue[0]])) is not None:
            job = self._slots[row] = self._jobs[heapq.heappop(self._queue)]
            job.seen, job.reserved = 0, self._needed(job)
            rows.append(row)
        return rows

    def _place(self, job: _Job) -> int | None:
        """A free row of the group with the most free rows among those with enough pages."""
        free = [[row for row in rows if self._slots[row] is None] for rows in self._groups]
        fits = [rows for g, rows in enumerate(free) if rows and self._needed(job) <= self._unreserved(g)]
        return max(fits, key=len)[0] if fits else None

    def _most(self, job: _Job) -> int:
        """Pages that a request can fill; its last new token is not cached."""
        return self._pages(len(job.request.prompt) + job.request.max_new_tokens - 1)

    def _needed(self, job: _Job) -> int:
        """Pages to reserve for a request that begins. One that is recomputed is sure to get as far as it was."""
        if not self._overcommit:
            return self._most(job)
        return min(self._most(job), self._pages(len(job.request.prompt) + job.given) + 1)

    def _held(self, job: _Job) -> int:
        return self._pages(len(job.request.prompt) + max(job.seen - 1, 0))

    def _unreserved(self, group: int) -> float:
        if self._pool is None:
            return float("inf")
        jobs = [self._slots[row] for row in self._groups[group] if self._slots[row]]
        return self._pool - sum(max(job.reserved, min(self._held(job) + 1, self._most(job))) for job in jobs)

    def seen(self) -> np.ndarray:
        """int32 [B], new tokens of each slot that have been read."""
        return np.array([job.seen if job else 0 for job in self._slots], np.int32)

    def until(self, chunk: int) -> np.ndarray:
        """int32 [B], new tokens of each slot after ``chunk`` more steps; a prompt step gave one already."""
        aims = [
            min(job.seen + chunk + (job.seen == 0), job.request.max_new_tokens) if job else 0 for job in self._slots
        ]
        return np.array(aims, np.int32)

    def read(self, tokens: np.ndarray, active: np.ndarray) -> tuple[list[Piece], np.ndarray, np.ndarray]:
        """Takes in what :func:`.decode_loop.progress` read from :meth:`seen` on.

        Returns:
            Pieces to hand out; bool [B], rows to empty; bool [B], rows that were refused a page and can go on now.
        """
        pieces, refused = [], []
        done, retry = np.zeros(len(self._slots), bool), np.zeros(len(self._slots), bool)
        for row, job in enumerate(self._slots):
            if job is None:
                continue
            new = tokens[row][tokens[row] >= 0].tolist()
            fresh = new[max(job.given - job.seen, 0) :]  # the others were handed out before it was recomputed
            job.seen += len(new)
            job.given = max(job.given, job.seen)
            ended = self._ended(job, fresh)
            if ended:
                self._slots[row], done[row] = None, True
            elif not active[row]:
                refused.append(row)
            if fresh or ended:
                pieces.append(Piece(job.index, fresh, ended, job.text.finish() if ended and job.text else None))
        if refused and not self._overcommit:
            raise RuntimeError(f"slots {refused} were refused pages that had been reserved for them")
        retry[refused] = True
        for group in self._groups:
            done[self._preempt(group, [row for row in refused if row in group])] = True
        return pieces, done, retry & ~done

    def _ended(self, job: _Job, new: list[int]) -> str:
        if job.text and job.text.push(new):
            return "stop"
        if new and new[-1] in self._eos:
            return "eos"
        return "length" if job.seen == job.request.max_new_tokens else ""

    def _preempt(self, group: range, refused: list[int]) -> list[int]:
        """Puts the youngest requests of a group back into the queue until each refused row can have a page.

        The oldest never goes back: it fits the pool alone. So every run ends.
        """
        rows = []
        while refused:
            running = [row for row in group if self._slots[row]]
            if self._pool - sum(self._held(self._slots[row]) for row in running) >= len(refused):
                break
            row = max(running, key=lambda r: self._slots[r].index)
            heapq.heappush(self._queue, self._slots[row].index)
            self._slots[row] = None
            refused = [r for r in refused if r != row]
            rows.append(row)
        return rows
