"""Checks, on the host and before anything compiles, of prompts and of what goes with them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import numpy as np

BUCKET = 64  # smallest padded length, and the step of padded lengths up to 512
EOS_SLOTS = 8  # eos ids are padded to a multiple of this, so that their number compiles nothing


def bucket(n: int) -> int:
    """The padded length for ``n``: a multiple of 64 up to 512, then of a quarter of the power of two below ``n``.

    Less than a quarter is wasted above 256, and all lengths up to 32,768 share 32 shapes.
    """
    step = max(BUCKET, (1 << (n - 1).bit_length()) // 8)
    return -(-n // step) * step


def check_prompts(token_ids, lengths=None, vocab_size: int | None = None) -> list[np.ndarray]:
    """Checks token ids.

    Args:
        token_ids: integers [B, T], right-padded, or a sequence of B sequences of integers.
        lengths: integers [B], real tokens of each row, 1 to its size; by default every row is as long as it is given.
        vocab_size: V; ids must be below it. Padding is not looked at.

    Returns:
        The ids of each prompt, int32 [length].

    Raises:
        ValueError: says which row is wrong, what it holds and what was wanted.
    """
    rows = _rows(token_ids)
    if not rows:
        raise ValueError("no prompts: token_ids must hold at least one row, got a batch of 0")
    if lengths is not None:
        rows = [row[:n] for row, n in zip(rows, _lengths(lengths, [len(row) for row in rows]), strict=True)]
    for b, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"empty prompt: row {b} of {len(rows)} holds no tokens; every prompt needs at least one")
        if vocab_size is not None and (outside := (row < 0) | (row >= vocab_size)).any():
            at = int(np.argmax(outside))
            raise ValueError(
                f"token id {row[at]} at position {at} of row {b} is outside the vocabulary of {vocab_size} tokens; "
                f"wanted 0 to {vocab_size - 1} (is this the model's own tokenizer?)"
            )
    return [row.astype(np.int32) for row in rows]


def _rows(token_ids) -> list[np.ndarray]:
    if isinstance(token_ids, (np.ndarray, jax.Array)):
        ids = np.asarray(token_ids)
        if ids.ndim != 2:
            raise ValueError(f"token_ids must have shape [B, T], got {ids.shape}; a single prompt is token_ids[None]")
        _check_integer(ids, "token_ids")
        return list(ids)
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise ValueError(
            f"token_ids must be an integer array [B, T] or a list of lists of integers, got "
            f"{type(token_ids).__name__}; text has to go through the model's tokenizer first"
        )
    rows = []
    for b, row in enumerate(token_ids):
        if isinstance(row, numbers.Number):
            raise ValueError("token_ids must be a list of prompts, each a list of integers: wrap a single one as [ids]")
        if isinstance(row, (str, bytes)):
            raise ValueError(f"row {b} of token_ids is text ({row!r:.40}); wanted token ids from the model's tokenizer")
        ids = np.asarray(row)
        if ids.ndim != 1:
            raise ValueError(f"row {b} of token_ids must be one sequence of integers, got shape {ids.shape}")
        if ids.size:  # an empty list is an array of floats
            _check_integer(ids, f"row {b} of token_ids")
        rows.append(ids)
    return rows


def _check_integer(ids: np.ndarray, what: str) -> None:
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{what} must hold integers, got {ids.dtype}")


def _lengths(lengths, sizes: list[int]) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.shape != (len(sizes),):
        raise ValueError(f"lengths must have one entry per prompt, shape ({len(sizes)},), got shape {lengths.shape}")
    _check_integer(lengths, "lengths")
    for b, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if not 1 <= length <= size:
            problem = "an empty prompt" if length == 0 else f"but the row has {size} tokens"
            raise ValueError(f"lengths[{b}] is {length}, {problem}; wanted 1 to {size}")
    return lengths


def check_capacity(lengths: Sequence[int], max_new_tokens: int, capacity: int | None) -> int:
    """The capacity to use: the given one if every prompt and its new tokens fit, or one that fits, rounded up.

    Raises:
        ValueError: ``max_new_tokens`` below 1, or a capacity that is too small.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    row, longest = max(enumerate(lengths), key=lambda pair: pair[1])
    if capacity is None:
        return bucket(longest + int(max_new_tokens))
    check_whole("capacity", capacity, 1)
    if longest + max_new_tokens > capacity:
        fewer = f", or ask for at most {capacity - longest} new tokens" if longest < capacity else ""
        raise ValueError(
            f"the prompt of row {row} has {longest} tokens, and with max_new_tokens {max_new_tokens} needs a capacity "
            f"of {longest + max_new_tokens}, but it is {capacity}; raise capacity or shorten the prompt{fewer}"
        )
    return int(capacity)


def check_whole(name: str, value, least: int) -> None:
    """Raises a ValueError unless ``value`` is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")


def check_eos(eos, vocab_size: int) -> np.ndarray:
    """int32 ids that end a sequence, padded with -1, from None, an id or a sequence of ids."""
    ids = np.asarray([] if eos is None else eos)
    ids = ids.reshape(1) if ids.ndim == 0 else ids
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"eos must be a token id, a sequence of token ids or None, got {eos!r}")
    for value in ids:
        if not 0 <= value < vocab_size:
            raise ValueError(f"eos {value} is outside the vocabulary of {vocab_size} tokens")
    slots = max(-(-ids.size // EOS_SLOTS), 1) * EOS_SLOTS
    return np.concatenate([ids.astype(np.int32), np.full(slots - ids.size, -1, np.int32)])


def check_seeds(seed, batch: int, padded: int | None = None) -> np.ndarray:
    """uint32 [B] seeds: ``seed + b`` for row b, or the given ones; followed by zeros up to ``padded``."""
    seeds = np.asarray(seed)
    if seeds.dtype.kind not in "iu" or seeds.shape not in ((), (batch,)):
        raise ValueError(f"seed must be an integer or {batch} integers, one per prompt, got {seed!r}")
    if (seeds < 0).any() or (seeds >= 2**32).any():
        raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {seed!r}")
    seeds = seeds.astype(np.int64)
    if not seeds.ndim:
        seeds = seeds + np.arange(batch)
    return np.pad((seeds % 2**32).astype(np.uint32), (0, (padded or batch) - batch))
