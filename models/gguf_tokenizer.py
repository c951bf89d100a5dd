"""A byte-level BPE tokenizer rebuilt from the metadata of a GGUF file.

How text is cut into words before merging is not stored, only the name of a known way (`tokenizer.ggml.pre`).
`PRE_TOKENIZERS` has the ones that Qwen, LLaMA 3, SmolLM and GPT-2 use; a wrong one would give plausible but wrong
tokens, so an unknown name is refused.
"""

import reprlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kitty_jax.models.gguf_format import GgufContainer, GgufError

_MODEL = "gpt2"  # GGUF's name for byte-level BPE
# Token types of GGUF; the other ones are normal (1) and byte (6).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# The words of Qwen and LLaMA 3; %s is how many digits go together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*splits: Any, use_regex: bool = False) -> Any:
    """Splits in order, then bytes to printable characters; `use_regex` also cuts GPT-2's words."""
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])


def _isolate(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _default() -> Any:
    # What llama.cpp does when it does not know better: punctuation, GPT-2's words, numbers in threes.
    return _byte_level(
        _isolate(r"[\p{P}$+<=>^~|]+"), _isolate(_GPT2_WORDS), _isolate(r"\p{N}+"), _isolate("[0-9][0-9][0-9]")
    )


PRE_TOKENIZERS = {
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: _byte_level(_isolate(_WORDS % "{1,3}")),
    "qwen2": lambda: _byte_level(_isolate(_WORDS % "")),
    "gpt-2": lambda: _byte_level(use_regex=True),
    "default": _default,
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_options(path: str | Path) -> dict[str, Any]:
    """What `PreTrainedTokenizerFast` takes to be the tokenizer of a .gguf file: the `tokenizers.Tokenizer` of its
    vocabulary and merges, special tokens, whether bos and eos are added, and the chat template."""
    container = GgufContainer(path)
    metadata = container.metadata
    pre = _checked_pre_tokenizer(container)
    tokens, merges = _strings(container, "tokens"), _strings(container, "merges")
    options: dict[str, Any] = {
        "tokenizer_object": _backend(container, pre, tokens, merges),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length", 1 << 30),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := token_id(container, key)) is not None:
            options[f"{name}_token"] = tokens[token]
    # llama.cpp's rule for files without the key: only LLaMA 3's tokenizer starts a text with bos.
    for name, default in (("bos", pre == "llama-bpe"), ("eos", False)):
        options[f"add_{name}_token"] = bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))
        if options[f"add_{name}_token"] and f"{name}_token" not in options:
            raise GgufError(
                f"{path}: {name} is to be added to every text, but tokenizer.ggml.{name}_token_id is missing."
            )
    return options


def token_id(container: GgufContainer, key: str) -> int | None:
    """The special token of a name such as "eos"; None where the file has none."""
    token = container.metadata.get(f"tokenizer.ggml.{key}_token_id")
    vocabulary = len(container.metadata.get("tokenizer.ggml.tokens", ()))
    if token is not None and not (isinstance(token, int) and 0 <= token < vocabulary):
        raise GgufError(
            f"{container.path}: tokenizer.ggml.{key}_token_id = {token}, outside the vocabulary of {vocabulary} tokens."
        )
    return token


def _strings(container: GgufContainer, key: str) -> list[str]:
    values = container.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise GgufError(f"{container.path}: no tokenizer.ggml.{key}: this file has no usable tokenizer.")
    return values


def _checked_pre_tokenizer(container: GgufContainer) -> str:
    model, pre = container.metadata.get("tokenizer.ggml.model"), container.metadata.get("tokenizer.ggml.pre")
    if model != _MODEL:
        raise GgufError(
            f"{container.path}: tokenizer model {model!r} is not supported; only {_MODEL!r} (byte-level BPE) is. Use "
            "the tokenizer of the original model's directory."
        )
    if isinstance(pre, str):
        pre = _ALIASES.get(pre, pre)
    if pre not in list(PRE_TOKENIZERS):
        raise GgufError(
            f"{container.path}: pre-tokenizer tokenizer.ggml.pre = {pre!r} is not supported; supported: "
            f"{', '.join([*PRE_TOKENIZERS, *_ALIASES])}. Use the tokenizer of the original model's directory."
        )
    return pre


def _backend(container: GgufContainer, pre: str, tokens: list[str], merges: list[str]) -> Tokenizer:
    types = container.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise GgufError(f"{container.path}: {len(tokens)} tokens need as many token types, got {reprlib.repr(types)}.")
    # Unused tokens pad the vocabulary to the size of the embedding; text never gives them.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    used = sum(kind != _UNUSED for kind in types)
    if len(vocabulary) != used:
        raise GgufError(
            f"{container.path}: the vocabulary repeats tokens: {used} entries, {len(vocabulary)} different ones."
        )
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise GgufError(
                f"{container.path}: merge {merge!r} does not join two tokens of the vocabulary into a third."
            )
        pairs.append((left, right))
    # LLaMA 3 takes a word that is in the vocabulary whole, even where the merges do not lead to it.
    backend = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return backend
