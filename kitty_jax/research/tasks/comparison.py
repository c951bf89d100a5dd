"""The figures of a run over items, and of a cache's run against the full-precision one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kitty_jax.research.tasks.intervals import accuracy_interval, mcnemar, mean_interval, paired_difference, wilson

Rows = Sequence[Mapping[str, Any]]


def summarize(rows: Rows) -> dict[str, Any]:
    """Figures of one cache from rows with "item", "correct", "tokens", "ended".

    Returns:
        ``items``, ``answers`` (items times repeats), ``correct`` answers, ``accuracy``, its 95 % ``interval``,
        ``mean_tokens`` generated, ``cut_off``: answers that ran into the limit of new tokens.
    """
    by_item = _by_item(rows)
    correct = sum(row["correct"] for row in rows)
    return {
        "items": len(by_item),
        "answers": len(rows),
        "correct": correct,
        "accuracy": correct / len(rows),
        "interval": list(accuracy_interval(list(by_item.values()))),
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
    both = sum(a["correct"] and b["correct"] for a, b in pairs)
    only_full = sum(a["correct"] and not b["correct"] for a, b in pairs)
    only_cache = sum(b["correct"] and not a["correct"] for a, b in pairs)
    neither = count - both - only_full - only_cache
    out = {
        "answers": count,
        "both": both,
        "only_full": only_full,
        "only_cache": only_cache,
        "neither": neither,
        "difference": (only_cache - only_full) / count,
        "same_text": sum(a["text"] == b["text"] for a, b in pairs) / count,
    }
    by_item: dict[Any, list[int]] = {}
    for a, b in pairs:
        by_item.setdefault(a["item"], []).append(int(b["correct"]) - int(a["correct"]))
    if len(by_item) == count:
        out["difference_interval"] = list(paired_difference(both, only_cache, only_full, neither))
        out["p"] = mcnemar(only_full, only_cache)
    else:
        low, high = mean_interval([statistics.fmean(d) for d in by_item.values()])
        out["difference_interval"] = [max(low, -1.0), min(high, 1.0)]
    if "answer" in pairs[0][0]:
        same = sum(a["answer"] is not None and a["answer"] == b["answer"] for a, b in pairs)
        out |= {"same_answer": same / count, "same_answer_interval": list(wilson(same, count))}
    return out


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Results by cache, each from :func:`summarize` with :func:`compare` under "against_full", as Markdown."""
    lines = [
        "| cache | items | accuracy % (95 % interval) | against full, points (95 % interval) | right / wrong only here "
        "| same answer % | cut off | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        pair = row.get("against_full")
        difference = wrong = same = ""
        if pair:
            difference = f"{100 * pair['difference']:+.1f} ({_percent(pair['difference_interval'])})"
            wrong = f"{pair['only_cache']} / {pair['only_full']}"
            same = f"{100 * pair['same_answer']:.1f}" if "same_answer" in pair else ""
        lines.append(
            f"| {name} | {row['items']} | {100 * row['accuracy']:.1f} ({_percent(row['interval'])}) | {difference} | "
            f"{wrong} | {same} | {row['cut_off']} | {row['mean_tokens']:.0f} |"
        )
    return "\n".join(lines)


def _percent(interval: Sequence[float]) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"


def _by_item(rows: Rows) -> dict[Any, list[bool]]:
    out: dict[Any, list[bool]] = {}
    for row in rows:
        out.setdefault(row["item"], []).append(bool(row["correct"]))
    return out
