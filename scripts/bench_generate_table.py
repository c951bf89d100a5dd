"""Tables, JSON and the figure of bench_generate.py, out of its rows. Plain Python; matplotlib only for the figure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench_generate_common import generation_seconds

REFERENCE = "full"  # ratios are to our own bfloat16 cache, or to the first method where it was not measured


def summarize(rows: Iterable[dict[str, Any]], prompt: int, new: int) -> list[dict[str, Any]]:
    """One summary for every configuration (``method``, ``asked`` batch): of its last attempt, as far as it came.

    ``tokens_per_s`` needs two samples or more; ``complete`` says whether the process came to its end.
    """
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (row["method"], row["asked"])
        if key not in runs or runs[key][-1]["run"] != row["run"]:
            runs[key] = []
        runs[key].append(row)
    return [_summary(*key, own, prompt, new) for key, own in runs.items()]


def _summary(method: str, asked: str, rows: list[dict], prompt: int, new: int) -> dict[str, Any]:
    own = [row for row in rows if row.get("phase", "generate") == "generate"]

    def first(kind: str) -> dict:
        return next((row for row in own if row["kind"] == kind), {})

    plan, memory, prefill = first("plan"), first("memory"), first("prefill")
    samples = sorted((row["length"], row["step_s"]) for row in own if row["kind"] == "sample")
    compiled = [row for row in own if row["kind"] == "compile"]
    out = {
        "method": method,
        "asked": asked,
        "batch": plan.get("batch"),
        "layers": plan.get("layers"),
        "weights_bytes": plan.get("weights_bytes"),
        "cache_bytes": plan.get("cache_bytes"),
        "sequence_bytes": plan.get("sequence_bytes"),
        "peak_bytes": memory.get("peak_bytes"),
        "beyond_bytes": memory.get("beyond_bytes"),
        "fits": memory.get("fits"),
        "prefill_s": prefill.get("seconds"),
        "samples": samples,
        "compile_s": sum(x["trace_s"] + x["lower_s"] + x["compile_s"] for x in compiled) if compiled else None,
        "generation_s": None,
        "tokens_per_s": None,
        "error": next((row["error"] for row in rows if row["kind"] == "error"), None),
        "complete": not any(row["kind"] == "error" for row in rows),
    }
    if len(samples) >= 2 and out["batch"]:
        out["generation_s"] = generation_seconds(prompt, new, prefill.get("seconds", 0.0), samples)
        out["tokens_per_s"] = out["batch"] * new / out["generation_s"]
    return out


def equal_steps(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, int, int], dict[str, float]]:
    """(layers, batch, tokens) -> method -> seconds of a step, of the phase at equal batch."""
    out: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        if row.get("phase") == "equal" and row["kind"] == "sample":
            out.setdefault((row["layers"], row["batch"], row["wanted"]), {})[row["method"]] = row["step_s"]
    return dict(sorted(out.items()))


def document(setup: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything as JSON takes it: ``setup``, ``summary``, ``equal`` and the ``rows`` they are made of."""
    equal = [
        {"layers": layers, "batch": batch, "tokens": tokens, "step_s": steps}
        for (layers, batch, tokens), steps in equal_steps(rows).items()
    ]
    return {
        "setup": setup,
        "summary": summarize(rows, setup["prompt"], setup["new"]),
        "equal": equal,
        "rows": rows,
    }


def write(path: Path, text: str) -> None:
    """The whole file or none of it, so that a killed run leaves the last complete one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: Path, setup: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    write(path, json.dumps(document(setup, rows), indent=1) + "\n")


def saved(paths: Sequence[Path]) -> dict[str, Any]:
    """One document of several, as :func:`write_json` wrote them, without their rows.

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
        first = documents[0]["setup"]
        if any(first[name] != value for name, value in wanted.items()):
            raise ValueError(f"{path} measured {wanted}, the first file { ({name: first[name] for name in wanted}) }")
    return {"setup": first} | {name: [x for made in documents for x in made[name]] for name in ("summary", "equal")}


def tables(made: dict[str, Any]) -> str:
    """The tables of a document, in Markdown."""
    parts = []
    if any(s["batch"] for s in made["summary"]):
        parts.append(_generation_table(made))
    if made["equal"]:
        parts.append(_equal_table(made["equal"]))
    failed = [s for s in made["summary"] if s["error"]]
    parts += [f"{_name(s)} did not finish: {s['error'].strip().splitlines()[-1][:300]}" for s in failed]
    return "\n\n".join(parts)


def _name(summary: dict) -> str:
    return summary["method"] if summary["asked"] == "max" else f"{summary['method']} ({summary['asked']})"


def _generation_table(made: dict) -> str:
    summary = [s for s in made["summary"] if s["batch"]]
    reference = next((s for s in summary if (s["method"], s["asked"]) == (REFERENCE, "max")), summary[0])
    name = reference["method"]
    header = f"method,batch,x {name},peak GB,beyond GB,cache GB,compile s,prefill s,ms a step,tokens/s,x {name}".split(
        ","
    )
    lines = []
    for s in summary:
        step = " ".join(f"{seconds * 1e3:.1f}@{length:.0f}" for length, seconds in s["samples"])
        lines.append(
            [
                _name(s),
                str(s["batch"]),
                _ratio(s["batch"], reference["batch"]),
                *(_number(s[x], 1e9) for x in ("peak_bytes", "beyond_bytes", "cache_bytes")),
                *(_number(s[x]) for x in ("compile_s", "prefill_s")),
                step or "-",
                "-" if s["tokens_per_s"] is None else f"{s['tokens_per_s']:,.0f}",
                _ratio(s["tokens_per_s"], reference["tokens_per_s"]),
            ]
        )
    setup = made["setup"]
    title = (
        f"{setup['model']}, {setup['prompt']} prompt tokens and {setup['new']:,} new ones, budget "
        f"{setup['budget'] / 1e9:.1f} GB (ms a step @ tokens cached; rates over the whole generation)"
    )
    return f"{title}\n\n{markdown(header, lines)}"


def _equal_table(equal: list[dict]) -> str:
    methods = list(dict.fromkeys(m for row in equal for m in row["step_s"]))
    reference = REFERENCE if REFERENCE in methods else methods[0]
    others = [m for m in methods if m != reference]
    header = ["layers", "batch", "tokens", *(f"{m}, ms" for m in methods), *(f"{reference} / {m}" for m in others)]
    lines = []
    for row in equal:
        steps = row["step_s"]
        times = [_number(steps.get(m), 1e-3) for m in methods]
        ratios = [_ratio(steps.get(reference), steps.get(m)) for m in others]
        lines.append([*(f"{row[x]:,}" for x in ("layers", "batch", "tokens")), *times, *ratios])
    return f"a step at equal batch\n\n{markdown(header, lines)}"


def _number(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:,.2f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f}" if value and reference else "-"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def figure(path: Path, made: dict[str, Any]) -> None:
    """Figure 5 of arXiv 2511.18643: memory and throughput by batch, for each method; PNG.

    Lines of memory are weights and cache as planned; points are measured peaks (the plan, where no peak is known).

    Raises:
        ValueError: nothing was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [s for s in made["summary"] if s["tokens_per_s"]]
    if not measured:
        raise ValueError("nothing to draw: no method has samples at two lengths")
    chart, (memory, rate) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    # Methods by their largest batch, from the greatest on.
    by_batch = list(dict.fromkeys(s["method"] for s in sorted(measured, key=lambda s: -s["batch"])))
    for index, method in enumerate(dict.fromkeys(s["method"] for s in measured)):
        own = sorted((s for s in measured if s["method"] == method), key=lambda s: s["batch"])
        color = f"C{index}"
        batches = [s["batch"] for s in own]
        planned = [(s["weights_bytes"] + s["cache_bytes"]) / 1e9 for s in own]
        peaks = [s["peak_bytes"] / 1e9 if s["peak_bytes"] else plan for s, plan in zip(own, planned, strict=True)]
        memory.plot([0, *batches], [own[0]["weights_bytes"] / 1e9, *planned], color=color, linewidth=1)
        memory.plot(
            batches, peaks, "o", color=color, label=method, markersize=max(10 - 1.5 * index, 3)
        )  # one may hide another
        rates = [s["tokens_per_s"] for s in own]
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
    chart.savefig(path, dpi=150)
    pyplot.close(chart)
