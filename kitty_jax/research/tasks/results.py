"""Results of a long run, one JSON line per item, written as items finish and taken up again after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_HEAD = b'{"settings": {'  # what every file starts with


class ResultFile:
    """A JSON Lines file: a head with the settings of the run, then a row per finished item, each with a "key".

    Settings are whatever decides a row: rows made with others must not end up in one file. How many items there are,
    and how they are batched, are no settings, so that a run can be extended.

    Attributes:
        path: the file.
        rows: the finished rows by key, in the order of the file.
    """

    def __init__(self, path: Path, rows: dict[str, dict[str, Any]], stream):
        self.path, self.rows, self._stream = path, rows, stream

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Puts a finished item on disk. A key that is there already is an error."""
        if key in self.rows:
            raise ValueError(f"{self.path} has a row {key!r} already")
        self.rows[key] = _plain({"key": key, **row})
        self._write(self.rows[key])

    def _write(self, line: Mapping[str, Any]) -> None:
        self._stream.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())


@contextlib.contextmanager
def open_results(
    path: Path, settings: Mapping[str, Any], about: Mapping[str, Any] | None = None
) -> Iterator[ResultFile]:
    """Makes a results file, or takes up one that was begun with the same settings.

    A last line that an interruption cut short is removed; a file that is refused stays as it is. Only one run at a time
    may have the file open.

    Args:
        path: the file; its folder is made.
        settings: compared with those of a file that is there.
        about: noted in the head of a new file and not compared, such as the device.

    Raises:
        ValueError: the file was begun with other settings, is in use, has two rows of one key, or is no results file.
    """
    settings = _plain(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{path} is in use by another run") from error
        stream.seek(0)
        data = stream.read()
        end, rows = data.rfind(b"\n") + 1, {}
        if end:
            there, rows = _read(path, data[:end])
            names = [name for name in sorted({*there, *settings}) if there.get(name) != settings.get(name)]
            if names:
                each = (f"{n} {_short(there.get(n))} there, {_short(settings.get(n))} now" for n in names)
                raise ValueError(
                    f"{path} was begun with other settings: {'; '.join(each)}. Give the same ones, or name another "
                    "folder"
                )
        elif not _HEAD.startswith(data[: len(_HEAD)]):
            raise ValueError(f"{path} is no file of results: it starts with {data[:40]!r}; move it, or name another")
        stream.truncate(end)  # only now that the file is known to be ours
        results = ResultFile(path, rows, stream)
        if not end:
            results._write({"settings": settings, "about": _plain(about or {})})
        yield results


def read_results(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings, rows) of a results file, without changing it; a last line that was cut short is left out.

    Raises:
        ValueError: the file is empty, has two rows of one key, or is no results file.
    """
    settings, rows = _read(path, path.read_bytes())
    return settings, list(rows.values())


def _read(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(settings, rows by key) of the whole lines."""
    lines = data.split(b"\n")[:-1]
    if not lines:
        raise ValueError(f"{path} is empty")
    settings = _parse(path, 1, lines[0], "settings", dict)["settings"]
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines[1:], 2):
        row = _parse(path, number, line, "key", str)
        if row["key"] in rows:
            raise ValueError(
                f"{path}, line {number} is a second row {row['key']!r}: delete the one that shall not count"
            )
        rows[row["key"]] = row
    return settings, rows


def _parse(path: Path, number: int, line: bytes, wanted: str, kind: type) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}; delete the file, or name another") from error
    if not isinstance(value, dict) or not isinstance(value.get(wanted), kind):
        what = {dict: "an object", str: "a text"}[kind]
        raise ValueError(
            f'{path}, line {number}: wanted an object with "{wanted}", {what}, got {_short(value)}; is this a file of '
            "results?"
        )
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    return json.loads(json.dumps(dict(value)))
