"""Summary, tables and figure of bench_generate.py, out of the rows that its processes print. Plain Python; matplotlib
only for the figure.

Rows by ``kind``; those of a phase carry ``phase`` ("generate" or "equal") and ``layers``, all get ``method`` and the
batch as ``asked``:

    start    device, versions                          plan     batch, cache_bytes, weights_bytes, sequence_bytes
    compile  what, trace_s, lower_s, compile_s         memory   peak_bytes, beyond_bytes (where the device tells)
    prefill  seconds                                   sample   batch, wanted, length, step_s, low_s, high_s
    skipped  why                                       error    error
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.tables import markdown

REFERENCE = "full"  # ratios are to our own bfloat16 cache, or to the first method where it was not measured


def document(setup: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything as JSON takes it: ``setup``, ``summary``, ``equal`` and the ``rows`` they are made of."""
    runs: dict[tuple, list[dict]] = {}
    steps: dict[tuple, dict[str, float]] = {}
    for row in rows:
        runs.setdefault((row["method"], row["asked"]), []).append(row)
        if row.get("phase") == "equal" and row["kind"] == "sample":
            steps.setdefault((row["layers"], row["batch"], row["wanted"]), {})[row["method"]] = row["step_s"]
    equal = [{**dict(zip(("layers", "batch", "tokens"), at, strict=True), step_s=s)} for at, s in sorted(steps.items())]
    summary = [summarize(own, setup["prompt"], setup["new"]) for own in runs.values()]
    return {"setup": setup, "summary": summary, "equal": equal, "rows": rows}


def summarize(rows: list[dict[str, Any]], prompt: int, new: int) -> dict[str, Any]:
    """The summary of one configuration, as far as it came.

    ``tokens_per_s`` needs two samples or more; ``complete`` says whether the process came to its end.
    """
    own = [row for row in rows if row.get("phase", "generate") == "generate"]

    def of(kind: str) -> list[dict]:
        return [row for row in own if row["kind"] == kind]

    plan, memory, prefill = ((of(kind) or [{}])[0] for kind in ("plan", "memory", "prefill"))
    samples = sorted((row["length"], row["step_s"]) for row in of("sample"))
    out = {name: rows[0][name] for name in ("method", "asked")}
    out |= {name: plan.get(name) for name in ("batch", "layers", "weights_bytes", "cache_bytes", "sequence_bytes")}
    out |= {name: memory.get(name) for name in ("peak_bytes", "beyond_bytes")}
    out |= {"prefill_s": prefill.get("seconds"), "samples": samples, "generation_s": None, "tokens_per_s": None}
    out["compile_s"] = sum(x["trace_s"] + x["lower_s"] + x["compile_s"] for x in of("compile")) or None
    if len(samples) >= 2 and plan:
        # The prompt gives the first new token, and a step each other one.
        out["generation_s"] = prefill.get("seconds", 0.0) + integrate(samples, prompt, prompt + new - 1)
        out["tokens_per_s"] = out["batch"] * new / out["generation_s"]
    error = next((row["error"] for row in rows if row["kind"] == "error"), None)
    return out | {"error": error, "complete": error is None}


def integrate(samples: Iterable[tuple[float, float]], first: float, last: float) -> float:
    """The integral from ``first`` to ``last`` of the line through (length, seconds of a step) samples: trapezoids
    between them, and the outermost sample's value beyond."""
    points = sorted(samples)
    points = [(min(first, points[0][0]), points[0][1]), *points, (max(last, points[-1][0]), points[-1][1])]

    def at(x: float) -> float:
        (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if x <= pair[1][0])
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1

    corners = [first, *(x for x, _ in points if first < x < last), last]
    return sum((at(x0) + at(x1)) / 2 * (x1 - x0) for x0, x1 in itertools.pairwise(corners))


def saved(paths: Sequence[Path]) -> dict[str, Any]:
    """One document of several saved ones, without their rows.

    Raises:
        ValueError: a file is none, or they measured different generations.
        OSError: a file cannot be read.
    """
    documents = []
    for path in paths:
        try:
            documents.append(json.loads(path.read_text()))
            wanted = {name: documents[-1]["setup"][name] for name in ("model", "prompt", "new", "budget")}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of bench_generate.py --json: {error!r}") from error
        first = {name: documents[0]["setup"][name] for name in wanted}
        if wanted != first:
            raise ValueError(f"{path} measured {wanted}, the first file {first}")
    joined = {name: [x for made in documents for x in made[name]] for name in ("summary", "equal")}
    return {"setup": documents[0]["setup"], **joined}


def tables(made: dict[str, Any]) -> str:
    """The tables of a document, in Markdown."""
    parts = [_generation_table(made)] if any(s["batch"] for s in made["summary"]) else []
    parts += [_equal_table(made["equal"])] if made["equal"] else []
    failed = [s for s in made["summary"] if s["error"]]
    parts += [f"{_name(s)} did not finish: {s['error'].strip().splitlines()[-1][:300]}" for s in failed]
    return "\n\n".join(parts)


def _name(summary: dict) -> str:
    return summary["method"] if summary["asked"] == "max" else f"{summary['method']} ({summary['asked']})"


def _generation_table(made: dict) -> str:
    setup, summary = made["setup"], [s for s in made["summary"] if s["batch"]]
    reference = next((s for s in summary if _name(s) == REFERENCE), summary[0])
    times = f"x {reference['method']}"
    header = ["method", "batch", times, "peak GB", "beyond GB", "cache GB", "compile s", "prefill s", "ms a step"]
    rows = []
    for s in summary:
        sizes = [_number(s[name], 1e9) for name in ("peak_bytes", "beyond_bytes", "cache_bytes")]
        steps = " ".join(f"{seconds * 1e3:.1f}@{length:.0f}" for length, seconds in s["samples"]) or None
        rate = s["tokens_per_s"] and f"{s['tokens_per_s']:,.0f}"
        ratios = [_ratio(s[name], reference[name]) for name in ("batch", "tokens_per_s")]
        row = [_name(s), s["batch"], ratios[0], *sizes, _number(s["compile_s"]), _number(s["prefill_s"]), steps]
        rows.append([*row, rate, ratios[1]])
    title = (
        f"{setup['model']}, {setup['prompt']} prompt tokens and {setup['new']:,} new ones, budget "
        f"{setup['budget'] / 1e9:.1f} GB (ms a step @ tokens cached; rates over the whole generation)"
    )
    return f"{title}\n\n{markdown([*header, 'tokens/s', times], rows)}"


def _equal_table(equal: list[dict]) -> str:
    methods = list(dict.fromkeys(m for row in equal for m in row["step_s"]))
    reference = REFERENCE if REFERENCE in methods else methods[0]
    others = [m for m in methods if m != reference]
    header = ["layers", "batch", "tokens", *(f"{m}, ms" for m in methods), *(f"{reference} / {m}" for m in others)]
    rows = []
    for row in equal:
        steps = row["step_s"]
        ratios = [_ratio(steps.get(reference), steps.get(m)) for m in others]
        sizes = [f"{row[name]:,}" for name in ("layers", "batch", "tokens")]
        rows.append([*sizes, *(_number(steps.get(m), 1e-3) for m in methods), *ratios])
    return f"a step at equal batch\n\n{markdown(header, rows)}"


def _number(value: float | None, unit: float = 1.0) -> str | None:
    return None if value is None else f"{value / unit:,.2f}"


def _ratio(value: float | None, reference: float | None) -> str | None:
    return f"{value / reference:.2f}" if value and reference else None


def figure(path: Path, made: dict[str, Any]) -> None:
    """Figure 5 of arXiv 2511.18643: memory and throughput by batch, for each method; PNG.

    Lines of memory are weights and cache as planned; points are measured peaks (the plan, where no peak is known).

    Raises:
        ImportError: without matplotlib.
        ValueError: nothing was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("no figure: figures need `pip install .[plots]`") from error
    measured = [s for s in made["summary"] if s["tokens_per_s"]]
    if not measured:
        raise ValueError("nothing to draw: no method has samples at two lengths")
    chart = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    memory, rate = chart.subplots(1, 2)
    by_batch = list(dict.fromkeys(s["method"] for s in sorted(measured, key=lambda s: -s["batch"])))
    for index, method in enumerate(dict.fromkeys(s["method"] for s in measured)):
        own = sorted((s for s in measured if s["method"] == method), key=lambda s: s["batch"])
        color, batches, rates = f"C{index}", [s["batch"] for s in own], [s["tokens_per_s"] for s in own]
        planned = [(s["weights_bytes"] + s["cache_bytes"]) / 1e9 for s in own]
        peaks = [s["peak_bytes"] / 1e9 if s["peak_bytes"] else plan for s, plan in zip(own, planned, strict=True)]
        memory.plot([0, *batches], [own[0]["weights_bytes"] / 1e9, *planned], color=color, linewidth=1)
        size = max(10 - 1.5 * index, 3)  # one may hide another
        memory.plot(batches, peaks, "o", color=color, label=method, markersize=size)
        rate.plot(batches, rates, "o-", color=color, linewidth=1, label=method)
        x, side = ((4, "left"), (-4, "right"))[by_batch.index(method) % 2]  # neighbours' numbers apart
        where = {"textcoords": "offset points", "xytext": (x, 4), "ha": side, "color": color}
        rate.annotate(f"{rates[-1]:,.0f}", (batches[-1], rates[-1]), size=8, **where)
    setup = made["setup"]
    memory.axhline(setup["budget"] / 1e9, color="gray", linestyle="--", linewidth=1)
    memory.set(xlabel="batch", ylabel="peak memory, GB", ylim=(0, None))
    rate.margins(x=0.2, y=0.15)
    rate.set(xlabel="batch", ylabel="tokens / s", ylim=(0, None))
    memory.legend(fontsize=8)
    chart.suptitle(f"{setup['model']}: {setup['prompt']} prompt tokens, {setup['new']:,} new ones", fontsize=10)
    chart.savefig(path)
