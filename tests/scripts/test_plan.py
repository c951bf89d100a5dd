"""scripts/plan.py: its table, its JSON, and what it refuses."""

import json

import jax
import pytest

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.models.hf_config import config_to_hf
from scripts import plan as script
from scripts.model_shapes import read_shape
from tests.scripts.tiny_shape import error_of


def test_the_table_allocates_nothing(capsys) -> None:
    before = len(jax.live_arrays())
    # 50 TB in bfloat16: could not be allocated anywhere.
    assert (
        script.main(["--layers", "2", "--batch", "800000", *(x for name in CACHE_NAMES for x in ("--cache", name))])
        == 0
    )
    assert len(jax.live_arrays()) == before
    out = capsys.readouterr().out
    assert all(f"| {name} | 800,000 | 8,192 |" in out for name in CACHE_NAMES)
    assert script.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen3-8b: 36 layers, 8 KV heads, head size 128; no budget, weights 16.38 GB")
    rows = {cells[1]: cells[2:-1] for cells in ([c.strip() for c in x.split("|")] for x in lines if x[:1] == "|")}
    assert rows["full"] == ["1", "8,192", "1.21 GB", "1.21 GB", "1.21 GB", "1.00", "16.00", "-", "-"]
    assert rows["kitty-pro"] == ["1", "8,192", "219.99 MB", "219.99 MB", "1.21 GB", "5.49", "2.91", "2.52", "-"]


def test_budgets_parts_and_requests(capsys) -> None:
    assert script.main("--budget 80GB --parts --cache full --cache kitty-pro".split()) == 0
    out = capsys.readouterr().out
    assert "| full | 46 | 8,192 |" in out
    assert "| kitty-pro | 252 | 8,192 |" in out
    assert "key metadata" in out
    assert script.main("--budget 20GB --cache full --batch 9 --length 9000".split()) == 0
    assert "does not fit: full" in capsys.readouterr().out
    options = "--model-shape llama3-70b --requests 31x128000,4000 --cache kitty --model-ways 8 --budget 80GB --json"
    assert script.main(options.split()) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["batch"] == 32
    assert made["fits"]
    assert made["pool_pages"] == 31 * ((128_000 - 32) // 128) + (4000 - 32) // 128


def test_what_is_left_out_has_a_default(capsys) -> None:
    for options, wanted in (("", (1, 8192)), ("--batch 3", (3, 8192)), ("--length 5 --data 2", (2, 5))):
        assert script.main(["--cache", "kitty", "--json", *options.split()]) == 0
        (made,) = json.loads(capsys.readouterr().out)
        assert (made["batch"], made["length"]) == wanted
    # The workspace takes the place of the default reserve.
    assert script.main("--cache kitty --json --budget 80GB --workspace 1GB".split()) == 0
    assert json.loads(capsys.readouterr().out)[0]["workspace"] == 10**9


def test_a_shape_from_a_file(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(read_shape("qwen3-0.6b"))))
    assert read_shape(str(tmp_path)) == read_shape(str(tmp_path / "config.json")) == read_shape("qwen3-0.6b")
    assert script.main(["--model-shape", str(tmp_path), "--layers", "3", "--cache", "kitty"]) == 0
    assert "3 layers, 8 KV heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model-shape gpt", "neither a known shape"),
        ("--cache kity", "unknown cache 'kity'"),
        ("--requests 34 --length 3", "leave --length and --batch out"),
        ("--requests=", "COUNTxLENGTH, separated by commas, got ''"),
        ("--length 0", "argument --length: must be a whole number, 1 or more, got 0"),
        ("--batch 0 --budget 80GB", "argument --batch: must be a whole number, 1 or more, got 0"),
        ("--budget 0", "a whole number, 1 or more, got 0"),
        ("--budget much", "an amount of memory is a number with a unit"),
        ("--data 0", "argument --data: must be a whole number"),
        ("--layers 0", "argument --layers: must be a whole number"),
        ("--budget 80GB --reserve 0.1 --workspace 1GB", "the fraction or the bytes"),
        ("--budget 1GB", "leaves nothing for the cache"),
        ("--no-such-flag", "unrecognized arguments"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys) -> None:
    error = error_of(script.main, arguments, capsys)
    assert error.startswith("plan.py: ")
    assert message in error
