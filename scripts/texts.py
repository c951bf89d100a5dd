"""Texts to evaluate on: reading and tokenizing them, and fetching a second one beside those of `fetch_demo.py`.

    python scripts/texts.py            # fetches .cache/kjv.txt, on Debian and its kin

The King James Bible (public domain) lies compressed in the package `bible-kjv-text`; the program of `bible-kjv` prints
it. Both are downloaded and unpacked, not installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from scripts.command_line import Parser, run_command

CACHE = Path(__file__).resolve().parents[1] / ".cache"
KJV = "kjv.txt"
KJV_SHA256 = "b5c4940bcfeee072c0935b5200d0f9d88a00a0199cb0961d16133458fcdfae5d"


def read_text(path: Path) -> str:
    """A UTF-8 file, or the `*.txt` of a folder in sorted order, joined by an empty line."""
    if not path.exists():
        raise ValueError(
            f"no file or folder {path}; scripts/fetch_demo.py --what essays and scripts/texts.py fetch two texts"
        )
    if path.is_file():
        return path.read_bytes().decode()
    files = sorted(path.glob("*.txt"))
    if not files:
        raise ValueError(f"{path} holds no *.txt")
    return "\n\n".join(file.read_bytes().decode() for file in files)


def read_tokens(model: Path, file: Path, count: int, start: int = 0) -> list[int]:
    """The first ``count`` tokens of a text, no special token added.

    Raises:
        ValueError: the text is shorter, or ``count`` leaves nothing after position ``start``.
    """
    from kitty_jax.models.tokenizer import load_tokenizer

    if count <= start + 1:
        raise ValueError(
            f"--tokens must be more than --start + 1 = {start + 1}, got {count}: raise it, or lower --start"
        )
    text = read_text(file)
    tokenizer = load_tokenizer(model)
    # Enough characters for the tokens wanted, doubled until there are: tokenizing a whole book takes its time.
    size = 8 * count
    while True:
        tokens = tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
        # The cut may split a word: its last tokens count only when the text ends there.
        if len(tokens) >= count + 16 or (size >= len(text) and len(tokens) >= count):
            return tokens[:count]
        if size >= len(text):
            raise ValueError(f"{file} has {len(tokens)} tokens, wanted {count}: give fewer --tokens or a longer text")
        size *= 2


def fetch_kjv(cache: Path = CACHE) -> Path:
    """Makes sure that `cache`/kjv.txt is the King James Bible, one verse a line, without numbers. -> its path."""
    target = cache / KJV
    if target.exists():
        return _checked(target)
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]:
        raise ValueError(f"needs {' and '.join(missing)} of Debian; elsewhere, use any long text of your own")
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
        raise ValueError(f"{path} has SHA-256 {got}, wanted {KJV_SHA256}. Delete it and run this again.")
    return path


def _run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()[-400:]}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(run_command(Parser("texts.py", __doc__), lambda _: print(fetch_kjv()), None))
