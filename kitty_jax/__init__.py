"""kitty-jax: a 2-bit KV cache for JAX (Kitty, arXiv 2511.18643)."""

from kitty_jax.cache.config import CACHE_NAMES, CacheConfig, cache_from_name
from kitty_jax.cache.pool import fork, release
from kitty_jax.cache.state import KVShape, KVState, init_state, nbytes
from kitty_jax.cache.steps import FunctionalModel, decode_step, functional, prefill
from kitty_jax.inference.engine import Engine, EngineResult, Piece, Request
from kitty_jax.inference.generate import GenerateResult, Generation, PoolExhaustedError, generate, prepare, stream
from kitty_jax.inference.memory_plan import KVPlan, cache_bytes
from kitty_jax.inference.sampling import Greedy, Sampler, Sampling
from kitty_jax.research.fake_quantize import fake_quantize

__all__ = [
    "CACHE_NAMES",
    "CacheConfig",
    "Engine",
    "EngineResult",
    "FunctionalModel",
    "GenerateResult",
    "Generation",
    "Greedy",
    "KVPlan",
    "KVShape",
    "KVState",
    "Piece",
    "PoolExhaustedError",
    "Request",
    "Sampler",
    "Sampling",
    "cache_bytes",
    "cache_from_name",
    "decode_step",
    "fake_quantize",
    "fork",
    "functional",
    "generate",
    "init_state",
    "nbytes",
    "prefill",
    "prepare",
    "release",
    "stream",
]

__version__ = "0.1.0.dev0"
