"""scripts/bench_generate.py: the arithmetic, the tables, what becomes of failures, and a tiny model measured."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kitty_jax.cache.state import init_state, nbytes
from kitty_jax.cache.steps import functional
from kitty_jax.inference.memory_plan import KVPlan
from kitty_jax.models.registry import config_from_name, config_to_hf, random_model
from scripts import bench_generate as script
from scripts import bench_generate_ours as ours
from scripts.bench_generate_common import Request, generation_seconds, in_order, integrate, spread
from scripts.bench_generate_table import document, equal_steps, figure, summarize, tables, write_json
from scripts.model_shapes import weight_shapes

TINY = dataclasses.replace(
    config_from_name("qwen3-0.6b"),
    num_layers=2,
    embed_dim=32,
    mlp_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
)


@pytest.fixture
def shape(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_hf(TINY)))
    return str(path)


# ---------------------------------------------------------------- arithmetic
def test_a_line_is_integrated_exactly() -> None:
    # Seconds of a step at length n: 0.5 + 0.01 n. Its steps from 64 to 1064, each at its middle, add up to the area.
    samples = [(n, 0.5 + 0.01 * n) for n in (64, 300, 1064)]
    steps = sum(0.5 + 0.01 * (n + 0.5) for n in range(64, 1064))
    assert integrate(samples, 64, 1064) == pytest.approx(steps)
    assert integrate(reversed(samples), 64, 1064) == pytest.approx(steps)


def test_trapezoids_follow_a_bend_and_the_ends_are_flat() -> None:
    samples = [(10, 1.0), (20, 1.0), (40, 3.0)]
    assert integrate(samples, 10, 40) == pytest.approx(10 * 1 + 20 * 2)
    assert integrate(samples, 15, 30) == pytest.approx(5 * 1 + 10 * 1.5)
    assert integrate(samples, 0, 50) == pytest.approx(10 * 1 + 50 + 10 * 3)
    assert integrate([(7, 2.0)], 0, 5) == pytest.approx(10)
    assert integrate(samples, 12, 12) == 0
    with pytest.raises(ValueError, match="no samples"):
        integrate([], 0, 1)


def test_the_prompt_gives_the_first_token() -> None:
    assert generation_seconds(64, 101, 3.0, [(64, 0.1), (165, 0.1)]) == pytest.approx(3 + 100 * 0.1)


def test_lengths_come_end_first() -> None:
    assert in_order((64, 1024, 4096, 8192), 8248) == [8248, 64, 1024, 4096]
    assert in_order((64, 9000), 8248) == [8248, 64]
    assert spread([3, 1, 2]) == (2, 1, 3)
    assert spread([4, 1]) == (2.5, 1, 4)


# ---------------------------------------------------------------- tables
def rows_of(method: str, step: float, *, batch: int = 10, run: str = "0.0", asked: str = "max") -> list[dict]:
    base = {"run": run, "method": method, "asked": asked, "phase": "generate", "layers": 2, "batch": batch}
    times = {"trace_s": 1.0, "lower_s": 2.0, "compile_s": 3.0}
    return [
        {**base, "kind": "plan", "weights_bytes": 10**9, "cache_bytes": batch * 10**9, "sequence_bytes": 10**9},
        {**base, "kind": "compile", **times},
        {**base, "kind": "prefill", "seconds": 1.0},
        {**base, "kind": "memory", "peak_bytes": (batch + 2) * 10**9, "beyond_bytes": 10**9, "fits": True},
        {**base, "kind": "sample", "length": 100, "wanted": 100, "step_s": step},
        {**base, "kind": "sample", "length": 200, "wanted": 200, "step_s": 3 * step},
        {**base, "phase": "equal", "batch": 4, "kind": "sample", "length": 101, "wanted": 100, "step_s": step},
    ]


SETUP = {"model": "tiny", "prompt": 100, "new": 101, "budget": 80 * 10**9}


def test_rates_and_ratios() -> None:
    rows = rows_of("kitty-pro", 0.01, batch=40) + rows_of("full", 0.02)
    pro, full = summarize(rows, 100, 101)
    assert pro["generation_s"] == pytest.approx(1 + 100 * 0.02)
    assert pro["tokens_per_s"] == pytest.approx(40 * 101 / 3)
    assert full["tokens_per_s"] == pytest.approx(10 * 101 / 5)
    assert pro["compile_s"] == 6
    assert equal_steps(rows) == {(2, 4, 100): {"kitty-pro": 0.01, "full": 0.02}}
    text = tables(document(SETUP, rows))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert cells[2][:8] == "kitty-pro 40 4.00 42.00 1.00 40.00 6.00 1.00".split()
    assert cells[2][8:] == ["10.0@100 30.0@200", "1,347", "6.67"]
    assert cells[3][2] == cells[3][-1] == "1.00"
    assert cells[-1] == ["2", "4", "100", "10.00", "20.00", "2.00"]


def test_the_last_attempt_counts_and_half_a_run_is_kept() -> None:
    first = rows_of("full", 0.02, batch=12)[:3]
    assert [s["batch"] for s in summarize(first + rows_of("full", 0.02, run="0.1"), 100, 101)] == [10]
    stopped = {"run": "0.0", "method": "full", "asked": "max", "kind": "error", "error": "stopped"}
    (half,) = summarize([*rows_of("full", 0.02)[:5], stopped], 100, 101)
    assert (half["tokens_per_s"], half["complete"], half["peak_bytes"]) == (None, False, 12 * 10**9)
    assert len(half["samples"]) == 1
    assert "full did not finish: stopped" in tables(document(SETUP, [*rows_of("full", 0.02)[:5], stopped]))


def test_the_figure(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of("kitty-pro", 0.01) + rows_of("full", 0.02) + rows_of("full", 0.01, batch=4, asked="4")
    figure(tmp_path / "figure.png", document(SETUP, rows))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        figure(tmp_path / "none.png", document(SETUP, rows[:3]))


def test_saved_runs_become_one_document(tmp_path, capsys) -> None:
    for name, rows in (("a", rows_of("kitty-pro", 0.01, batch=40)), ("b", rows_of("full", 0.02))):
        write_json(tmp_path / name, SETUP, rows)
    assert script.main(["--saved", str(tmp_path / "a"), "--saved", str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "| kitty-pro | 40 | 4.00 |" in text
    assert "| full | 10 | 1.00 |" in text
    write_json(tmp_path / "b", SETUP | {"new": 102}, rows)
    for other, message in (("b", "measured {'model': 'tiny', 'prompt': 100, 'new': 102"), ("c", "no file of bench")):
        (tmp_path / "c").write_text("{}")
        assert script.main(["--saved", str(tmp_path / "a"), "--saved", str(tmp_path / other)]) == 2
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------- configurations and their failures
def test_a_failure_loses_nothing_of_the_others(shape, tmp_path, capsys) -> None:
    def run(request, limit, python):
        rows = [{k: v for k, v in row.items() if k not in ("run", "method", "asked")} for row in rows_of("", 0.01)]
        yield from rows[:4]
        if request.method == "full":
            yield {"kind": "error", "error": "ended with status -9: killed", "out_of_memory": False}
            return
        yield from rows[4:]

    out = tmp_path / "out.json"
    arguments = f"--model-shape {shape} --cache full --cache kitty --baseline hf-static --json {out}"
    assert script.main(arguments.split(), run) == 1
    saved = json.loads(out.read_text())
    assert set(saved) == {"setup", "summary", "equal", "rows"}
    assert [s["method"] for s in saved["summary"]] == ["full", "kitty", "hf-static"]
    assert [s["tokens_per_s"] is not None for s in saved["summary"]] == [False, True, True]
    assert saved["summary"][0]["peak_bytes"] == 12 * 10**9
    assert saved["setup"]["config"]["num_hidden_layers"] == 2
    assert saved == document(saved["setup"], saved["rows"]) | {"summary": saved["summary"]}
    assert "full did not finish: ended with status -9: killed" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("how", ["peak", "memory"])
def test_too_large_a_batch_is_tried_again_smaller(shape, how, capsys) -> None:
    tried = []

    def run(request, limit, python):
        batch = request.batch or 100
        tried.append(batch)
        yield {"phase": "generate", "kind": "plan", "batch": batch, "sequence_bytes": 10, "layers": 2}
        fits = batch <= 90
        if how == "peak":
            peak = 1000 + 10 * (batch - 90)
            yield {"phase": "generate", "kind": "memory", "peak_bytes": peak, "budget_bytes": 1000, "fits": fits}
        elif not fits:
            yield {"kind": "error", "error": "no memory", "out_of_memory": True}

    assert script.main(["--model-shape", shape, "--cache", "kitty"], run) == 0
    assert tried == {"peak": [100, 90], "memory": [100, 93, 87]}[how]
    tried.clear()
    assert script.main(["--model-shape", shape, "--cache", "kitty", "--batches", "95"], run) == 1
    assert tried == [95]
    assert "95 sequences take more than the budget" in capsys.readouterr().out


def test_no_memory_at_equal_batch_does_not_start_over(shape) -> None:
    tried = []

    def run(request, limit, python):
        tried.append(request)
        yield {"phase": "generate", "kind": "plan", "batch": 5, "sequence_bytes": 10, "layers": 2}
        yield {"phase": "equal", "kind": "skipped"}
        yield {"kind": "error", "error": "no memory", "out_of_memory": True}

    assert script.main(["--model-shape", shape, "--cache", "kitty"], run) == 1
    assert len(tried) == 1


def test_the_total_limit_stops_what_has_not_begun(shape, capsys) -> None:
    assert script.main(["--model-shape", shape, "--total-limit", "-1"], lambda *_: pytest.fail("started")) == 1
    assert "not started: the total time limit has passed" in capsys.readouterr().out


def test_a_process_gives_its_rows_until_it_is_stopped() -> None:
    code = "import time; print('{\"kind\": \"sample\"}', flush=True); print('noise', flush=True); time.sleep(60)"
    rows = list(script.read_rows([sys.executable, "-c", code], 3))
    assert rows == [{"kind": "sample"}, {"kind": "error", "error": "stopped at the time limit of 3 s"}]


def test_what_libraries_print_is_no_row() -> None:
    code = "print('{not json}'); print('{}'); print('[1]'); print('{\"kind\": \"start\"}')"
    assert list(script.read_rows([sys.executable, "-c", code], 60)) == [{"kind": "start"}]


CHILD = """
import json, sys
request = json.loads(sys.argv[1])
batch = request["batch"] or 100
print(json.dumps({"phase": "generate", "kind": "plan", "batch": batch, "sequence_bytes": 10, "layers": 2}))
if request["method"] == "kitty":
    sys.exit("died")
peak = 1000 + 10 * (batch - 90)
memory = {"peak_bytes": peak, "budget_bytes": 1000, "fits": peak <= 1000}
print(json.dumps({"phase": "generate", "kind": "memory", **memory}))
"""


def test_processes_that_die_do_not_start_or_take_too_much(shape, tmp_path, monkeypatch, capsys) -> None:
    """As `test_a_failure_loses_nothing_of_the_others` and the next, with real processes."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(script, "CHILDREN", {False: str(child), True: str(child)})
    out = tmp_path / "out.json"
    arguments = f"--model-shape {shape} --cache kitty --cache full --baseline hf-static --json {out}"
    assert script.main([*arguments.split(), "--hf-python", str(tmp_path / "no python")]) == 1
    saved = json.loads(out.read_text())
    kitty, full, static = saved["summary"]
    assert "ended with status 1: died" in kitty["error"]
    assert (full["batch"], full["fits"], full["complete"]) == (90, True, True)
    assert [row["batch"] for row in saved["rows"] if row["method"] == "full" and row["kind"] == "plan"] == [100, 90]
    assert "did not start" in static["error"]
    printed = capsys.readouterr().out
    assert "kitty did not finish" in printed
    assert "hf-static did not finish" in printed


@pytest.mark.slow
def test_the_whole_command(shape, tmp_path, monkeypatch) -> None:
    """Two caches of a tiny model, each measured by a process of its own."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = tmp_path / "out.json"
    arguments = (
        f"--model-shape {shape} --budget 2MB --prompt 40 --new 60 --quick --steps 2 --phases generate --json {out}"
    )
    assert script.main(arguments.split()) == 0
    pro, full = json.loads(out.read_text())["summary"]
    assert (pro["method"], full["method"]) == ("kitty-pro", "full")
    assert pro["tokens_per_s"] > 0
    assert full["tokens_per_s"] > 0


def test_the_plan_alone(shape, capsys) -> None:
    arguments = (
        f"--model-shape {shape} --plan --budget 2MB --new 200 --cache kitty --baseline hf-static --batches max,3"
    )
    assert script.main(arguments.split(), lambda *_: pytest.fail("started")) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = KVPlan.for_budget(TINY, "kitty", length=264, budget=2_000_000, weights=weight_shapes(TINY))
    assert lines[0].startswith(f"kitty        max  {plan.batch} sequences of 264 tokens")
    assert lines[1].startswith("kitty        3    3 sequences")
    assert "by trying" in lines[2]
    assert script.main(f"--model-shape {shape} --plan --budget 10KB".split()) == 2
    assert "leaves nothing for the cache" in capsys.readouterr().err


def test_a_process_that_dies_says_why() -> None:
    code = "import sys; print('{\"kind\": \"sample\"}'); sys.exit('no such thing')"
    first, last = script.read_rows([sys.executable, "-c", code], 60)
    assert first == {"kind": "sample"}
    assert last == {"kind": "error", "error": "ended with status 1: no such thing"}


def test_a_child_refuses_in_a_row(tmp_path) -> None:
    request = Request("kitty", {"model_type": "gpt2"}, budget=1)
    assert Request.from_json(request.to_json()) == request
    path = Path(script.__file__).with_name("bench_generate_ours.py")
    (row,) = script.read_rows([sys.executable, str(path), request.to_json()], 60, {"JAX_PLATFORMS": "cpu"})
    assert "gpt2" in row["error"]
    assert row["out_of_memory"] is False


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--cache kity", "unknown cache 'kity'"),
        ("--model-shape gpt", "neither a known shape"),
        ("--phases generate,other", "--phases takes generate and equal"),
        ("--batches 0", "--batches takes numbers and max"),
        ("--new 10", "--new 10 is too short"),
        ("--steps 0", "--steps must be 1 or more"),
        ("--prefill-tokens 63", "--prefill-tokens must be 64 or more, got 63"),
        ("--reserve 1", "--reserve is a fraction of the budget"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys) -> None:
    assert script.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


# ---------------------------------------------------------------- measuring a tiny model
GENERATE = ("plan", "compile", "compile", "prefill", "memory", "sample", "sample")


@pytest.mark.parametrize(
    "cache, phases, kinds",
    [
        pytest.param("kivi2", "generate", GENERATE, marks=pytest.mark.slow),
        ("full", "generate,equal", (*GENERATE, "compile", "sample")),
    ],
)
def test_a_tiny_model_from_budget_to_table(cache, phases, kinds, shape, tmp_path, capsys) -> None:
    arguments = f"--model-shape {shape} --budget 2MB --prompt 40 --new 200 --quick --steps 2 --equal-batch 2"
    arguments += " --prefill-tokens 64" if cache == "kivi2" else ""  # a sequence at a time
    options = f"{arguments} --lengths 170 --cache {cache} --phases {phases} --json {tmp_path / 'out'}".split()
    assert script.main(options, lambda request, limit, python: ours.measure(request)) == 0
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
def loop() -> ours.Loop:
    made = ours.Loop(functional(random_model(TINY)), "kitty", 3, 600)
    made.compile()
    made.fill()
    return made


def test_windows_with_and_without_a_page(loop) -> None:
    # Pages of keys are due at 160, 288, 416, 544 tokens, those of values 128 tokens later.
    due = [n for n in range(600) if loop.flushes(n, 1)]
    assert due == [159, 287, 415, 543]
    assert loop.quiet_start(300, 8) == 300
    assert loop.quiet_start(285, 8) == 279
    assert loop.flush_start(40, 8) == 152
    assert loop.flush_start(290, 8) == 287
    loop.window(408, 8)
    assert np.asarray(loop.state.lengths).tolist() == [416] * 3


def test_windows_over_a_page_change_the_pages_and_others_do_not(loop) -> None:
    def pages():
        return [np.asarray(layer.kv.key_pages) for layer in loop.state.layers]

    before = pages()
    loop.window(loop.quiet_start(300, 8), 8)
    assert all(np.array_equal(a, b) for a, b in zip(before, pages(), strict=True))
    loop.window(loop.flush_start(300, 8), 8)
    assert not any(np.array_equal(a, b) for a, b in zip(before, pages(), strict=True))


@pytest.mark.parametrize("budget, steps", [(64, 3), (128, 2), (8192, 1)])
def test_the_prompt_in_steps_of_a_budget(loop, budget, steps) -> None:
    prompts = ours.Prompts(loop, 40, budget)
    assert len(prompts.slices) == steps
    assert all(piece.tokens.size <= max(budget, 64) for piece in prompts.slices)
    assert sum(int(piece.lengths.sum()) for piece in prompts.slices) == 3 * 40
