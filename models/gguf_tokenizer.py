"""A byte-level BPE tokenizer rebuilt from the metadata of a GGUF file.

How text is cut into words before merging is not stored, only the name of a known way (`tokenizer.ggml.pre`).
`PRE_TOKENIZERS` has the ones that Qwen, LLaMA 3, SmolLM and GPT-2 use; a wrong one would give plausible but wrong
tokens, so an unknown name is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kitty_jax.models.gguf_format import GgufContainer, GgufError, open_gguf
from kitty_jax.models.tokenizer import import_transformers

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


def tokenizer_of_gguf(path: str | Path) -> Any:
    """The PreTrainedTokenizerFast of a .gguf file: vocabulary, merges, special tokens, bos and eos, chat template."""
    container = open_gguf(path)
    metadata = container.metadata
    pre = _check_kind(container)
    tokens = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise GgufError(
            f"{path}: no tokenizer.ggml.tokens or no tokenizer.ggml.merges: this file has no usable tokenizer."
        )
    backend = _backend(container, pre, tokens, merges)
    special = {
        f"{name}_token": tokens[_token_id(container, key, len(tokens))]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    options = {
        # llama.cpp's rule for files without the key: only LLaMA 3's tokenizer starts a text with bos.
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 1 << 30)),
    }
    for name in ("bos", "eos"):
        if options[f"add_{name}_token"] and f"{name}_token" not in special:
            raise GgufError(
                f"{path}: {name} is to be added to every text, but tokenizer.ggml.{name}_token_id is missing."
            )
    tokenizer = import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _check_kind(container: GgufContainer) -> str:
    model, pre = container.metadata.get("tokenizer.ggml.model"), container.metadata.get("tokenizer.ggml.pre")
    if model != _MODEL:
        raise GgufError(
            f"{container.path}: tokenizer model {model!r} is not supported; only {_MODEL!r} (byte-level BPE) is. Use "
            "the tokenizer of the original model's directory."
        )
    pre = _ALIASES.get(pre, pre)
    if pre not in PRE_TOKENIZERS:
        raise GgufError(
            f"{container.path}: pre-tokenizer tokenizer.ggml.pre = {pre!r} is not supported; supported: "
            f"{', '.join([*PRE_TOKENIZERS, *_ALIASES])}. Use the tokenizer of the original model's directory."
        )
    return pre


def _token_id(container: GgufContainer, key: str, vocabulary: int) -> int:
    token = int(container.metadata[f"tokenizer.ggml.{key}_token_id"])
    if not 0 <= token < vocabulary:
        raise GgufError(
            f"{container.path}: tokenizer.ggml.{key}_token_id = {token}, outside the vocabulary of {vocabulary} tokens."
        )
    return token


def _backend(container: GgufContainer, pre: str, tokens: list[str], merges: list[str]) -> Tokenizer:
    metadata: Mapping[str, Any] = container.metadata
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise GgufError(f"{container.path}: {len(tokens)} tokens but {len(types)} token types.")
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
