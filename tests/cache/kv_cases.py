"""What the tests of the cache share: random keys and values, the two ways to insert them, and reading a state back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kitty_jax.cache.flush import flush
from kitty_jax.cache.full_cache import FullCache
from kitty_jax.cache.layer_cache import LayerCache, Step
from kitty_jax.cache.pool import reserve
from kitty_jax.cache.rotation import rotate
from kitty_jax.cache.state import KVState
from kitty_jax.pallas_kernels.decode_attention.insert_token import insert_token
from kitty_jax.pallas_kernels.page_format import split_record
from kitty_jax.pallas_kernels.quantize import dequantize_keys, dequantize_values, key_codes
from kitty_jax.research.oracle import Oracle

# Tolerance of attention outputs (weights sum to 1, values are about 1) against float64, by dtype of q.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

# Compiling is most of these tests' time and LLVM's optimizer half of that: programs that run once or twice do without,
# whatever the other programs do.
QUICK = {"xla_backend_optimization_level": 0}
# As a user's program is compiled, whatever the other tests' are (see conftest.py).
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def random_kv(seed: int, *shape: int, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., K, D]. Channels differ in scale and offset, as real keys do; one is six times the rest."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=shape[-2:]) * 0.3)
    spread[:, shape[-1] // 3] *= 6
    keys = (rng.normal(size=shape) + rng.normal(size=shape[-2:]) / 2) * spread
    values = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)) * 0.3)
    return tuple(jnp.asarray(x, jnp.float32).astype(dtype) for x in (keys, values))


def random_q(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Queries [..., N, D], small enough that no single key takes all the weight."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32).astype(dtype)


def append(state: KVState, keys: jax.Array, values: jax.Array, num_new: jax.Array, queries=None) -> KVState:
    """The same chunk, [B, T, K, D], into every layer."""
    before = state.lengths
    state, num_new = reserve(state, num_new)
    step = Step(before, num_new, state.page_table)
    layers = tuple(x.append(step, queries, keys, values) for x in state.layers)
    return dataclasses.replace(state, layers=layers, lengths=before + num_new)


def insert_into(layer: LayerCache, step: Step, q, k: jax.Array, v: jax.Array) -> LayerCache:
    """What ``decode`` writes, without the attention: one token, [B, 1, K, D]."""
    if isinstance(layer, FullCache):
        return layer.append(step, q, k, v)
    v = rotate(v) if layer.config.rotate_values else v
    kv = insert_token(layer.kv, k[:, 0], v[:, 0], step.lengths, step.num_new > 0)
    return dataclasses.replace(layer, kv=kv).count_queries(step, q)


def insert(state: KVState, keys: jax.Array, values: jax.Array, active: jax.Array, queries=None) -> KVState:
    """One token, [B, K, D], into every layer."""
    before = state.lengths
    state, num_new = reserve(state, active.astype(jnp.int32))
    step, queries = Step(before, num_new, state.page_table), None if queries is None else queries[:, None]
    layers = tuple(insert_into(x, step, queries, keys[:, None], values[:, None]) for x in state.layers)
    return flush(dataclasses.replace(state, layers=layers, lengths=before + num_new), before)


def insert_all(state: KVState, keys: jax.Array, values: jax.Array, num_new: jax.Array, queries=None) -> KVState:
    """What :func:`append` does, token by token."""

    def body(t, state):
        return insert(state, keys[:, t], values[:, t], t < num_new, None if queries is None else queries[:, t])

    return jax.lax.fori_loop(0, jnp.max(num_new), body, state)


append_jit = jax.jit(append, compiler_options=QUICK)
insert_all_jit = jax.jit(insert_all, compiler_options=QUICK)


def differences(a, b) -> list[str]:
    """Names of the leaves in which two pytrees differ by as much as a bit."""
    one, two = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    assert [p for p, _ in one] == [p for p, _ in two]
    same = [
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for (_, x), (_, y) in zip(one, two, strict=True)
    ]
    return [jax.tree_util.keystr(path) for (path, _), equal in zip(one, same, strict=True) if not equal]


@functools.partial(jax.jit, static_argnames="fmt")
def _open_pools(key_pages, value_pages, fmt):
    keys, values = split_record(key_pages, fmt.key_parts), split_record(value_pages, fmt.value_parts)
    keys["codes"], keys["restored"] = key_codes(keys, fmt), dequantize_keys(key_pages, fmt)
    values["restored"] = dequantize_values(value_pages, fmt)
    return keys, values


def open_layer(state: KVState, layer: int = 0) -> "OpenLayer":
    """A layer's content on the host."""
    return OpenLayer(jax.device_get(state), layer)


class OpenLayer:
    """What a layer holds, read slot by slot as DESIGN section 2 says."""

    def __init__(self, state: KVState, layer: int):
        self.state, self.layer = state, state.layers[layer]
        if isinstance(self.layer, FullCache):
            return
        kv = self.layer.kv
        pools = _open_pools(kv.key_pages, kv.value_pages, kv.fmt)
        self.key_parts, self.value_parts = jax.device_get(pools)

    def read(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of sequence b as attention sees them, float32 [length, K, D] each."""
        length = int(self.state.lengths[b])
        if isinstance(self.layer, FullCache):
            return tuple(np.asarray(x[b, :length], np.float32) for x in (self.layer.keys, self.layer.values))
        kv, table = self.layer.kv, self.state.page_table[b]
        g, ring = kv.fmt.page, kv.ring_values.shape[2]
        n = max(length - kv.sink, 0)
        key_pages, value_pages = n // g, max(n - kv.window, 0) // g
        keys, values = [], []
        for token in range(length):
            i = token - kv.sink
            if i < 0:
                keys.append(kv.sink_keys[b, :, token])
                values.append(kv.sink_values[b, :, token])
                continue
            page = table[i // g] if i // g < key_pages else None
            keys.append(kv.tail_keys[b, :, i % g] if page is None else self.key_parts["restored"][page, :, i % g])
            old = i // g < value_pages
            values.append(self.value_parts["restored"][page, :, i % g] if old else kv.ring_values[b, :, i % ring])
        shape = (length, kv.key_pages.shape[1], kv.fmt.head_dim)
        return tuple(np.asarray(x, np.float32).reshape(shape) for x in (keys, values))


def assert_equals_oracle(layer: OpenLayer, b: int, oracle: Oracle) -> None:
    """Everything sequence b holds, pages down to their codes and metadata, equals the oracle's exactly."""
    keys, values = layer.read(b)
    assert int(layer.state.lengths[b]) == oracle.length
    np.testing.assert_array_equal(keys, np.array(oracle.keys, np.float32).reshape(keys.shape))
    np.testing.assert_array_equal(values, np.array(oracle.values, np.float32).reshape(values.shape))
    for p, heads in enumerate(oracle.key_pages):
        record = int(layer.state.page_table[b, p])
        for h, page in enumerate(heads):
            parts = {name: x[record, h] for name, x in layer.key_parts.items()}
            assert tuple(parts["channels"]) == page.channels
            assert int(parts["exponent"][0]) == page.exponent
            np.testing.assert_array_equal(parts["codes"], page.codes)
            np.testing.assert_array_equal(parts["scale"], page.scale)
            np.testing.assert_array_equal(parts["min"], page.min)
    for p, heads in enumerate(oracle.value_pages):
        record = int(layer.state.page_table[b, p])
        for h, page in enumerate(heads):
            parts = {name: x[record, h] for name, x in layer.value_parts.items()}
            assert int(parts["exponent"][0]) == page.exponent
            np.testing.assert_array_equal(parts["scale"], page.scale)
            np.testing.assert_array_equal(parts["min"], page.min)


def fill_oracle(oracle: Oracle, keys, values, length: int) -> Oracle:
    """Inserts the first ``length`` tokens of keys and values [T, K, D] without attending."""
    for t in range(length):
        oracle.insert(np.asarray(keys[t], np.float32), np.asarray(values[t], np.float32))
        oracle.age()
    return oracle
