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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli"))


def expected(checkpoint: Path, ids: list[list[int]], **options) -> tuple[list[list[int]], list[str]]:
    """New ids and text by way of the library, decoded in one piece."""
    sequences = generate(load_model(checkpoint), ids, **options).sequences()
    decode = load_tokenizer(checkpoint).decode
    return sequences, [decode(s, skip_special_tokens=True, clean_up_tokenization_spaces=False) for s in sequences]


def test_one_prompt_streams_its_text_and_ends_with_a_table(checkpoint, capsys) -> None:
    prompt = "the cat and 12 more"
    status = cli.main(["--model", str(checkpoint), "--prompt", prompt, "--max-new-tokens", "30"])
    out, err = capsys.readouterr()
    assert status == 0
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer(prompt)["input_ids"]
    sequences, texts = expected(checkpoint, [ids], max_new_tokens=30, eos=tokenizer.eos_token_id)
    assert out.startswith(f"{texts[0]}\n\nprompt tokens")
    table = out[len(texts[0]) :]
    rows = {line[:20].strip(): line[20:].split() for line in table.strip().splitlines()}
    assert rows["prompt tokens"] == [str(len(ids)), "1", "prompt"]
    assert rows["new tokens"] == [str(len(sequences[0]))]
    assert float(rows["compilation"][0]) > 0
    assert rows["decoding"][-1] == "tokens/s"
    assert rows["cache kitty-pro"][1] == "MB"
    assert f"{2 * 64 * 2 * 16 * 2 / 1e6:.2f}" == rows["the same in bf16"][0]
    assert "loading" in err
    assert "compiled in" in err


def test_json_of_several_prompts_with_sampling(checkpoint, capsys, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "12 cats", "id": 7}\n\n{"prompt": "the\\nend"}\n')
    flags = "--cache full --temperature 1.5 --top-k 90 --top-p 0.98 --min-p 0.001 --seed 4 --max-new-tokens 20 --json"
    status = cli.main(
        [
            "--model",
            str(checkpoint),
            "--prompt",
            "naïve",
            "--prompts-file",
            str(file),
            *flags.split(),
            "--capacity",
            "70",
        ]
    )
    out, err = capsys.readouterr()
    assert status == 0
    report = json.loads(out)
    prompts = ["naïve", "12 cats", "the\nend"]
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    sampler = Sampling(temperature=1.5, top_k=90, top_p=0.98, min_p=0.001)
    eos = tokenizer.eos_token_id
    options = {"cache": "full", "sampler": sampler, "seed": 4, "max_new_tokens": 20, "capacity": 70, "eos": eos}
    sequences, texts = expected(checkpoint, ids, **options)
    assert [o["prompt"] for o in report["outputs"]] == prompts
    assert [o["token_ids"] for o in report["outputs"]] == sequences
    assert [o["text"] for o in report["outputs"]] == texts
    assert [o["prompt_tokens"] for o in report["outputs"]] == [len(i) for i in ids]
    assert [o["new_tokens"] for o in report["outputs"]] == [len(s) for s in sequences]
    assert [o["finished_by_eos"] for o in report["outputs"]] == [s[-1] == eos for s in sequences]
    assert (report["cache"], report["capacity"], report["dtype"]) == ("full", 70, "float32")
    # Three sequences, 70 tokens, keys and values, 2 heads of 16, 2 bytes; the model's float32 takes twice that.
    assert report["cache_bytes"]["bf16"] == 3 * 70 * 2 * 2 * 16 * 2
    assert report["cache_bytes"]["payload"] == 2 * report["cache_bytes"]["bf16"]
    assert set(report["seconds"]) == {"load", "compile", "prompt", "decode"}
    assert report["tokens_per_second"]["decode"] > 0
    assert "compiled in" in err


def test_several_prompts_come_below_their_titles(checkpoint, capsys, tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("12 {cats}\n  \nthe end\n")
    arguments = ["--model", str(checkpoint), "--prompts-file", str(file), "--cache", "full", "--max-new-tokens", "9"]
    assert cli.main([*arguments, "--capacity", "70", "--ignore-eos"]) == 0
    out = capsys.readouterr().out
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokenizer(prompt)["input_ids"] for prompt in ("12 {cats}", "the end")]
    _, texts = expected(checkpoint, ids, cache="full", max_new_tokens=9, capacity=70)
    assert out.startswith(f"[1] 12 {{cats}}\n{texts[0]}\n\n[2] the end\n{texts[1]}\n\nprompt tokens")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


QUEUE = ["the cat", "12", "a {b} and more", "naïve", "end"]


def queue_of(checkpoint, tmp_path, *flags: str) -> tuple[list[str], list[list[int]], list[str]]:
    """Arguments for five prompts of which two run at a time, and the new ids and text that each gets alone."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(QUEUE))
    arguments = ["--model", str(checkpoint), "--prompts-file", str(file), "--slots", "2", "--cache", "full", *flags]
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokenizer(prompt)["input_ids"] for prompt in QUEUE]
    options = {"cache": "full", "max_new_tokens": 20, "capacity": 70, "sampler": Sampling(1.5), "seed": 4}
    sequences, texts = expected(checkpoint, ids, eos=tokenizer.eos_token_id, **options)
    flags = ["--max-new-tokens", "20", "--capacity", "70", "--temperature", "1.5", "--seed", "4"]
    return [*arguments, *flags], sequences, texts


def test_more_prompts_than_slots_go_through_a_queue(checkpoint, capsys, tmp_path, monkeypatch) -> None:
    arguments, sequences, texts = queue_of(checkpoint, tmp_path, "--json")
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [o["prompt"] for o in report["outputs"]] == QUEUE
    assert [o["token_ids"] for o in report["outputs"]] == sequences
    assert [o["text"] for o in report["outputs"]] == texts
    assert report["slots"] == 2
    assert report["cache_bytes"]["bf16"] == 2 * 70 * 2 * 2 * 16 * 2
    assert report["seconds"]["generation"] > 0
    assert report["seconds"]["decode"] is report["tokens_per_second"]["prompt"] is None
    assert report["tokens_per_second"]["generation"] > 0
    assert "prompt/s" not in err  # no bar where nobody sees it

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == report["outputs"]
    assert "5/5" in terminal.getvalue()


def test_a_queue_writes_its_texts_in_order_beside_the_bar(checkpoint, capsys, tmp_path, monkeypatch) -> None:
    arguments, _, texts = queue_of(checkpoint, tmp_path)
    whole = "\n\n".join(f"[{i}] {prompt}\n{text}" for i, (prompt, text) in enumerate(zip(QUEUE, texts, strict=True), 1))
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{whole}\n\nprompt tokens")
    rows = {line[:20].strip(): line[20:].split() for line in out[len(whole) :].strip().splitlines()}
    assert rows["generation"][-1] == "tokens/s"
    assert not {"decoding", "prompt step"} & set(rows)

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{whole}\n\nprompt tokens")
    assert "5/5" in terminal.getvalue()


def test_chat_uses_the_template_of_the_checkpoint(checkpoint, capsys) -> None:
    arguments = ["--model", str(checkpoint), "--prompt", "the cat", "--cache", "full", "--max-new-tokens", "4"]
    assert cli.main([*arguments, "--chat", "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    tokenizer = load_tokenizer(checkpoint)
    ids = [*tokenizer("the cat")["input_ids"], tokenizer.eos_token_id]  # its template ends a turn with the eos
    assert output["prompt_tokens"] == len(ids)
    sequences, _ = expected(checkpoint, [ids], cache="full", max_new_tokens=4, eos=tokenizer.eos_token_id)
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
        ("--prompt x --max-new-tokens 0", "--max-new-tokens must be a whole number, 1 or more, got 0"),
        ("--prompt x --slots 0", "--slots must be a whole number, 1 or more, got 0"),
        ("--prompt x --top-p 2", "top_p must be above 0 and at most 1, or None, got 2.0"),
        ("--prompt x --temperature -1", "temperature must be above 0"),
        ("--prompt x --temperature 0 --top-k 5 --min-p 0.1", "leave out --top-k and --min-p"),
        ("--prompt abcdef --capacity 5 --max-new-tokens 1", "the prompt of row 0 has 6 tokens, the capacity is 5"),
        ("--prompt abc --capacity 5 --max-new-tokens 3", "needs a capacity of 6, but it is 5"),
    ],
)
def test_errors_are_one_line_before_the_model_is_loaded(checkpoint, flags, message, capsys) -> None:
    assert cli.main(["--model", str(checkpoint), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("generate.py: ")
    assert message in err


def test_errors_of_the_checkpoint(checkpoint, tmp_path, capsys) -> None:
    def error(model: Path, *flags: str) -> str:
        assert cli.main(["--model", str(model), "--prompt", "x", *flags]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    assert "never downloaded" in error(tmp_path / "missing")
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    assert "no tokenizer in this directory" in error(bare)
    plain = shutil.copytree(checkpoint, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja"))
    assert "this checkpoint has no chat template" in error(plain, "--chat")
    (checkpoint_with_rules := shutil.copytree(checkpoint, tmp_path / "rules"))
    (checkpoint_with_rules / "chat_template.jinja").write_text("{{ raise_exception('no such turn') }}")
    assert "the chat template refused the prompt 'x': no such turn" in error(checkpoint_with_rules, "--chat")


def test_bad_json_line(checkpoint, tmp_path, capsys) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert cli.main(["--model", str(checkpoint), "--prompts-file", str(file)]) == 2
    assert 'line 2: wanted a JSON object with a text "prompt", got {"text": "b"}' in capsys.readouterr().err


def test_wrong_flags_are_one_line_too(capsys) -> None:
    for flags in (["--model", "m", "--no-such-flag"], ["--prompt", "x"], ["--model", "m", "--dtype", "int8"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(flags)
        assert caught.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_runs_from_another_folder_without_installation(tmp_path) -> None:
    script = str(ROOT / "scripts" / "generate.py")
    result = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    for name in CACHE_NAMES:
        assert f" {name.replace('_', '-')}" in text
    result = subprocess.run(
        [sys.executable, script, "--model", "nowhere", "--prompt", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("generate.py: nowhere: no such file or directory.")
    assert "Traceback" not in result.stderr


def test_device_is_named_in_the_report(checkpoint, capsys) -> None:
    arguments = ["--model", str(checkpoint), "--prompt", "x", "--cache", "full", "--max-new-tokens", "1", "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == jax.devices()[0].device_kind
    assert report["tokens_per_second"]["decode"] is None  # the prompt step gave the only token
