"""Tokenizers of checkpoints on disk, as transformers' PreTrainedTokenizerFast. Nothing is downloaded.

transformers takes seconds to import, so it is imported on first use only.
"""

from pathlib import Path
from typing import Any

from kitty_jax.models.checkpoint_source import CheckpointError
from kitty_jax.models.hf_config import import_transformers
from kitty_jax.models.safetensors_dir import read_json

# Either of these makes a tokenizer; the first one that is complete is used.
FILE_SETS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_GENERATION_CONFIG, _CONFIG = "generation_config.json", "config.json"


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a Hugging Face directory or a .gguf file, as a PreTrainedTokenizerFast.

    A directory: `tokenizer.json` is taken as it is, whatever class tokenizer_config.json names (some classes of
    transformers rebuild it with a pre-tokenizer of their own); else `vocab.json` with `merges.txt` through
    AutoTokenizer. A .gguf file: rebuilt from its metadata (`kitty_jax.models.gguf_tokenizer`). Whether a
    beginning-of-sequence token is put in front is what the checkpoint says.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or directory. Tokenizers are read from disk and never downloaded."
        )
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: neither a directory nor a .gguf file; a tokenizer comes from either.")
        from kitty_jax.models.gguf_tokenizer import tokenizer_options

        return import_transformers().PreTrainedTokenizerFast(**tokenizer_options(path))
    files = next((files for files in FILE_SETS if all((path / name).is_file() for name in files)), None)
    if files is None:
        wanted = ", or ".join(" with ".join(files) for files in FILE_SETS)
        raise CheckpointError(
            f"{path}: no tokenizer in this directory; looked for {wanted}. Copy the files from the original model."
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            read_json(path / name)  # a damaged file is named here, before a reader that would not name it
    transformers = import_transformers()
    loader = transformers.PreTrainedTokenizerFast if files == FILE_SETS[0] else transformers.AutoTokenizer
    return loader.from_pretrained(str(path), local_files_only=True)


def stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a generation, sorted, maybe none.

    A directory: `eos_token_id` of generation_config.json, else of config.json. A .gguf file: its end-of-sequence,
    end-of-turn and end-of-message tokens.
    """
    path = Path(path).expanduser()
    if path.is_file():
        from kitty_jax.models.gguf_format import GgufContainer

        metadata = GgufContainer(path).metadata
        ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return tuple(sorted({i for i in ids if isinstance(i, int)}))
    for name in (_GENERATION_CONFIG, _CONFIG):
        if (path / name).is_file() and (ids := read_json(path / name).get("eos_token_id")) is not None:
            return tuple(sorted(set(ids if isinstance(ids, list) else [ids])))
    return ()
