"""scripts/bench_generate.py: the arithmetic, the tables, what becomes of failures, and a tiny model measured."""

import json
import sys

import jax
import numpy as np
import pytest

from kitty_jax.cache.state import init_state, nbytes
from kitty_jax.cache.steps import functional
from kitty_jax.models.registry import random_model
from scripts import bench_generate as script
from scripts.bench_decode import DecodeLoop, Prompts
from scripts.bench_generate_table import document, figure, integrate, tables
from scripts.tables import write_json
from tests.scripts.tiny_shape import TINY, error_of, write_shape

SETUP = {"model": "tiny", "prompt": 100, "new": 101, "budget": 80 * 10**9}


# ---------------------------------------------------------------- arithmetic
def test_the_integral_of_a_line_is_exact_and_the_ends_are_flat() -> None:
    # Seconds of a step at length n: 0.5 + 0.01 n. Its steps from 64 to 1064, each at its middle, add up to the area.
    line = [(n, 0.5 + 0.01 * n) for n in (64, 300, 1064)]
    steps = sum(0.5 + 0.01 * (n + 0.5) for n in range(64, 1064))
    assert integrate(line, 64, 1064) == pytest.approx(steps)
    assert integrate(reversed(line), 64, 1064) == pytest.approx(steps)
    bend = [(10, 1.0), (20, 1.0), (40, 3.0)]
    assert integrate(bend, 15, 30) == pytest.approx(5 * 1 + 10 * 1.5)
    assert integrate(bend, 0, 50) == pytest.approx(10 * 1 + 50 + 10 * 3)
    assert integrate([(7, 2.0)], 0, 5) == pytest.approx(10)
    assert integrate(bend, 12, 12) == 0


def test_lengths_come_end_first() -> None:
    assert script.in_order((1024, 64, 4096, 8192), 8248) == [8248, 64, 1024, 4096]
    assert script.in_order((64, 9000), 8248) == [8248, 64]


# ---------------------------------------------------------------- tables
def rows_of(method: str, step: float, *, batch: int = 10, asked: str = "max") -> list[dict]:
    base = {"method": method, "asked": asked, "phase": "generate", "layers": 2}
    sizes = {"weights_bytes": 10**9, "cache_bytes": batch * 10**9, "sequence_bytes": 10**9}
    return [
        {**base, "kind": "plan", "batch": batch, **sizes},
        {**base, "kind": "compile", "trace_s": 1.0, "lower_s": 2.0, "compile_s": 3.0},
        {**base, "kind": "prefill", "seconds": 1.0},
        {**base, "kind": "memory", "peak_bytes": (batch + 2) * 10**9, "beyond_bytes": 10**9},
        {**base, "kind": "sample", "batch": batch, "length": 100, "wanted": 100, "step_s": step},
        {**base, "kind": "sample", "batch": batch, "length": 200, "wanted": 200, "step_s": 3 * step},
        {**base, "phase": "equal", "batch": 4, "kind": "sample", "length": 101, "wanted": 100, "step_s": step},
    ]


def test_rates_and_ratios() -> None:
    made = document(SETUP, rows_of("kitty-pro", 0.01, batch=40) + rows_of("full", 0.02))
    pro, full = made["summary"]
    assert pro["generation_s"] == pytest.approx(1 + 100 * 0.02)  # the prompt gives the first token
    assert pro["tokens_per_s"] == pytest.approx(40 * 101 / 3)
    assert full["tokens_per_s"] == pytest.approx(10 * 101 / 5)
    assert pro["compile_s"] == 6
    equal = {"layers": 2, "batch": 4, "tokens": 100, "step_s": {"kitty-pro": 0.01, "full": 0.02}}
    assert made["equal"] == [equal]
    lines = [line for line in tables(made).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[2][:8] == "kitty-pro 40 4.00 42.00 1.00 40.00 6.00 1.00".split()
    assert cells[2][8:] == ["10.0@100 30.0@200", "1,347", "6.67"]
    assert cells[3][2] == cells[3][-1] == "1.00"
    assert cells[-1] == ["2", "4", "100", "10.00", "20.00", "2.00"]


def test_half_a_run_is_kept() -> None:
    stopped = {"method": "full", "asked": "max", "kind": "error", "error": "first\nstopped"}
    made = document(SETUP, [*rows_of("full", 0.02)[:5], stopped])
    (half,) = made["summary"]
    assert (half["tokens_per_s"], half["complete"], half["peak_bytes"]) == (None, False, 12 * 10**9)
    assert len(half["samples"]) == 1
    assert "full did not finish: stopped" in tables(made)


def test_the_figure(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of("kitty-pro", 0.01) + rows_of("full", 0.02) + rows_of("full", 0.01, batch=4, asked="4")
    figure(tmp_path / "figure.png", document(SETUP, rows))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        figure(tmp_path / "none.png", document(SETUP, rows[:3]))


def test_saved_runs_become_one_document(tmp_path, capsys) -> None:
    first, second, other = (tmp_path / name for name in "abc")
    write_json(first, document(SETUP, rows_of("kitty-pro", 0.01, batch=40)))
    write_json(second, document(SETUP, rows_of("full", 0.02)))
    assert script.main(["--saved", str(first), "--saved", str(second)]) == 0
    text = capsys.readouterr().out
    assert "| kitty-pro | 40 | 4.00 |" in text
    assert "| full | 10 | 1.00 |" in text
    write_json(second, document(SETUP | {"new": 102}, []))
    write_json(other, {})
    for path, message in (
        (second, "measured {'model': 'tiny', 'prompt': 100, 'new': 102"),
        (other, "no file of bench"),
    ):
        assert message in error_of(script.main, f"--saved {first} --saved {path}", capsys)


# ---------------------------------------------------------------- configurations and their failures
def test_a_failure_loses_nothing_of_the_others(tmp_path, capsys) -> None:
    def run(request):
        rows = [{k: v for k, v in row.items() if k not in ("method", "asked")} for row in rows_of("", 0.01)]
        yield from rows[:4]
        if request["method"] != "full":
            yield from rows[4:]
        else:
            yield {"kind": "error", "error": "ended with status -9: killed"}

    out = tmp_path / "out.json"
    options = f"--model-shape {write_shape(tmp_path)} --cache full --cache kitty --baseline hf-static --json {out}"
    assert script.main(options.split(), run) == 1
    saved = json.loads(out.read_text())
    assert [s["method"] for s in saved["summary"]] == ["full", "kitty", "hf-static"]
    assert [s["tokens_per_s"] is not None for s in saved["summary"]] == [False, True, True]
    assert saved["summary"][0]["peak_bytes"] == 12 * 10**9
    assert saved["setup"]["config"]["num_hidden_layers"] == 2
    assert saved["summary"] == json.loads(json.dumps(document(saved["setup"], saved["rows"])["summary"]))
    assert "full did not finish: ended with status -9: killed" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


def test_rows_of_a_process_and_how_it_ended(tmp_path) -> None:
    noise = "print('{not json}'); print('{}'); print('[1]'); print('{\"kind\": \"sample\"}', flush=True); "
    rows = [{"kind": "sample"}]
    assert list(script.read_rows([sys.executable, "-c", noise], 60)) == rows
    died = {"kind": "error", "error": "ended with status 1: no such thing"}
    code = f"{noise}import sys; sys.exit('no such thing')"
    assert list(script.read_rows([sys.executable, "-c", code], 60)) == [*rows, died]
    stopped = {"kind": "error", "error": "stopped at the time limit of 1 s"}
    code = f"{noise}import time; time.sleep(60)"
    assert list(script.read_rows([sys.executable, "-c", code], 1)) == [*rows, stopped]
    (row,) = script.run_process({"method": "hf-static", "hf_python": str(tmp_path / "none"), "limit": 9})
    assert row["error"].startswith("did not start: ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--cache kity", "unknown cache 'kity'"),
        ("--model-shape gpt", "neither a known shape"),
        ("--phases generate,other", "argument --phases: takes generate and equal"),
        ("--batches 0", "argument --batches: must be a whole number, 1 or more, got 0"),
        ("--new 10", "--new 10 is too short"),
        ("--steps 0", "argument --steps: must be a whole number, 1 or more, got 0"),
        ("--prefill-tokens 63", "argument --prefill-tokens: must be a whole number, 64 or more, got 63"),
        ("--reserve 1", "--reserve is a fraction of the budget"),
        ("--budget much", "an amount of memory is a number with a unit"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys) -> None:
    assert message in error_of(script.main, arguments, capsys)


# ---------------------------------------------------------------- measuring a tiny model
GENERATION = ("plan", "compile", "compile", "prefill", "memory", "sample", "sample")


@pytest.mark.parametrize(
    "cache, phases, kinds",
    [
        pytest.param("kivi2", "generate", GENERATION, marks=pytest.mark.slow),
        ("full", "generate,equal", (*GENERATION, "compile", "sample")),
    ],
)
def test_a_tiny_model_from_budget_to_table(cache, phases, kinds, tmp_path, capsys) -> None:
    options = f"--model-shape {write_shape(tmp_path)} --budget 2MB --prompt 40 --new 200 --sample-lengths 40 --steps 2"
    options += " --prefill-tokens 64" if cache == "kivi2" else ""  # a sequence at a time
    options += f" --repeats 2 --equal-batch 2 --lengths 170 --cache {cache} --phases {phases} --json {tmp_path / 'out'}"
    assert script.main(options.split(), script.measure) == 0
    made = json.loads((tmp_path / "out").read_text())
    assert tuple(row["kind"] for row in made["rows"]) == ("start", *kinds)
    (summary,) = made["summary"]
    weights = sum(2 * leaf.size for leaf in jax.tree.leaves(functional(random_model(TINY)).params))
    assert summary["weights_bytes"] == weights
    held = nbytes(jax.eval_shape(lambda: init_state(cache, TINY, batch=summary["batch"], capacity=240)))["total"]
    assert summary["cache_bytes"] == held <= 2_000_000 * 0.9 - weights < held + summary["sequence_bytes"]
    assert [length for length, _ in summary["samples"]] == [41, 239]
    assert summary["tokens_per_s"] == pytest.approx(summary["batch"] * 200 / summary["generation_s"])
    assert len(made["equal"]) == ("equal" in phases)
    assert f"| {cache} | {summary['batch']} |" in capsys.readouterr().out


@pytest.fixture(scope="module")
def loop() -> DecodeLoop:
    made = DecodeLoop(functional(random_model(TINY)), "kitty", 3, 600)
    made.compile()
    made.fill()
    return made


def test_windows_with_and_without_a_page(loop) -> None:
    # Pages of keys are due at 160, 288, 416, 544 tokens, those of values 128 tokens later.
    assert [n for n in range(600) if loop.flushes(n, 1)] == [159, 287, 415, 543]
    assert loop.quiet_start(300, 8) == 300
    assert loop.quiet_start(285, 8) == 279
    assert loop.flush_start(40, 8) == 152
    assert loop.flush_start(290, 8) == 287

    def pages():
        return [np.asarray(layer.kv.key_pages) for layer in loop.state.layers]

    before = pages()
    loop.window(loop.quiet_start(300, 8), 8)
    assert np.asarray(loop.state.lengths).tolist() == [308] * 3
    assert all(np.array_equal(a, b) for a, b in zip(before, pages(), strict=True))
    loop.window(loop.flush_start(300, 8), 8)
    assert not any(np.array_equal(a, b) for a, b in zip(before, pages(), strict=True))


@pytest.mark.parametrize("budget, steps", [(64, 3), (128, 2), (8192, 1)])
def test_the_prompt_in_steps_of_a_budget(loop, budget, steps) -> None:
    prompts = Prompts(loop, 40, budget)
    assert len(prompts.steps) == steps
    assert all(step.tokens.size <= max(budget, 64) for step in prompts.steps)
    assert sum(int(step.lengths.sum()) for step in prompts.steps) == 3 * 40
