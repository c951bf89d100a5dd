"""Configurations named for their checkpoints, and models of random weights.

Sizes are those of the checkpoints' published config.json. Qwen3 norms every query and key head before RoPE; Qwen2 has
biases on the query, key and value projections instead; LLaMA has neither.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kitty_jax.models.decoder import Decoder, DecoderConfig
from kitty_jax.models.hf_config import FAMILIES
from kitty_jax.models.params import abstract_params, model_from_params
from kitty_jax.models.rope import RopeConfig
from kitty_jax.models.sharding import param_shardings, partition_spec

BLOCK_ELEMENTS = 2**24  # random numbers drawn at a time


def _config(
    embed: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, family: str, **others: Any
) -> DecoderConfig:
    return DecoderConfig(
        family=family,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=FAMILIES[family].qk_norm,
        qkv_bias=FAMILIES[family].qkv_bias,
        **others,
    )


_qwen = functools.partial(_config, vocab_size=151_936, rope=RopeConfig(theta=1e6), rms_eps=1e-6)
_qwen3 = functools.partial(_qwen, family="qwen3", max_position=40_960)
_qwen2 = functools.partial(_qwen, family="qwen2", max_position=32_768)
_llama3 = functools.partial(
    _config, family="llama", vocab_size=128_256, max_position=8192, rope=RopeConfig(theta=5e5), rms_eps=1e-5
)


def _llama3_long(*sizes: int, factor: float, tied_head: bool = False) -> DecoderConfig:
    """LLaMA 3.1 and later: positions stretched by `factor` to reach 131,072."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
    rope = RopeConfig(theta=5e5, type="llama3", factor=factor, **scaling)
    return _llama3(*sizes, max_position=131_072, rope=rope, tied_head=tied_head)


# Name -> configuration in bfloat16. Sizes: E, F, L, N, K, D.
CONFIGS: dict[str, DecoderConfig] = {
    # Qwen/Qwen3-0.6B and so on
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 128, tied_head=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, 128, tied_head=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 128, tied_head=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8, 128, tied_head=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8, 128, tied_head=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, 8, 128, tied_head=False),
    # Qwen/Qwen2.5-0.5B-Instruct and so on, and Qwen/Qwen2 of the same sizes
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, tied_head=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 128, tied_head=True),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4, 128, vocab_size=152_064, tied_head=False),
    # meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.1-8B and so on, and their Instruct versions
    "llama3-8b": _llama3(4096, 14_336, 32, 32, 8, 128, tied_head=False),
    "llama3-70b": _llama3(8192, 28_672, 80, 64, 8, 128, tied_head=False),
    "llama3.1-8b": _llama3_long(4096, 14_336, 32, 32, 8, 128, factor=8.0),
    "llama3.2-1b": _llama3_long(2048, 8192, 16, 32, 8, 64, factor=32.0, tied_head=True),
    "llama3.2-3b": _llama3_long(3072, 8192, 28, 24, 8, 128, factor=32.0, tied_head=True),
    "llama3.3-70b": _llama3_long(8192, 28_672, 80, 64, 8, 128, factor=8.0),
    # HuggingFaceTB/SmolLM2-135M and its Instruct version
    "smollm2-135m": _llama3(576, 1536, 30, 9, 3, 64, vocab_size=49_152, rope=RopeConfig(theta=1e5), tied_head=True),
}
CONFIG_NAMES = tuple(CONFIGS)


def config_from_name(name: str) -> DecoderConfig:
    """One of CONFIG_NAMES -> its configuration, in bfloat16."""
    if name not in CONFIGS:
        raise ValueError(f"no configuration is named {name!r}; known names: {', '.join(CONFIG_NAMES)}")
    return CONFIGS[name]


def random_model(config: DecoderConfig, seed: int = 0, mesh: Mesh | None = None) -> Decoder:
    """A decoder with random weights, made leaf by leaf on the devices (sharded over the mesh, if given).

    Leaves of one shape share a compiled function, and a large one is made in blocks: drawing random numbers takes
    several times their float32 size, which for a whole embedding would be gigabytes.
    Matrices are normal with variance 1 / inputs, so activations keep their size; norms are near 1 and biases near 0,
    and neither exactly. The same seed gives the same weights on any mesh.
    """
    shardings = None if mesh is None else param_shardings(mesh, config)
    key = jax.random.key(seed)
    params = {}
    for index, (path, leaf) in enumerate(abstract_params(config).items()):
        sharding = None if shardings is None else shardings[path]
        kind = "matrix" if leaf.ndim > 1 and path[-1] == "weight" else path[-1]
        whole = [axis for axis, name in enumerate(partition_spec(path)) if name is None]
        make = _initializer(kind, leaf.shape, leaf.dtype, sharding, whole[-1] if whole else None)
        params[path] = make(jax.random.fold_in(key, index))
    return model_from_params(config, params)


@functools.cache  # one compilation for all leaves of one shape
def _initializer(
    kind: str, shape: tuple[int, ...], dtype, sharding, axis: int | None
) -> Callable[[jax.Array], jax.Array]:
    """axis: one along which a leaf may be made block by block; on a mesh it must be whole, or blocks would move."""
    center, spread = {"matrix": (0.0, shape[-1] ** -0.5), "weight": (1.0, 0.1), "bias": (0.0, 0.1)}[kind]

    def numbers(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (center + spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def make(key: jax.Array) -> jax.Array:
        blocks = 1 if axis is None else _blocks(math.prod(shape), shape[axis])
        if blocks == 1:
            return numbers(key, shape)
        width = shape[axis] // blocks
        block = (*shape[:axis], width, *shape[axis + 1 :])

        def fill(i: jax.Array, leaf: jax.Array) -> jax.Array:
            made = numbers(jax.random.fold_in(key, i), block)
            return jax.lax.dynamic_update_slice_in_dim(leaf, made, i * width, axis)

        return jax.lax.fori_loop(0, blocks, fill, jnp.zeros(shape, dtype))

    return jax.jit(make, out_shardings=sharding)


def _blocks(elements: int, length: int) -> int:
    """Fewest equal blocks along an axis of `length` that hold BLOCK_ELEMENTS at most, or `length`."""
    fits = (n for n in range(1, length) if length % n == 0 and elements // n <= BLOCK_ELEMENTS)
    return next(fits, length)
