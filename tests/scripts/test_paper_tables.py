"""`scripts/paper_tables.py`: the commands it would run, the tables it makes of results, what it says when some fail."""

import argparse
import json
import shlex

import pytest

from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.research.tasks.paper import PAPER, TABLES, TASKS, cell_of, mean_cell
from kitty_jax.research.tasks.results import open_results
from scripts.evaluate import subcommands
from scripts.paper_tables import main
from scripts.task_runs import file_name


def fail(words):
    raise AssertionError(f"nothing was to run, but this did: {words}")


def write_answers(folder, cache, right, name=None):
    """A results file of an own task: item i is right where ``right`` says so."""
    with open_results(folder / f"{name or cache}.jsonl", {"cache": cache}) as results:
        for i, correct in enumerate(right):
            results.append(str(i), {"item": str(i), "repeat": 0, "correct": correct})


def write_samples(out, task, cache, repeat, right):
    """A file of one pass of lm_eval over a task, with a second filter that must not count."""
    samples = []
    for i, correct in enumerate(right):
        samples.append({"doc_id": i, "filter": task.filter, task.metric: float(correct)})
        samples.append({"doc_id": i, "filter": "another", task.metric: 0.0})
    path = out / "lm_eval" / task.name / f"{cache}.{repeat}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": {}, "results": {}, "samples": {task.name: samples}}))


@pytest.fixture
def results(tmp_path):
    """Table 3 for two methods: GSM8K and MATH done, HumanEval without its programs' outcomes, GPQA for one method."""
    for cache, right in (("full", [1, 1, 1, 0]), ("kitty", [1, 1, 0, 0])):
        write_answers(tmp_path / "gsm8k", cache, map(bool, right))
        write_samples(tmp_path, TASKS["math"], cache, 0, [1] * 3 + [0])
        write_answers(tmp_path / "humaneval", cache, [True] * 4)
    for repeat, right in enumerate(([1, 0], [1, 1])):
        write_samples(tmp_path, TASKS["gpqa"], "full", repeat, right)
    return tmp_path


def report(out, *more):
    return main(["--table", "3", "--out", str(out), "--report", "--method", "kitty", *more], execute=fail)


def test_every_table_names_caches_and_tasks_that_there_are():
    evaluations = subcommands()
    for table in TABLES.values():
        assert {TASKS[task].command for task in table.tasks} <= evaluations.keys()
        assert len({file_name(method) for method in table.methods}) == len(table.methods)
        for method in table.methods:
            cache_from_spec(method)
    for rows in PAPER.values():
        assert {column for row in rows.values() for column in row} <= {"mean", *TASKS}


@pytest.mark.parametrize("number", sorted(TABLES))
def test_a_dry_run_prints_commands_that_evaluate_takes(number, tmp_path, capsys):
    command = ["--table", str(number), "--model", "m.gguf", "--out", str(tmp_path), "--dry-run", "--items", "5"]
    assert main([*command, "--", "--temperature", "0"], execute=fail) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TABLES[number].tasks)
    for line, key in zip(lines, TABLES[number].tasks, strict=True):
        _, script, subcommand, *words = shlex.split(line)
        assert script.endswith("evaluate.py")
        assert subcommand == TASKS[key].command
        parser = argparse.ArgumentParser()
        subcommands()[subcommand].add_arguments(parser)
        got = parser.parse_args(words)
        assert got.temperature == 0
        assert got.cache == [m for m in TABLES[number].methods if m != "full"]
        assert (got.limit if subcommand == "lm-eval" else got.items) == 5
    assert not list(tmp_path.iterdir())


def test_the_table_of_what_is_there_beside_the_papers_figures(results, capsys):
    assert report(results, "--paper", "qwen3-8b") == 0
    out = capsys.readouterr().out
    assert "arXiv 2511.18643" in out
    lines = out.splitlines()
    full = next(line for line in lines if line.startswith("| full")).split("|")
    assert full[2].strip().startswith("75.0 (30.1 to 95.4), n = 4")  # Wilson's interval of 3 of 4
    assert full[3].strip().startswith("75.0 (")
    assert full[4].strip() == "-"  # completions alone have no accuracy
    assert "n = 4" in full[5]  # two items, answered twice
    assert full[6].strip() == "- [77.15]"  # no mean over tasks of which one is missing
    kitty = next(line for line in lines if line.startswith("| kitty")).split("|")
    assert kitty[2].strip().startswith("50.0 (")
    assert kitty[5].strip() == "-"
    written = json.loads((results / "table3.json").read_text())["cells"]
    assert {(c["method"], c["task"]): c["accuracy"] for c in written}["full", "gpqa"] == 0.75


def test_outcomes_of_programs_count_where_they_are_there(results, capsys):
    with open_results(results / "humaneval" / "full.programs.jsonl", {}) as outcomes:
        for i in range(4):
            outcomes.append(str(i), {"passed": i == 0})
    assert report(results) == 0
    full = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| full")).split("|")
    assert full[4].strip().startswith("25.0 (")
    assert full[6].strip().startswith("62.5 (")  # the mean of 75, 75, 25 and 75


def test_a_failed_command_leaves_the_rest(results, capsys):
    command = ["--table", "3", "--model", "m", "--out", str(results), "--method", "kitty"]
    assert main(command, execute=lambda words: int("gpqa_diamond_cot_n_shot" in words)) == 1
    captured = capsys.readouterr()
    assert "failed, see above: GPQA-Diamond" in captured.err
    assert "| kitty | 50.0" in captured.out


@pytest.mark.parametrize(
    "change,message",
    [
        (["--report", "--method", "kitten"], "unknown cache 'kitten'"),
        (["--report", "--out", "nowhere"], "nowhere has no results of table 3"),
        ([], "--model is needed"),
    ],
)
def test_errors(results, capsys, change, message):
    assert main(["--table", "3", "--out", str(results), *change], execute=fail) == 2
    assert message in capsys.readouterr().err


def test_samples_without_the_metric_are_refused(tmp_path, capsys):
    path = tmp_path / "lm_eval" / "aime24" / "full.0.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"samples": {"aime24": [{"doc_id": 0, "filter": "none", "acc": 1.0}]}}))
    assert main(["--table", "4", "--out", str(tmp_path), "--report"], execute=fail) == 2
    assert "no samples of aime24 with exact_match,none" in capsys.readouterr().err


def test_the_interval_of_a_mean_is_narrower_than_its_parts():
    cells = [cell_of([[i % 2] for i in range(100)]), cell_of([[i % 4 == 0] for i in range(100)])]
    mean = mean_cell(cells)
    below = [c.accuracy - c.interval[0] for c in (*cells, mean)]
    above = [c.interval[1] - c.accuracy for c in (*cells, mean)]
    assert mean.accuracy == pytest.approx(0.375)
    assert below[2] == pytest.approx((below[0] ** 2 + below[1] ** 2) ** 0.5 / 2)
    assert above[2] == pytest.approx((above[0] ** 2 + above[1] ** 2) ** 0.5 / 2)


def test_the_mean_of_one_task_is_that_task():
    cell = cell_of([[0]] * 20)  # none right: the interval begins at 0, not below
    mean = mean_cell([cell])
    assert mean.interval == pytest.approx(cell.interval)
    assert mean.interval[0] == pytest.approx(0, abs=1e-12)
