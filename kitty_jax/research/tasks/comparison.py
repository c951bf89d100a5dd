"""The figures of a run over items, with 95 % intervals, and of a cache's run against the full-precision one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest, norm, sem

Rows = Sequence[Mapping[str, Any]]


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, 1927)."""
    low, high = binomtest(successes, count).proportion_ci(method="wilson")
    return float(low), float(high)


def mean_interval(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Normal interval of a mean of independent values, cut to ``low`` and ``high``; all of that for a single value."""
    half = norm.ppf(0.975) * sem(values) if len(values) > 1 else math.inf
    mean = statistics.fmean(values)
    return float(max(mean - half, low)), float(min(mean + half, high))


def accuracy_interval(by_item: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Interval of the accuracy: Wilson's where each item was answered once, else normal over the items' own means."""
    if all(len(answers) == 1 for answers in by_item):
        return wilson(sum(answers[0] for answers in by_item), len(by_item))
    return mean_interval([statistics.fmean(answers) for answers in by_item])


def paired_difference(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Interval of accuracy(first) - accuracy(second) over the same items, from Wilson intervals of the two accuracies
    and their correlation (R. G. Newcombe, 1998, paired differences, square-and-add without continuity correction).

    Args:
        both, first, second, neither: items that both, only the first, only the second, neither got right.
    """
    n = both + first + second + neither
    p, q = (both + first) / n, (both + second) / n
    (low_p, high_p), (low_q, high_q) = wilson(both + first, n), wilson(both + second, n)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = (both * neither - first * second) / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p - q - reach(p - low_p, high_q - q), p - q + reach(high_p - p, q - low_q)


def mcnemar(first: int, second: int) -> float:
    """Two-sided exact p-value that items only the first, and only the second, got right are equally likely."""
    return float(binomtest(first, first + second).pvalue) if first + second else 1.0


def by_item(rows: Rows, value: str = "correct") -> dict[Any, list[Any]]:
    """The ``value`` of each item's rows."""
    out: dict[Any, list[Any]] = {}
    for row in rows:
        out.setdefault(row["item"], []).append(row[value])
    return out


def summarize(rows: Rows) -> dict[str, Any]:
    """Figures of one cache from rows with "item", "correct", "tokens", "ended".

    Returns:
        ``items``, ``answers`` (items times repeats), ``correct`` answers, ``accuracy``, its 95 % ``interval``,
        ``mean_tokens`` generated, ``cut_off``: answers that ran into the limit of new tokens.
    """
    items = list(by_item(rows).values())
    correct = sum(row["correct"] for row in rows)
    return {
        "items": len(items),
        "answers": len(rows),
        "correct": correct,
        "accuracy": correct / len(rows),
        "interval": list(accuracy_interval(items)),
        "mean_tokens": statistics.fmean(row["tokens"] for row in rows),
        "cut_off": sum(row["ended"] == "length" for row in rows),
    }


def compare(full: Rows, cache: Rows) -> dict[str, Any]:
    """A cache's answers against full precision's own, over the (item, repeat) pairs that both have.

    Args:
        full, cache: rows with "key", "item", "correct", "text", and maybe "answer".

    Returns:
        ``answers`` compared; ``both``, ``only_full``, ``only_cache``, ``neither`` right; ``difference``, the cache's
        accuracy minus full precision's, with its 95 % ``difference_interval`` (Newcombe's for paired proportions, or
        over the means of items that were answered several times); ``p``, McNemar's exact test, for items answered once;
        ``same_text``, share of texts that are equal; where there are answers, ``same_answer``, the share of pairs with
        the same answer (no answer at all equals nothing), and its Wilson interval ``same_answer_interval``.
    """
    other = {row["key"]: row for row in cache}
    pairs = [(row, other[row["key"]]) for row in full if row["key"] in other]
    if not pairs:
        raise ValueError("the two runs have no item in common")
    count = len(pairs)
    right = np.array([[bool(a["correct"]), bool(b["correct"])] for a, b in pairs])
    both, only_full = int(right.all(1).sum()), int((right[:, 0] & ~right[:, 1]).sum())
    only_cache, neither = int((right[:, 1] & ~right[:, 0]).sum()), int((~right.any(1)).sum())
    out = {
        "answers": count,
        "both": both,
        "only_full": only_full,
        "only_cache": only_cache,
        "neither": neither,
        "difference": (only_cache - only_full) / count,
        "same_text": sum(a["text"] == b["text"] for a, b in pairs) / count,
    }
    change = [{"item": a["item"], "change": int(b["correct"]) - int(a["correct"])} for a, b in pairs]
    changes = by_item(change, "change")
    if len(changes) == count:
        out["difference_interval"] = list(paired_difference(both, only_cache, only_full, neither))
        out["p"] = mcnemar(only_full, only_cache)
    else:
        out["difference_interval"] = list(mean_interval([statistics.fmean(x) for x in changes.values()], low=-1.0))
    if "answer" in pairs[0][0]:
        same = sum(a["answer"] is not None and a["answer"] == b["answer"] for a, b in pairs)
        out |= {"same_answer": same / count, "same_answer_interval": list(wilson(same, count))}
    return out
