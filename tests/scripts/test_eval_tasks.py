"""`evaluate.py gsm8k | humaneval | recall`: files, summaries, taking up again, errors."""

import json

import pytest

from kitty_jax.research.tasks.results import read_results
from scripts.evaluate import main
from tests.scripts.cli_checkpoint import write_checkpoint

CACHE = "kivi2:page=16,window=16"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    rows = [{"question": f"the cat sat on {i} mats?", "answer": f"#### {i}"} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def gsm8k(checkpoint, problems, out, *more, cache=()):
    command = ["gsm8k", "--model", checkpoint, "--file", problems, "--out", out, "--prompt", "chat", *cache]
    command += ["--batch", "2", "--max-new-tokens", "12", "--temperature", "0"]
    return main([str(x) for x in [*command, *more]])


def test_gsm8k_is_taken_up_again_and_extended(checkpoint, problems, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert gsm8k(checkpoint, problems, out, "--items", "3", cache=["--cache", CACHE]) == 0
    file = out / "kivi2_page=16_window=16.jsonl"
    settings, rows = read_results(file)
    assert settings["cache"]["page"] == 16
    about = json.loads(file.read_text().splitlines()[0])["about"]
    assert (about["implementation"], about["batch"]) == ("auto", 2)
    got = [(row["key"], row["wanted"], row["ended"], row["tokens"]) for row in rows]
    assert got == [(str(i), str(i), "length", 12) for i in range(3)]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["full"]["items"] == summary[CACHE]["against_full"]["answers"] == 3
    assert "| full | 3 |" in capsys.readouterr().out

    # Cut within the last row: that one is answered again, alike.
    whole = file.read_text()
    file.write_text(whole[:-30])
    assert gsm8k(checkpoint, problems, out, "--items", "3", cache=["--cache", CACHE]) == 0
    assert file.read_text() == whole
    assert "2 of 3 answers are in" in capsys.readouterr().err

    # Nothing is left to do: the model is not loaded.
    with monkeypatch.context() as patch:
        patch.setattr("kitty_jax.models.checkpoint.load_model", None)
        assert gsm8k(checkpoint, problems, out, "--items", "2", "--offset", "1", cache=["--cache", CACHE]) == 0
    assert json.loads((out / "summary.json").read_text())["full"]["items"] == 2
    capsys.readouterr()

    assert gsm8k(checkpoint, problems, out, "--max-new-tokens", "13") == 2
    assert "max_new_tokens 12 there, 13 now" in capsys.readouterr().err
    problems.with_name("other.jsonl").write_text(problems.read_text().replace("cat", "dog"))
    assert gsm8k(checkpoint, problems.with_name("other.jsonl"), out) == 2
    assert "other settings: data" in capsys.readouterr().err


def test_gsm8k_samples_each_repeat_anew(checkpoint, problems, tmp_path):
    command = ["--temperature", "3", "--repeats", "2", "--items", "2"]
    assert gsm8k(checkpoint, problems, tmp_path, *command) == 0
    _, rows = read_results(tmp_path / "full.jsonl")
    assert [(row["key"], row["repeat"]) for row in rows] == [("0", 0), ("1", 0), ("0#1", 1), ("1#1", 1)]
    assert rows[0]["text"] != rows[2]["text"]
    full = json.loads((tmp_path / "summary.json").read_text())["full"]
    assert (full["items"], full["answers"]) == (2, 4)


@pytest.mark.parametrize(
    "change,message",
    [
        (["--cache", "kitten"], "unknown cache 'kitten'"),
        (["--cache", "KITTY", "--cache", "kitty"], "would share a file"),
        (["--items", "7"], "has 6 problems; wanted 7"),
        (["--max-new-tokens", "250"], "the model was made for 256"),
        (["--max-new-tokens", "250"], "prompt 0 has "),
        (["--repeats", "2"], "would give equal answers"),
        (["--top-k", "3"], "leave out top_k"),
        (["--file", "nowhere.jsonl"], "no file nowhere.jsonl"),
    ],
)
def test_gsm8k_errors_come_before_the_model(checkpoint, problems, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.setattr("kitty_jax.models.checkpoint.load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    assert gsm8k(checkpoint, problems, tmp_path, *change) == 2
    assert message in capsys.readouterr().err


def test_humaneval_runs_programs_only_when_asked(checkpoint, tmp_path, capsys, monkeypatch):
    file, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    # Whatever follows the first one's prompt is a comment; no completion can mend the second one.
    rows = [
        {"task_id": f"T/{i}", "prompt": f"def {name}():\n    return 1  # ", "entry_point": name}
        | {"test": f"def check(f): assert f() == {i + 1}"}
        for i, name in enumerate(("one", "two"))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["humaneval", "--model", checkpoint, "--file", file, "--out", out, "--prompt", "text", "--batch", "2"]
    command = [str(x) for x in [*command, "--max-new-tokens", "4", "--temperature", "0"]]
    with monkeypatch.context() as patch:
        patch.setattr("kitty_jax.research.tasks.programs.run_program", lambda *a: pytest.fail("a program was run"))
        assert main(command) == 0
    assert "--run-programs runs them" in capsys.readouterr().err
    assert not (out / "summary.json").exists()
    # The answers are replaced by ones without line breaks or zero bytes, as a random model writes anything.
    _, answers = read_results(out / "full.jsonl")
    head, *_ = (out / "full.jsonl").read_text().splitlines()
    tame = [json.dumps({**a, "program": rows[i]["prompt"] + "x"}) for i, a in enumerate(answers)]
    (out / "full.jsonl").write_text("\n".join([head, *tame]) + "\n")
    assert main([*command, "--run-programs"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["full"]["correct"], summary["full"]["accuracy"]) == (1, 0.5)
    _, outcomes = read_results(out / "full.programs.jsonl")
    assert [(o["passed"], o["detail"]) for o in outcomes] == [(True, ""), (False, "AssertionError")]
    (out / "full.jsonl").write_text((out / "full.jsonl").read_text().replace("# x", "# y"))
    assert main([*command, "--run-programs"]) == 2
    assert "is of other programs than T/0's" in capsys.readouterr().err


def test_recall_writes_every_cell(checkpoint, tmp_path, capsys):
    out = tmp_path / "recall.json"
    command = ["recall", "--model", checkpoint, "--json", out, "--lengths", "200", "--depths", "0", "1"]
    command += ["--trials", "2", "--new-tokens", "4", "--batch", "4"]
    assert main([str(x) for x in command]) == 0
    got = json.loads(out.read_text())
    assert got["setup"]["task"] == "passkey"
    assert list(got["caches"]) == ["full"]
    for row in got["caches"].values():
        assert [(c["length"], c["depth"], c["trials"]) for c in row["cells"]] == [(200, 0.0, 2), (200, 1.0, 2)]
        assert row["correct"] == sum(item["correct"] for item in row["items"])
        assert all(150 < item["tokens"] <= 200 for item in row["items"])
    assert "| full | 200 |" in capsys.readouterr().out
    for change, message in (
        (["--task", "needle"], "needs --file"),
        (["--lengths", "400"], "the model was made for 256"),
        (["--trials", "0"], "argument --trials: must be a whole number"),
    ):
        assert main([str(x) for x in [*command, *change]]) == 2
        assert message in capsys.readouterr().err
