"""Small checkpoints for the tests of loading: the golden models as .gguf files and as directories."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from kitty_jax.models.decoder import causal_attend

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("llama", "llama3", "qwen2", "qwen3", "qwen3_yarn")
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def golden_tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / name / "model.safetensors")


def golden_config(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def copy_golden(name: str, directory: Path) -> Path:
    """A directory with the golden model's config and weights."""
    directory.mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name / file, directory / file)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def gguf_name(name: str) -> str:
    """Hugging Face name -> the name that llama.cpp's converter gives."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + "." + kind


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama models: row i of a head's halves become rows 2i and 2i+1."""
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + size // 2 + i]
    return out


def write_gguf(
    path: Path,
    golden: str,
    kind: Kind = Kind.F32,
    *,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a golden model as llama.cpp's converter would, its matrices stored as `kind`.

    metadata: keys to set, or to leave out (None). drop: metadata and tensor names left out. extra: more float32
    tensors, under GGUF names. Returns what the file holds, by Hugging Face name: the golden tensors after a round trip
    through `kind`.
    """
    config, tensors = golden_config(golden), golden_tensors(golden)
    architecture = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        }
    pairs = {f"{architecture}.{key}": value for key, value in keys.items()} | (metadata or {})
    # The architecture goes into the constructor, which writes it.
    writer = gguf.GGUFWriter(path, pairs.pop("general.architecture", architecture))
    for key, value in pairs.items():
        if value is not None and key not in drop:
            _add(writer, key, value)
    held = {}
    for name, values in tensors.items():
        values = values.astype(np.float32)
        stored_kind = kind if values.ndim == 2 else Kind.F32
        held[name] = gguf.quants.dequantize(gguf.quants.quantize(values, stored_kind), stored_kind)
        if architecture == "llama" and ".q_proj." in name:
            values = interleave(values, heads)
        if architecture == "llama" and ".k_proj." in name:
            values = interleave(values, kv_heads)
        if gguf_name(name) not in drop:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored_kind), raw_dtype=stored_kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders[type(value)](key, value)


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of plain causal attention over tokens [B, T]."""
    return np.asarray(_logits(*nnx.split(model), jnp.asarray(tokens, jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, state: Any, tokens: Any) -> jax.Array:
    model = nnx.merge(graphdef, state)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * model.config.num_layers, causal_attend)
    return model.logits(hidden)


def byte_level_tokenizer() -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE tokenizer: 256 bytes, a few merges, and special tokens at the end."""
    alphabet = sorted(_byte_characters())
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "c a", "ca t", "Ġ cat"]
    tokens = [*alphabet, *[merge.replace(" ", "") for merge in merges], "<|bos|>", "<|eos|>", "<think>", "[PAD]"]
    types = [1] * (256 + len(merges)) + [3, 3, 4, 5]
    bos = 256 + len(merges)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": bos + 1,
        "tokenizer.ggml.padding_token_id": bos + 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|eos|>{% endfor %}",
    }


def _byte_characters() -> list[str]:
    """The 256 characters that stand for bytes: printable ones for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = range(256 - len(printable))
    return [chr(b) for b in printable] + [chr(256 + i) for i in others]
