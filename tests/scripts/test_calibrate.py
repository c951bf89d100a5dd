"""`scripts/calibrate.py`: the caches it writes, the table, and `evaluate.py text` with one of them."""

import json

import numpy as np
import pytest

from kitty_jax.cache.spec import load_caches
from scripts import calibrate
from scripts.evaluate import main as evaluate
from tests.scripts.cli_checkpoint import write_checkpoint

CACHE = "kitty-plus:sink=4,page=16,window=16"
TEXT = "the cat sat on 123 mats, and the other cat did not. " * 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(checkpoint, calibration text, text to measure on)."""
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "calibration.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT[::-1])
    return write_checkpoint(folder), folder / "calibration.txt", folder / "other.txt"


def arguments(files, out, *more):
    model, text, other = files
    command = ["--model", model, "--file", text, "--skip", "10", "--tokens", "90", "--start", "40", "--cache", CACHE]
    command += ["--boosts", "0", "0.125", "0.25", "--measure", other, "--measure-tokens", "90", "--out", out]
    return [str(x) for x in [*command, *more]]


def test_caches_figures_and_their_use(files, tmp_path, capsys):
    assert calibrate.main(arguments(files, tmp_path / "out")) == 0
    table = capsys.readouterr().out
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    rows = figures["texts"]["other"]
    assert rows.pop("full")["kl"] == 0
    assert list(rows) == [CACHE, *(f"{CACHE}, {how}" for how in ("lists", "boost", "lists-boost"))]
    for name, row in rows.items():
        assert 0 < row["kl"]
        assert f"| {name} | {row['bits']:.2f} | {row['kl']:.4f} |" in table
        assert np.mean(figures["boosts"][name]) <= 0.125
    lists = next(p for p in (tmp_path / "out").glob("*.lists.json"))
    (config,) = load_caches(lists)
    assert [len(channels) for channels in config.selection] == [2, 2]
    command = ["text", "--model", files[0], "--file", files[2], "--tokens", "90", "--start", "40"]
    assert evaluate([str(x) for x in [*command, "--cache", f"@{lists}", "--json", tmp_path / "text.json"]]) == 0
    kl = json.loads((tmp_path / "text.json").read_text())[f"@{lists}"]["kl"]
    assert kl == pytest.approx(rows[f"{CACHE}, lists"]["kl"], rel=1e-3)


@pytest.mark.parametrize(
    "change,message",
    [
        (["--boosts", "0", "0.2"], "boost 0.2 of head size 16 is 3.2 channels"),
        (["--cache", "kitten"], "unknown cache 'kitten'"),
        (["--tokens", "5000"], "wanted 5010"),
    ],
)
def test_errors(files, tmp_path, capsys, change, message):
    assert calibrate.main(arguments(files, tmp_path, *change)) == 2
    assert message in capsys.readouterr().err
