"""Texts to evaluate on: reading them, and fetching a second one beside the essays of `fetch_demo.py`.

    python scripts/texts.py            # fetches .cache/kjv.txt, on Debian and its kin

The King James Bible (public domain) lies compressed in the package `bible-kjv-text`; the program of `bible-kjv` prints
it. Both are downloaded and unpacked, not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"
KJV = "kjv.txt"
KJV_SHA256 = "b5c4940bcfeee072c0935b5200d0f9d88a00a0199cb0961d16133458fcdfae5d"


class TextError(ValueError):
    """A text could not be read or fetched."""


def read_text(path: Path) -> str:
    """A UTF-8 file, or the `*.txt` of a folder in sorted order, joined by an empty line."""
    if not path.exists():
        raise TextError(
            f"no file or folder {path}; scripts/fetch_demo.py --what essays and scripts/texts.py fetch two texts"
        )
    if path.is_file():
        return path.read_bytes().decode()
    files = sorted(path.glob("*.txt"))
    if not files:
        raise TextError(f"{path} holds no *.txt")
    return "\n\n".join(file.read_bytes().decode() for file in files)


def fetch_kjv(cache: Path = CACHE) -> Path:
    """Makes sure that `cache`/kjv.txt is the King James Bible, one verse a line, without numbers. -> its path."""
    target = cache / KJV
    if target.exists():
        return _checked(target)
    missing = [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]
    if missing:
        raise TextError(
            f"needs {' and '.join(missing)} of Debian; elsewhere, give evaluate.py any long text of your own"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="part-") as name:
        folder = Path(name)
        _run(["apt-get", "download", "bible-kjv", "bible-kjv-text"], folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg-deb", "-x", package.name, "root"], folder)
        raw = _run(["root/usr/bin/bible", "-f", "-p", "root/usr/lib", "gen1:1-rev22:21"], folder)
        verses = [re.sub(r"^\w+:\d+ ", "", line) for line in raw.splitlines() if line.strip()]
        part = folder / KJV
        part.write_text("\n".join(verses) + "\n", encoding="utf-8")
        os.replace(_checked(part), target)
    return target


def _checked(path: Path) -> Path:
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != KJV_SHA256:
        raise TextError(f"{path} has SHA-256 {got}, wanted {KJV_SHA256}. Delete it and run this again.")
    return path


def _run(command: list[str], folder: Path) -> str:
    try:
        result = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise TextError(f"{command[0]} did not start: {error}") from error
    if result.returncode:
        raise TextError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()[-400:]}")
    return result.stdout


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        print(fetch_kjv())
    except TextError as error:
        print(f"texts.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
