"""scripts/make_figures.py writes a PNG and a JSON for each figure."""

import json

import pytest

from scripts.make_figures import main
from tests.scripts.cli_checkpoint import write_checkpoint

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    (folder / "text.txt").write_text("the cat sat on 123 mats, and the other cat did not. " * 20)
    return ["--model", str(write_checkpoint(folder)), "--file", str(folder / "text.txt"), "--tokens", "300"]


@pytest.mark.parametrize("figure", ["keys", "sensitivity"])
def test_figure_2(arguments, tmp_path, figure):
    assert main([figure, *arguments, "--layer", "0", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "new" / f"{figure}.json").read_text())
    if figure == "keys":
        assert len(data["mean_magnitude"]) == 16
        assert all(m <= top for m, top in zip(data["mean_magnitude"], data["max_magnitude"], strict=True))
    else:
        assert [len(row) for row in data["mse"]] == [16] * 4
        assert all(2 / 16 <= share < 1 for share in data["share_of_the_top_eighth"])


def test_figure_4(arguments, tmp_path):
    changes = ["--fraction", "0", "0.25", "1", "--selection", "magnitude", "random", "--start", "250"]
    assert main(["boost", *arguments, *changes, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "boost.json").read_text())
    assert data["fraction"] == [0, 0.25, 1]
    assert data["kl"]["magnitude"][0] == pytest.approx(data["kl"]["random"][0])  # nothing is chosen
    assert data["kl"]["magnitude"][2] < 0.5 * data["kl"]["magnitude"][0]


def test_errors_are_one_line(arguments, tmp_path, capsys):
    assert main(["keys", *arguments, "--layer", "7", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "make_figures.py: this model has layers 0 to 0, got [7]\n"
