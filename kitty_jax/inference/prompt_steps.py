"""Cutting prompts into steps of a bounded number of tokens, of shapes that recur.

Prompts of like length go together, longest first. Padded lengths and numbers of rows are powers of two, so that few
shapes are compiled whatever the prompts are; a prompt longer than the budget is cut into parts of the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kitty_jax.inference.prompts import BUCKET, bucket

PREFILL_TOKENS = 8192  # default budget of tokens, padding included, in one step


@dataclasses.dataclass(frozen=True)
class PromptStep:
    """Some tokens of some prompts, which are cached at once.

    Attributes:
        tokens: int32 [X, T], right-padded.
        lengths: int32 [X], real tokens; 0 in padding rows.
        rows: int32 [X], the sequences, counted within each of the mesh's groups; None where they are all in order.
        ends: bool [X], rows whose prompt ends here.
        fresh: whether the rows' sequences are empty before.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray | None
    ends: np.ndarray
    fresh: bool


def power_of_two(n: int) -> int:
    """The smallest power of two from ``n`` on."""
    return 1 << max(n - 1, 0).bit_length()


def prompt_steps(
    prompts: Sequence[np.ndarray],
    rows: Sequence[int],
    *,
    batch: int,
    groups: int = 1,
    budget: int = PREFILL_TOKENS,
) -> list[PromptStep]:
    """The steps that cache prompts.

    Args:
        prompts: token ids, int32 [length] each, 1 token or more.
        rows: the sequence of each prompt, 0 to ``batch`` - 1.
        batch: sequences of the state, a multiple of ``groups``.
        groups: places of the mesh's "data" axis.
        budget: most tokens of a step on one device, padding included, BUCKET or more. A prompt longer than the power of
            two below it is cut into parts of that, so that the cuts do not depend on the prompts beside it.
    """
    if budget < BUCKET:
        raise ValueError(f"the budget of a prompt step must be {BUCKET} tokens or more, got {budget}")
    if not prompts:
        return []
    most = 1 << (budget.bit_length() - 1)
    longest = max(map(len, prompts))
    if longest <= most and groups == 1 and list(rows) == list(range(batch)) and batch * bucket(longest) <= budget:
        whole = _step([list(rows)], prompts, rows, batch, batch, 0, bucket(longest))
        return [dataclasses.replace(whole, rows=None)]
    own = batch // groups
    queues = [
        sorted((i for i, row in enumerate(rows) if row // own == g), key=lambda i: -len(prompts[i]))
        for g in range(groups)
    ]
    steps: list[PromptStep] = []
    while any(queues):
        longest = max(len(prompts[q[0]]) for q in queues if q)
        width = min(power_of_two(max(longest, BUCKET)), most)
        count = 1 if longest > width else most // width
        count = min(count, power_of_two(max(map(len, queues))))
        taken = [[q.pop(0) for _ in range(min(count, len(q)))] for q in queues]
        steps += [_step(taken, prompts, rows, own, count, begin, width) for begin in range(0, longest, width)]
    return steps


def _step(taken, prompts, rows, own: int, count: int, begin: int, width: int) -> PromptStep:
    """Tokens ``begin`` to ``begin + width`` of the prompts ``taken`` of each group, ``count`` rows a group."""
    size = len(taken) * count
    tokens, lengths = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
    row_of, ends = np.full(size, own, np.int32), np.zeros(size, bool)
    for g, some in enumerate(taken):
        for j, i in enumerate(some, start=g * count):
            part = prompts[i][begin : begin + width]
            if not len(part):  # a shorter prompt beside a long one of another group
                continue
            tokens[j, : len(part)], lengths[j] = part, len(part)
            row_of[j] = rows[i] % own
            ends[j] = len(prompts[i]) <= begin + width
    return PromptStep(tokens, lengths, row_of, ends, begin == 0)
