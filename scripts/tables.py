"""Markdown tables and whole-or-nothing JSON files, for every script that prints or saves results. Plain Python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Cells are printed by ``str``; None is a dash."""
    lines = [header, ["---"] * len(header), *(["-" if cell is None else cell for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def percent(interval: Sequence[float], digits: int = 1) -> str:
    """An interval of shares as "12.3 to 45.6"."""
    return " to ".join(f"{100 * end:.{digits}f}" for end in interval)


def write_json(path: Path, value: Any) -> None:
    """Writes the whole file or none of it, so that a run that is killed leaves the last complete one.

    Its folder is made. A link stays one, and what is no plain file (/dev/stdout, say) is written to and not replaced.
    """
    text = json.dumps(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
