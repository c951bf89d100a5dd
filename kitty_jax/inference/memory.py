"""Amounts of memory as text."""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """ "80GB" -> 80 * 10**9, "80GiB" -> 80 * 2**30; a number alone is bytes.

    Raises:
        ValueError: text that names no amount of memory.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"an amount of memory is a number with a unit such as 80GB, 80GiB or 512MB, got {text!r}")
    return round(float(match[1]) * UNITS[match[2]])


def format_bytes(size: float) -> str:
    """In the largest decimal unit that leaves 1 or more: 80 * 10**9 -> "80.00 GB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(size) >= 10**power:
            return f"{size / 10**power:,.2f} {unit}"
    return f"{size:,.0f} B"
