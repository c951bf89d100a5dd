"""Confidence intervals of accuracies, and the comparison of two runs over the same items."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Z95 = statistics.NormalDist().inv_cdf(0.975)


def wilson(successes: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, 1927), 95 % unless ``z`` says otherwise.

    Raises:
        ValueError: ``count`` below 1, or successes outside 0 to count.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"wanted 0 to count successes of 1 or more items, got {successes} of {count}")
    p, square = successes / count, z * z / count
    centre = (p + square / 2) / (1 + square)
    half = z * math.sqrt(p * (1 - p) / count + square / (4 * count)) / (1 + square)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """Normal interval of a mean of independent values; for accuracies of items that were answered several times."""
    mean = statistics.fmean(values)
    half = z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean - half, mean + half


def accuracy_interval(by_item: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % interval of the accuracy: Wilson's where each item was answered once, else over the items' own means."""
    if all(len(answers) == 1 for answers in by_item):
        return wilson(sum(answers[0] for answers in by_item), len(by_item))
    low, high = mean_interval([statistics.fmean(answers) for answers in by_item])
    return max(low, 0.0), min(high, 1.0)


def paired_difference(both: int, first: int, second: int, neither: int, z: float = Z95) -> tuple[float, float]:
    """Interval of accuracy(first) - accuracy(second) over the same items, from Wilson intervals of the two accuracies
    and their correlation (R. G. Newcombe, 1998, paired differences, square-and-add without continuity correction).

    Args:
        both, first, second, neither: items that both, only the first, only the second, neither got right.
        z: normal quantile.
    """
    n = both + first + second + neither
    p, q = (both + first) / n, (both + second) / n
    (low_p, high_p), (low_q, high_q) = wilson(both + first, n, z), wilson(both + second, n, z)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = (both * neither - first * second) / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p - q - reach(p - low_p, high_q - q), p - q + reach(high_p - p, q - low_q)


def mcnemar(first: int, second: int) -> float:
    """Two-sided exact p-value that items only the first, and only the second, got right are equally likely."""
    n = first + second
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(first, second) + 1)) / 2**n)
