"""The parts of the inference system together: pieces, pools, forks and meshes at once; no pool copied, no workspace
that grows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.chunk_attention import PAGES_AT_A_TIME, chunk_attention
from kitty_jax.cache.pool import release
from kitty_jax.cache.state import KVShape, init_state
from kitty_jax.cache.steps import decode_step, functional, prefill
from kitty_jax.inference.engine import Engine, Request
from kitty_jax.inference.generate import PoolExhaustedError, generate
from kitty_jax.inference.sampling import Sampling
from kitty_jax.models.registry import random_model
from tests.cache.test_donation import MODEL, _copies, _pools, _shapes
from tests.inference.generate_cases import VOCAB, small_cache, tiny_model

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((150, 3, 70, 33))]


def test_programs_of_the_engine_copy_no_pool():
    """Decode loop, prompt step of some rows, and a later piece of a long prompt."""
    some = Engine(tiny_model(), cache=small_cache("kitty_pro"), slots=3, capacity=200, pool_pages=13, prefill_tokens=64)
    run = some._programs.state_shape
    shapes = _shapes(_pools(run.cache))
    calls = {"loop": some._programs.advance(run, np.zeros(3, np.int32))}
    for step in some._programs.prompt_steps([np.array(PROMPTS[0], np.int32)], [1])[:2]:
        calls["prompt" if step.fresh else "later part"] = some._programs.start(run, step)
    assert len(calls) == 3
    for name, call in calls.items():
        text = call.func.lower(*call.args, **call.keywords).compile().as_text()
        assert all(shape in text for shape in shapes), name
        assert _copies(text, shapes) == [], name


def test_the_workspace_of_a_piece_does_not_grow_with_its_history():
    def workspace(pages: int) -> int:
        config = small_cache("kitty_pro")

        def piece(q, k, v, state):
            facts = (state.layers[0].kv, state.page_table, state.lengths, jnp.full(1, 64, jnp.int32))
            return chunk_attention(q, k, v, *facts)

        make = lambda: init_state(config, KVShape(1, 2, 16, jnp.float32), batch=1, capacity=4 + 16 * pages)  # noqa: E731
        arrays = [jax.ShapeDtypeStruct((1, 64, heads, 16), jnp.float32) for heads in (4, 2, 2)]
        return jax.jit(piece).lower(*arrays, jax.eval_shape(make)).compile().memory_analysis().temp_size_in_bytes

    short, long = workspace(PAGES_AT_A_TIME), workspace(32 * PAGES_AT_A_TIME)
    assert long < 1.1 * short + 16 * 32 * PAGES_AT_A_TIME  # the page table itself
    assert long < 32 * PAGES_AT_A_TIME * 16 * 2 * 16 * 4  # all keys in float32


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_workspace_of_prompts_does_not_grow_with_the_layers(some):
    """XLA would read all layers' buffers at first, and write them at last. A layer's new keys or values may stay."""
    rows = 12 if some else 24

    def workspace(layers: int) -> int:
        model = functional(random_model(dataclasses.replace(MODEL, num_layers=layers)))
        make = lambda: init_state("kitty_pro", model.config, batch=24, capacity=512)  # noqa: E731
        of = jax.ShapeDtypeStruct((rows,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((*of.shape, 64), jnp.int32)
        run = jax.jit(functools.partial(prefill, fresh=True), donate_argnums=1)
        lowered = run.lower(model, jax.eval_shape(make), tokens, of, rows=of if some else None)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    tail = rows * 128 * 16 * 4  # bytes of the smallest buffer but the sink's
    assert workspace(5) - workspace(2) < 3 * tail


def test_a_sequence_that_found_no_page_goes_on_when_there_is_one():
    """Out of the state that the error carries, to the very tokens that a larger pool gives."""
    prompts = [PROMPTS[0][:20], PROMPTS[2][:20]]
    options = {"cache": small_cache("kitty_pro"), "capacity": 96, "max_new_tokens": 40}
    wanted = generate(tiny_model(), prompts, **options).sequences()
    with pytest.raises(PoolExhaustedError) as caught:
        generate(tiny_model(), prompts, pool_pages=3, **options)  # the third page goes to sequence 0 at 36 tokens
    result = caught.value.result
    assert result.sequences() == [wanted[0][:32], wanted[1][:16]]
    step, state = jax.jit(decode_step, donate_argnums=1), release(result.state, np.array([True, False]))
    tokens = wanted[1][:16]
    while len(tokens) < 40:
        logits, state = step(functional(tiny_model()), state, np.array([0, tokens[-1]]), np.array([False, True]))
        tokens.append(int(logits[1].argmax()))
    assert tokens == wanted[1]


def test_pieces_after_one_that_found_no_page_are_left_out():
    """The third piece, shorter than the second, would find room, and stand in the second's place."""
    prompts, options = [PROMPTS[0], PROMPTS[1]], {"capacity": 192, "max_new_tokens": 4, "prefill_tokens": 64}
    with pytest.raises(PoolExhaustedError) as caught:
        generate(tiny_model(), prompts, cache=small_cache("kitty_pro"), pool_pages=6, **options)
    assert caught.value.result.state.lengths.tolist()[0] == 64


@pytest.mark.parametrize("name", ["full", "kitty_pro"])
def test_what_is_not_finite_does_not_pass_to_the_next_request_of_a_slot(name):
    model = functional(tiny_model())
    broken = jax.tree.map(lambda x: x.at[VOCAB - 1].set(jnp.nan) if x.shape == (VOCAB, 32) else x, model.params)
    some = Engine(
        dataclasses.replace(model, params=broken),
        cache=small_cache(name),
        slots=1,
        capacity=64,
        sampler=_never_the_last,
    )
    good = Request(PROMPTS[3][:9], 12)
    (alone,) = some.run([good])
    _, after = some.run([Request([*range(11), VOCAB - 1], 3), good])
    assert len(set(alone.tokens)) > 1
    assert after.tokens == alone.tokens


def _never_the_last(logits, keys):
    """The best token whose embedding is finite; that row makes its own logit NaN as well, the head being tied."""
    return jnp.argmax(jnp.where(jnp.isfinite(logits), logits, -1e30).at[:, -1].set(-jnp.inf), axis=-1).astype(jnp.int32)


@pytest.mark.slow
def test_samples_with_a_query_statistic_are_what_each_would_be_alone():
    """A fork copies the statistic that chooses the channels of the page that is being filled."""
    options = {"cache": small_cache("kitty_plus"), "max_new_tokens": 40, "capacity": 128, "prefill_tokens": 64}
    options |= {"sampler": Sampling(temperature=1.2)}
    prompt = PROMPTS[0][:80]  # twelve tokens of a page that is not full
    rows = generate(tiny_model(), [prompt], seed=5, samples=3, **options).sequences()
    assert len(set(map(tuple, rows))) == 3
    assert rows == generate(tiny_model(), [prompt] * 3, seed=5, **options).sequences()
