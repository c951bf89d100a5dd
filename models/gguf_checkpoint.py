"""A GGUF file seen as a Hugging Face checkpoint: a config dict, and tensors under Hugging Face names and layouts.

Architectures `llama`, `qwen2` and `qwen3`. Three things differ from a Hugging Face directory:
- names (`blk.0.attn_q.weight` for `model.layers.0.self_attn.q_proj.weight`);
- files of the `llama` architecture store the rows of the q and k projections in the order that interleaved rotary
  embedding wants (channel pairs 2i, 2i+1), where Hugging Face rotates i with i + D/2; `qwen2` and `qwen3` files keep
  the rows as they were;
- the rotary scaling of LLaMA 3.1 and later is stored as D/2 divisors, `rope_freqs.weight`, not as the parameters they
  came from.
"""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kitty_jax.models.gguf_format import GgufContainer, GgufError
from kitty_jax.models.hf_config import FAMILIES, rope_from_hf
from kitty_jax.models.params import TENSORS
from kitty_jax.models.rope import RopeConfig, inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
# The one set of parameters, apart from `factor`, that published LLaMA 3.1, 3.2 and 3.3 checkpoints use.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# GGUF module of layer 0, or of the whole model -> its Hugging Face name. {i} is the layer.
_NAME_MAP = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
_HF_NAMES = {_NAME_MAP.get_name(name.format(i=0)): name for names in TENSORS.values() for name in names}
# Metadata that changes what the model computes and that no model here implements: refused unless absent or zero.
_REFUSED = tuple(
    "expert_count attention.sliding_window attention.clamp_kqv logit_scale embedding_scale residual_scale"
    " rope.scaling.yarn_log_multiplier".split()
)


class GgufCheckpoint:
    """A checkpoint source over one .gguf file (see `kitty_jax.models.checkpoint_source`).

    A tensor without a Hugging Face name keeps its own in `shapes`, so that it is reported as surplus.
    """

    # Block formats have no dtype of their own to keep, and float32 loses nothing of what dequantizing gives.
    stored_dtype = np.dtype(np.float32)

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._container = GgufContainer(path)
        self._metadata = self._container.metadata
        self.architecture = self._metadata.get("general.architecture")
        if self.architecture not in list(FAMILIES):
            raise GgufError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: {', '.join(FAMILIES)}."
            )
        if (parts := self._metadata.get("split.count", 1)) != 1:
            raise GgufError(
                f"{path}: one part of a model split over {parts} files; merge the parts first "
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

    def _get(self, key: str, kind: type = int, default: Any = None) -> Any:
        """The value of a key of the architecture, one for all layers; an error if it is absent and has no default."""
        full = f"{self.architecture}.{key}"
        value = self._metadata.get(full, default)
        if value is None:
            raise GgufError(f"{self.path}: metadata key {full!r} is missing.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise GgufError(
                    f"{self.path}: {full} differs between layers ({value}); every layer must have the same."
                )
            value = value[0]
        # A float32 as the shortest decimal that rounds to it: 1e-06, as once written, not 9.999999974752427e-07.
        value = float(str(np.float32(value))) if kind is float and isinstance(value, float | int) else value
        if not isinstance(value, kind) or (kind is int and value < 1):
            raise GgufError(f"{self.path}: {full} = {value!r} is no {kind.__name__} that makes sense there.")
        return value

    def _config(self) -> dict[str, Any]:
        for key in _REFUSED:
            if value := self._metadata.get(f"{self.architecture}.{key}"):
                raise GgufError(f"{self.path}: {self.architecture}.{key} = {value} is not supported.")
        if "model.embed_tokens.weight" not in self.shapes:
            raise GgufError(f"{self.path}: tensor 'token_embd.weight' is missing (a file of the vocabulary alone?).")
        heads, width = self._get("attention.head_count"), self._get("embedding_length")
        head_dim = self._get("attention.key_length", default=width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self._get(key, default=head_dim)) != head_dim:
                raise GgufError(
                    f"{self.path}: {self.architecture}.{key} = {other} but the head size is {head_dim}; they must be "
                    "equal."
                )
        config: dict[str, Any] = {
            "architectures": [FAMILIES[self.architecture].architecture],
            "model_type": self.architecture,
            # With padding rows, which the token list may lack.
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": width,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self._get("rope.freq_base", float, 10_000.0),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "dtype": "float32",
        }
        config["rope_scaling"] = self._rope_scaling(head_dim, config["rope_theta"])
        for key in ("bos_token_id", "eos_token_id"):
            if (token := self._metadata.get(f"tokenizer.ggml.{key}")) is not None:
                config[key] = token
        return config

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        """None for plain rotary embedding, else the dict for `rope_scaling`: types "linear", "yarn" and "llama3"."""
        factor = self._get("rope.scaling.factor", float, self._get("rope.scale_linear", float, 1.0))
        kind = self._get("rope.scaling.type", str, "none" if factor == 1.0 else "linear")
        if ROPE_FACTORS in self._container.shapes:
            if kind != "none":
                raise GgufError(
                    f"{self.path}: both {ROPE_FACTORS} and rotary scaling of type {kind!r} are given; only one is "
                    "supported."
                )
            return self._llama3_scaling(head_dim, theta)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return self._yarn_scaling(factor)
        raise GgufError(
            f"{self.path}: rotary scaling of type {kind!r} is not supported; supported: none, linear, yarn."
        )

    def _yarn_scaling(self, factor: float) -> dict[str, Any]:
        if self._get("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):
            raise GgufError(f"{self.path}: yarn with an extrapolation factor other than 1 is not supported.")
        original = self._get("rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if f"{self.architecture}.rope.scaling.yarn_{name}" in self._metadata:
                scaling[name] = self._get(f"rope.scaling.yarn_{name}", float)
        attention = self._get("rope.scaling.yarn_attn_factor", float, self._get("rope.scaling.attn_factor", float, 1.0))
        if attention != 1.0:
            # GGUF's number multiplies the usual 0.1 ln(factor) + 1; Hugging Face's replaces it.
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        return scaling

    def _llama3_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        """LLaMA 3's parameters, recovered from the frequency divisors that they give; other divisors are refused."""
        stored = self._container.read(ROPE_FACTORS).reshape(-1)
        if stored.shape != (head_dim // 2,):
            raise GgufError(
                f"{self.path}: {ROPE_FACTORS} has {stored.size} values; head size {head_dim} needs {head_dim // 2}."
            )
        if np.all(stored == 1.0):
            return None
        scaling = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3}
        try:
            expected = llama3_divisors(rope_from_hf({"rope_theta": theta, **scaling}), head_dim)
        except ValueError as error:
            raise GgufError(f"{self.path}: {ROPE_FACTORS}: {error}") from error
        if not np.allclose(stored, expected, rtol=1e-4):
            worst = int(np.argmax(np.abs(stored / expected - 1.0)))
            raise GgufError(
                f"{self.path}: {ROPE_FACTORS} does not follow LLaMA 3's rule with {scaling}: divisor {worst} is "
                f"{stored[worst]:.6g}, the rule gives {expected[worst]:.6g}. Other divisors are not supported; "
                "convert from the original checkpoint."
            )
        return scaling


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """What plain frequencies are divided by: 1 for short waves, `factor` for long ones, a ramp between; [D/2]."""
    return inverse_frequencies(RopeConfig(rope.theta), head_dim) / inverse_frequencies(rope, head_dim)


def interleaved_to_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (or a bias) [heads * D, ...] from interleaved rotary order (2i, 2i+1) to halves (i, i + D/2), per head."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor, or its own name if it has none."""
    block, layer, part, leaf = re.fullmatch(r"(blk\.(\d+)\.)?(.*?)\.?(weight|bias|)", name, re.DOTALL).groups()
    module = _HF_NAMES.get(f"blk.0.{part}" if block else part)
    return f"{module.format(i=layer)}.{leaf}" if module and leaf else name
