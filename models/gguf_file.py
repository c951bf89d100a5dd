"""A GGUF file seen as a Hugging Face checkpoint: a config dict, and tensors under Hugging Face names and layouts.

Architectures `llama`, `qwen2` and `qwen3`. Three things differ from a Hugging Face directory:
- names (`blk.0.attn_q.weight` for `model.layers.0.self_attn.q_proj.weight`);
- files of the `llama` architecture store the rows of the q and k projections in the order that interleaved rotary
  embedding wants (channel pairs 2i, 2i+1), where Hugging Face rotates i with i + D/2; `qwen2` and `qwen3` files keep
  the rows as they were;
- the rotary scaling of LLaMA 3.1 and later is stored as D/2 divisors, `rope_freqs.weight`, not as the parameters they
  came from.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kitty_jax.models.gguf_format import GgufError, open_gguf
from kitty_jax.models.gguf_rope import ROPE_FACTORS, rope_scaling_of

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
# Metadata that changes what the model computes and that no model here implements: refused unless absent or zero.
_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)


class GgufCheckpoint:
    """A checkpoint source over one .gguf file (see `kitty_jax.models.checkpoint`).

    `config`: Hugging Face style config dict. `shapes`: tensor name -> shape, Hugging Face names; a tensor that has no
    such name keeps its own, so that it is reported as surplus. `nbytes`: tensor name -> stored bytes. `read(name,
    dtype)`: the values.
    """

    # Block formats have no dtype of their own to keep, and float32 loses nothing of what dequantizing gives.
    stored_dtype = np.dtype(np.float32)

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._container = open_gguf(path)
        self.metadata: Mapping[str, Any] = self._container.metadata
        self.architecture = _architecture(self.path, self.metadata)
        if int(self.metadata.get("split.count", 1)) > 1:
            raise GgufError(
                f"{path}: one part of a model split over {self.metadata['split.count']} files; merge the parts first "
                "(llama-gguf-split --merge)."
            )
        self._own_names = {_hf_name(name): name for name in self._container.shapes if name != ROPE_FACTORS}
        self.shapes = {hf: self._container.shapes[own] for hf, own in self._own_names.items()}
        self.nbytes = {hf: self._container.nbytes[own] for hf, own in self._own_names.items()}
        self.config = self._config()

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor in Hugging Face layout, in a new array of `dtype` (default float32)."""
        values = self._container.read(self._own_names[name], dtype)
        if self.architecture == "llama" and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            values = interleaved_to_halves(values, heads)
        return values

    def _get(self, key: str, default: Any = None) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise GgufError(f"{self.path}: metadata key {full!r} is missing.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise GgufError(
                    f"{self.path}: {full} differs between layers ({value}); every layer must have the same."
                )
            value = value[0]
        return value

    def _config(self) -> dict[str, Any]:
        for key in _REFUSED:
            if self.metadata.get(f"{self.architecture}.{key}"):
                raise GgufError(f"{self.path}: {self.architecture}.{key} = {self._get(key)} is not supported.")
        if "model.embed_tokens.weight" not in self.shapes:
            raise GgufError(f"{self.path}: tensor 'token_embd.weight' is missing (a file of the vocabulary alone?).")
        heads = int(self._get("attention.head_count"))
        width = int(self._get("embedding_length"))
        head_dim = int(self._get("attention.key_length", width // heads))
        self._check_head_dim(head_dim)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            # With padding rows, which the token list may lack.
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": width,
            "intermediate_size": int(self._get("feed_forward_length")),
            "num_hidden_layers": int(self._get("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._get("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": int(self._get("context_length")),
            "rms_norm_eps": _decimal(self._get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(self._get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "dtype": "float32",
        }
        config["rope_scaling"] = rope_scaling_of(self._container, self.architecture, head_dim, config["rope_theta"])
        if self.architecture != "qwen2":  # qwen2 always has biases on q, k and v, and no key to say so
            config["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in self.shapes)
        if self.architecture == "llama":
            config["mlp_bias"] = any(name.endswith("mlp.up_proj.bias") for name in self.shapes)
        for key in ("bos", "eos"):
            if (token := self.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[f"{key}_token_id"] = int(token)
        return config

    def _check_head_dim(self, head_dim: int) -> None:
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := int(self._get(key, head_dim))) != head_dim:
                raise GgufError(
                    f"{self.path}: {self.architecture}.{key} = {other} but the head size is {head_dim}; they must be "
                    "equal."
                )


def interleaved_to_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (or a bias) [heads * D, ...] from interleaved rotary order (2i, 2i+1) to halves (i, i + D/2), per head."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _architecture(path: Path, metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise GgufError(f"{path}: GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}.")
    return name


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor, or its own name if it has none."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return name
    if match["layer"] is None:
        part = _GLOBAL_NAMES.get(match["part"])
        return f"{part}.{match['kind']}" if part else name
    part = _LAYER_NAMES.get(match["part"])
    return f"model.layers.{match['layer']}.{part}.{match['kind']}" if part else name


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-06, as once written, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
