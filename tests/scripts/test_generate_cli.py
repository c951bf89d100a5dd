"""scripts/generate.py: a tiny random checkpoint in, text or JSON out, and errors of one line."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.inference.generate import generate
from kitty_jax.inference.sampling import Sampling
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.tokenizer import load_tokenizer
from scripts import generate as cli
from tests.scripts.cli_checkpoint import write_checkpoint
from tests.scripts.tiny_shape import error_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli"))


def expected(checkpoint: Path, ids: list[list[int]], **options) -> tuple[list[list[int]], list[str]]:
    """New ids and text by way of the library, decoded in one piece."""
    sequences = generate(load_model(checkpoint), ids, **options).sequences()
    decode = load_tokenizer(checkpoint).decode
    return sequences, [decode(s, skip_special_tokens=True, clean_up_tokenization_spaces=False) for s in sequences]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_prompt_streams_its_text_and_ends_with_a_table(checkpoint, capsys) -> None:
    prompt = "the cat and 12 more"
    assert cli.main(["--model", str(checkpoint), "--prompt", prompt, "--max-new-tokens", "30"]) == 0
    out, err = capsys.readouterr()
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer(prompt)["input_ids"]
    sequences, texts = expected(checkpoint, [ids], max_new_tokens=30, eos=tokenizer.eos_token_id)
    assert out.startswith(f"{texts[0]}\n\nprompt tokens")
    rows = {line[:20].strip(): line[20:].split() for line in out[len(texts[0]) :].strip().splitlines()}
    assert rows["prompt tokens"] == [str(len(ids)), "1", "prompt"]
    assert rows["new tokens"] == [str(len(sequences[0]))]
    assert float(rows["compilation"][0]) > 0
    assert float(rows["first tokens after"][0]) <= float(rows["generation"][0])
    assert rows["generation"][-1] == "tokens/s"
    assert rows["cache kitty-pro"][1] == "MB"
    assert f"{2 * 64 * 2 * 16 * 2 / 1e6:.2f}" == rows["the same in bf16"][0]
    assert "loading" in err
    assert "compiled in" in err


QUEUE = ["the cat", "12", "naïve {b}\nmore", "end", "a"]
LIBRARY = {"cache": "full", "max_new_tokens": 20, "capacity": 70, "seed": 4}
FLAGS = (
    "--cache full --max-new-tokens 20 --capacity 70 --seed 4 --temperature 1.5 --top-k 90 --top-p 0.98 --min-p 0.001"
)


@pytest.fixture(scope="module")
def queue(checkpoint, tmp_path_factory) -> tuple[list[str], list[list[int]], list[str]]:
    """Arguments for five prompts, and the new ids and text that each gets alone."""
    file = tmp_path_factory.mktemp("queue") / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt, "id": 7}) for prompt in QUEUE[1:]))
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokenizer(prompt)["input_ids"] for prompt in QUEUE]
    sampler = Sampling(temperature=1.5, top_k=90, top_p=0.98, min_p=0.001)
    sequences, texts = expected(checkpoint, ids, sampler=sampler, eos=tokenizer.eos_token_id, **LIBRARY)
    arguments = ["--model", str(checkpoint), "--prompt", QUEUE[0], "--prompts-file", str(file), *FLAGS.split()]
    return arguments, sequences, texts


@pytest.mark.parametrize("slots", [2, 5])
def test_json_of_prompts_all_at_once_and_in_a_queue(checkpoint, queue, slots, capsys) -> None:
    arguments, sequences, texts = queue
    tokenizer = load_tokenizer(checkpoint)
    assert cli.main([*arguments, "--json", "--slots", str(slots)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    outputs = {name: [o[name] for o in report["outputs"]] for name in report["outputs"][0]}
    assert outputs["prompt"] == QUEUE
    assert outputs["token_ids"] == sequences
    assert outputs["text"] == texts
    assert outputs["prompt_tokens"] == [len(tokenizer(prompt)["input_ids"]) for prompt in QUEUE]
    assert outputs["new_tokens"] == [len(s) for s in sequences]
    assert outputs["finished_by_eos"] == [s[-1] == tokenizer.eos_token_id for s in sequences]
    assert (report["cache"], report["capacity"], report["dtype"], report["slots"]) == ("full", 70, "float32", slots)
    assert report["device"] == jax.devices()[0].device_kind
    # Keys and values of 70 tokens, 2 heads of 16, 2 bytes; the model's float32 takes twice that.
    assert report["cache_bytes"]["bf16"] == slots * 70 * 2 * 2 * 16 * 2
    assert report["cache_bytes"]["payload"] == 2 * report["cache_bytes"]["bf16"]
    assert set(report["seconds"]) == {"load", "compile", "first_tokens", "generation"}
    assert report["tokens_per_second"] > 0
    assert "prompt/s" not in err  # no bar where nobody sees it


def test_texts_come_in_order_below_their_titles(queue, capsys) -> None:
    arguments, _, texts = queue
    titles = [f"[{i}] {' '.join(prompt.split())}" for i, prompt in enumerate(QUEUE, 1)]
    whole = "\n\n".join(f"{title}\n{text}" for title, text in zip(titles, texts, strict=True))
    assert cli.main([*arguments, "--slots", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{whole}\n\nprompt tokens")


def test_a_bar_where_json_is_waited_for_at_a_terminal(queue, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert cli.main([*queue[0], "--slots", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == 2
    assert "5/5" in terminal.getvalue()


def test_chat_uses_the_template_of_the_checkpoint(checkpoint, capsys) -> None:
    arguments = ["--model", str(checkpoint), "--prompt", "the cat", "--cache", "full", "--max-new-tokens", "4"]
    assert cli.main([*arguments, "--chat", "--json", "--ignore-eos"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    tokenizer = load_tokenizer(checkpoint)
    ids = [*tokenizer("the cat")["input_ids"], tokenizer.eos_token_id]  # its template ends a message with the eos
    assert output["prompt_tokens"] == len(ids)
    sequences, _ = expected(checkpoint, [ids], cache="full", max_new_tokens=4)
    assert output["token_ids"] == sequences[0]


def test_prompts_from_standard_input(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a"}\nplain\n'))
    options = cli.parser().parse_args(["--model", "m", "--prompts-file", "-"])
    assert cli.read_prompts(options) == ['{"prompt": "a"}', "plain"]  # not all lines are JSON, so none is


def test_sampling_flags() -> None:
    def sampler(*flags: str):
        return cli.sampler_of(cli.parser().parse_args(["--model", "m", *flags]))

    assert sampler() == sampler("--temperature", "0") == cli.Greedy()
    assert sampler("--temperature", "0.5") == Sampling(temperature=0.5)
    assert sampler("--top-k", "5") == Sampling(top_k=5)
    assert sampler("--top-p", "0.5", "--min-p", "0.1") == Sampling(top_p=0.5, min_p=0.1)


def test_loading_on_a_terminal_rewrites_one_line(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    show = cli.loading("m")
    show(1_000_000, 4_000_000, "model.norm.weight")
    show(4_000_000, 4_000_000, "lm_head.weight")
    lines = terminal.getvalue().split("\r")
    assert lines[1].startswith("loading  25.0 % of 4 MB  model.norm.weight")
    assert lines[2].startswith("loading 100.0 % of 4 MB  lm_head.weight")
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--prompt x --cache kity", "unknown cache 'kity'; known caches: full, kivi2, "),
        ("", "no prompt: give --prompt TEXT or --prompts-file FILE"),
        ("--prompt=", "empty prompt: prompt 1 of 1 holds no text"),
        ("--prompt x --prompts-file nowhere.txt", "nowhere.txt"),
        ("--prompt x --max-new-tokens 0", "--max-new-tokens: must be a whole number, 1 or more, got 0"),
        ("--prompt x --slots 0", "--slots: must be a whole number, 1 or more, got 0"),
        ("--prompt x --top-p 2", "top_p must be above 0 and at most 1, or None, got 2.0"),
        ("--prompt x --temperature -1", "temperature must be above 0"),
        ("--prompt x --temperature 0 --top-k 5 --min-p 0.1", "leave out --top-k and --min-p"),
        (
            "--prompt abcdef --capacity 5 --max-new-tokens 1",
            "the prompt of row 0 has 6 tokens, and with max_new_tokens 1 needs a capacity of 7, but it is 5",
        ),
        ("--prompt abc --capacity 5 --max-new-tokens 3", "needs a capacity of 6, but it is 5"),
        ("--prompt x --no-such-flag", "unrecognized arguments"),
        ("--prompt x --dtype int8", "invalid choice: 'int8'"),
    ],
)
def test_errors_are_one_line_before_the_model_is_loaded(checkpoint, flags, message, capsys) -> None:
    error = error_of(cli.main, f"--model {checkpoint} {flags}", capsys)
    assert error.startswith("generate.py: ")
    assert message in error


def test_errors_of_the_checkpoint_and_of_json_lines(checkpoint, tmp_path, capsys) -> None:
    def error(model: Path, flags: str = "--prompt x") -> str:
        return error_of(cli.main, f"--model {model} {flags}", capsys)

    assert "never downloaded" in error(tmp_path / "missing")
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    assert "no tokenizer in this directory" in error(bare)
    plain = shutil.copytree(checkpoint, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja"))
    assert "this checkpoint has no chat template" in error(plain, "--prompt x --chat")
    rules = shutil.copytree(checkpoint, tmp_path / "rules")
    (rules / "chat_template.jinja").write_text("{{ raise_exception('no such turn') }}")
    assert "the chat template refused the prompt 'x': no such turn" in error(rules, "--prompt x --chat")
    (file := tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    wanted = 'line 2: wanted a JSON object with a text "prompt", got {"text": "b"}'
    assert wanted in error(checkpoint, f"--prompts-file {file}")


def test_an_interruption_is_no_traceback(monkeypatch, capsys) -> None:
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert cli.main(["--model", "m"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_runs_from_another_folder_without_installation(tmp_path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    for name in CACHE_NAMES:
        assert f" {name.replace('_', '-')}" in text
