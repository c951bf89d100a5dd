"""The state is updated in place: compiled programs copy no page pool, and one program serves all lengths."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.flush import flush
from kitty_jax.cache.state import init_state
from kitty_jax.cache.steps import decode_step, functional, prefill
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.registry import random_model
from kitty_jax.models.rope import RopeConfig

MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=48,
    embed_dim=16,
    mlp_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position=4096,
    rope=RopeConfig(),
    rms_eps=1e-6,
    qk_norm=True,
    qkv_bias=False,
    tied_head=True,
    dtype=jnp.float32,
)
CACHE = CacheConfig.kitty(sink=4, page=16, window=16)
BATCH, POOL = 3, 61  # a prime: no other array has its shape
TRACES = collections.Counter()


def _decode_loop(model, state, tokens, steps):
    TRACES["loop"] += 1

    def body(carry):
        step, tokens, state = carry
        logits, state = decode_step(model, state, tokens)
        return step + 1, jnp.argmax(logits, -1).astype(jnp.int32), state

    return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (0, tokens, state))[1:]


def _prefill(model, state, tokens, lengths):
    TRACES["prefill"] += 1
    return prefill(model, state, tokens, lengths)


PROGRAMS = {"loop": (_decode_loop, ((BATCH,), ())), "prefill": (_prefill, ((BATCH, 40), (BATCH,)))}


def _state():
    return init_state(CACHE, MODEL, batch=BATCH, capacity=800, pool_pages=POOL)


JITTED = {name: jax.jit(function, donate_argnums=1) for name, (function, _) in PROGRAMS.items()}


@functools.cache
def _compiled(name):
    args = [jnp.zeros(shape, jnp.int32) for shape in PROGRAMS[name][1]]
    return JITTED[name].lower(functional(random_model(MODEL)), _state(), *args).compile()


def _copies(text: str, shapes: set[str]) -> list[str]:
    """Lines of compiled HLO that copy an array of one of the shapes, alone or within a tuple."""
    found = []
    for line in text.splitlines():
        made = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) (copy|copy-start|async-start)\(", line)
        if made and any(shape in made.group(1) for shape in shapes):
            found.append(line.strip()[:150])
    return found


def _shapes(arrays) -> set[str]:
    names = {"uint32": "u32", "float32": "f32"}
    return {f"{names[x.dtype.name]}[{','.join(map(str, x.shape))}]" for x in arrays}


def _pools(state):
    return [pool for layer in state.layers for pool in (layer.kv.key_pages, layer.kv.value_pages)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_copy_of_a_pool(name):
    text = _compiled(name).as_text()
    shapes = _shapes(_pools(_state()))
    assert all(shape in text for shape in shapes)
    assert _copies(text, shapes) == []


def test_the_decode_loop_copies_no_buffer_either():
    """Ring and sink; the key tail may be transposed into the order of a product, a copy by name."""
    kvs = [layer.kv for layer in _state().layers]
    shapes = _shapes(x for kv in kvs for x in (kv.ring_values, kv.sink_keys, kv.sink_values))
    assert _copies(_compiled("loop").as_text(), shapes) == []


def test_a_copy_would_be_found():
    """The search finds the copy of a pool that is read and written with nothing to say which comes first."""

    def careless(pool, x):
        total = jax.lax.fori_loop(0, x, lambda i, t: t + pool[i % 5], jnp.zeros(pool.shape[1:], pool.dtype))
        return total, pool.at[x].set(1)

    pool = jnp.zeros((POOL, 1, 148), jnp.uint32)
    text = jax.jit(careless, donate_argnums=0).lower(pool, jnp.int32(3)).compile().as_text()
    assert _copies(text, _shapes([pool]))


def test_a_step_that_fills_no_page_quantizes_none():
    """Only the loop over due pages reads the buffers: XLA moves what such a loop could do once in front of it, where
    every step would do it."""
    text = jax.jit(flush).lower(_state(), jnp.zeros(BATCH, jnp.int32)).compile().as_text()
    entry = [x for x in text[text.index("\nENTRY") :].splitlines() if re.search("%[^ ]*(tail_keys|ring_values)", x)]
    assert sum(" parameter(" in x for x in entry) == 2 * MODEL.num_layers
    assert [x[:150] for x in entry if not re.search(r" (?:parameter|tuple|copy)\(", x)] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_array_of_the_state_is_aliased(name):
    """Each output of the state takes the memory of its donated input."""
    compiled = _compiled(name)
    header = compiled.as_text().splitlines()[0]
    state = _state()
    # `free` of the page pool passes through unchanged; everything else has to be aliased too.
    assert len(re.findall(r"(?:may|must)-alias", header)) == len(jax.tree.leaves(state))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
    if name == "loop":
        assert memory.temp_size_in_bytes < min(pool.nbytes for pool in _pools(_state())) * 2


def test_one_program_for_all_lengths_and_steps():
    """Other lengths, tokens and numbers of steps, and a state that is no longer empty: nothing is traced again."""
    model = functional(random_model(MODEL))
    state = _state()
    for lengths, steps in (((1, 17, 40), 3), ((40, 0, 5), 19), ((2, 2, 2), 1)):
        tokens = jnp.asarray(np.random.default_rng(steps).integers(0, 48, (BATCH, 40)), jnp.int32)
        before = np.asarray(state.lengths)
        logits, state = JITTED["prefill"](model, state, tokens, jnp.array(lengths, jnp.int32))
        first = jnp.argmax(logits, -1).astype(jnp.int32)
        _, state = JITTED["loop"](model, state, first, jnp.int32(steps))
        assert state.lengths.tolist() == (before + lengths + steps).tolist()
    assert TRACES == {"prefill": 1, "loop": 1}
    assert [f._cache_size() for f in JITTED.values()] == [1, 1]


def test_the_donated_state_is_gone():
    state = _state()
    pools = _pools(state)
    model = functional(random_model(MODEL))
    compiled = _compiled("loop")
    _, state = compiled(model, state, jnp.zeros(BATCH, jnp.int32), jnp.int32(2))
    assert all(pool.is_deleted() for pool in pools)
    assert state.lengths.tolist() == [2] * BATCH
