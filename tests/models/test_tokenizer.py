"""Tokenizers rebuilt from GGUF metadata or read from a directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.gguf_format import GgufError
from kitty_jax.models.gguf_tokenizer import PRE_TOKENIZERS
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids
from tests.models.checkpoint_files import byte_level_tokenizer, write_gguf

TEXTS = ("the cat", "12345 the the  cat", "naïve Ünïcödé 😀\n\n\tend ", "<|eos|>the<think>x", "I'LL don't 3.14", "")


def gguf_with(path, **changes):
    """A model with the small tokenizer; keyword `pre="x"` changes tokenizer.ggml.pre, None removes it."""
    metadata = byte_level_tokenizer() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_gguf(path, "qwen3", metadata=metadata)
    return path


def words(pre, text):
    """The pieces that a pre-tokenizer cuts an ASCII text into, with spaces shown as such."""
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("smollm", "It's 2024 now!", ["It", "'s", " ", "2", "0", "2", "4", " now", "!"]),
        ("qwen2", "It's 2024 now!", ["It", "'s", " ", "2", "0", "2", "4", " now", "!"]),
        ("llama-bpe", "It's 2024 now!", ["It", "'s", " ", "202", "4", " now", "!"]),
        ("gpt-2", "It's 2024 now!", ["It", "'s", " 2024", " now", "!"]),
        ("default", "It's 2024 now!", ["It", "'", "s", " ", "202", "4", " now", "!"]),
        ("qwen2", "IT'S a.b\n\n  c", ["IT", "'S", " a", ".b", "\n\n", " ", " c"]),
        ("llama-bpe", "IT'S a.b\n\n  c", ["IT", "'S", " a", ".b", "\n\n", " ", " c"]),
        ("smollm", "IT'S a.b\n\n  c", ["IT", "'", "S", " a", ".", "b", "\n\n ", " c"]),
    ],
)
def test_words(pre, text, pieces):
    assert words(pre, text) == pieces


def test_merges_apply_in_order_within_words(tmp_path):
    tokenizer = load_tokenizer(gguf_with(tmp_path / "m.gguf", pre="llama3", add_bos_token=False))
    assert tokenizer.tokenize("the cat 123") == ["the", "Ġcat", "Ġ", "123"]
    tokenizer = load_tokenizer(gguf_with(tmp_path / "m.gguf", pre="qwen2"))
    assert tokenizer.tokenize("the cat 123") == ["the", "Ġcat", "Ġ", "1", "2", "3"]


def test_special_tokens_ids_and_template(tmp_path):
    tokenizer = load_tokenizer(gguf_with(tmp_path / "m.gguf"))
    bos = byte_level_tokenizer()["tokenizer.ggml.bos_token_id"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (bos, bos + 1, bos + 1)
    ids = tokenizer.encode("<think>the<|eos|>")
    assert ids == [bos + 2, tokenizer.convert_tokens_to_ids("the"), bos + 1]
    # Control tokens are skipped on request, tokens of the user's are text.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>the"
    messages = [{"role": "user", "content": "the cat"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "the cat<|eos|>"
    assert "[PAD]" not in tokenizer.get_vocab()
    assert tokenizer.model_max_length == 256


@pytest.mark.parametrize(
    "changes, adds_bos",
    [
        ({"pre": "qwen2"}, False),
        ({"pre": "smollm"}, False),
        ({"pre": "gpt-2"}, False),
        ({"pre": "default"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
    ],
)
def test_text_survives_and_bos_is_put_in_front_where_the_file_says_so(tmp_path, changes, adds_bos):
    tokenizer = load_tokenizer(gguf_with(tmp_path / "m.gguf", **changes))
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) is adds_bos
    assert tokenizer.bos_token_id not in tokenizer.encode("the", add_special_tokens=False)
    for text in ("the cat", " 12345 the\n", "naïve 😀\t<think>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("the") == tokenizer.encode("the")


@pytest.mark.parametrize("named_class", [None, "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_a_directory_is_read_as_its_tokenizer_json_says(tmp_path, named_class):
    tokenizer = load_tokenizer(gguf_with(tmp_path / "m.gguf", pre="smollm"))
    tokenizer.save_pretrained(tmp_path / "dir")
    if named_class:
        config = json.loads((tmp_path / "dir" / "tokenizer_config.json").read_text())
        (tmp_path / "dir" / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": named_class}))
    again = load_tokenizer(tmp_path / "dir")
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text), text
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, "tokenizer model 'llama' is not supported; only 'gpt2'"),
        ({"pre": "tekken"}, "'tekken' is not supported; supported: smollm, llama-bpe, qwen2, gpt-2, default, llama3"),
        ({"pre": None}, "pre = None is not supported"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"merges": ["t h", "q zz"]}, "merge 'q zz' does not join two tokens"),
        ({"eos_token_id": 5000}, "eos_token_id = 5000, outside the vocabulary"),
        ({"token_type": [1, 1]}, "268 tokens need as many token types"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos is to be added"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "repeats tokens: 2 entries, 1 different"),
    ],
)
def test_unsupported_tokenizers_of_gguf_files_are_refused(tmp_path, changes, message):
    # An empty array cannot be written, so an absent merge list stands in where the case does not reach it.
    changes = {key: (["a a"] if value == [] else value) for key, value in changes.items()}
    with pytest.raises(GgufError, match=message):
        load_tokenizer(gguf_with(tmp_path / "m.gguf", **changes))


def test_other_paths_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="never downloaded"):
        load_tokenizer(tmp_path / "Qwen" / "Qwen3-8B")
    with pytest.raises(CheckpointError, match=r"looked for tokenizer\.json, or vocab\.json with merges\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_stop_tokens(tmp_path):
    bos = byte_level_tokenizer()["tokenizer.ggml.bos_token_id"]
    assert stop_token_ids(gguf_with(tmp_path / "m.gguf", eot_token_id=7)) == (7, bos + 1)
    assert stop_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert stop_token_ids(tmp_path) == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert stop_token_ids(tmp_path) == (4, 9)


def test_transformers_is_imported_late_and_silently(tmp_path):
    gguf_with(tmp_path / "m.gguf")
    code = (
        "import sys\n"
        "from kitty_jax.models.checkpoint import plan_checkpoint\n"
        "from kitty_jax.models.tokenizer import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"plan_checkpoint({str(tmp_path / 'm.gguf')!r})\n"
        f"print(load_tokenizer({str(tmp_path / 'm.gguf')!r}).encode('the'))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("[")
