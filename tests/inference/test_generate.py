"""generate and stream: against a run without a cache, rows against batches, ends, compilations, donation, pools."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.quantized_cache import QuantizedCache
from kitty_jax.cache.steps import functional
from kitty_jax.inference.decode_loop import jit_advance, jit_start
from kitty_jax.inference.generate import PoolExhaustedError, generate, prepare, stream
from kitty_jax.inference.prompts import bucket
from kitty_jax.inference.sampling import Sampling
from tests.inference.generate_cases import PROMPTS, VOCAB, greedy_by_recompute, small_cache, tiny_model

SAMPLER = Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.001)
# What a test does not ask otherwise, so that it finds programs compiled for another.
OPTIONS = {"cache": small_cache("kitty_pro"), "max_new_tokens": 40, "capacity": 96, "sampler": SAMPLER}


def joined(chunks) -> np.ndarray:
    return np.concatenate(list(chunks), axis=1)


def test_greedy_with_the_full_cache_is_the_argmax_of_a_full_recompute() -> None:
    model = tiny_model(num_layers=2)
    result = generate(model, PROMPTS, cache="full", max_new_tokens=12)
    wanted = [greedy_by_recompute(functional(model), prompt, 12) for prompt in PROMPTS]
    assert result.sequences() == wanted
    assert result.tokens.dtype == np.int32
    assert result.tokens.shape == (3, 12)
    assert result.lengths.tolist() == [12, 12, 12]
    assert not result.finished_by_eos.any()
    assert result.state is None


# Two compilations each, so that only the two ends of the family run in a quick run.
EVERY_CACHE = [
    pytest.param(name, marks=[] if name in ("full", "kitty_pro") else pytest.mark.slow) for name in CACHE_NAMES
]


@pytest.mark.parametrize("name", EVERY_CACHE)
def test_a_batch_gives_each_sequence_what_it_gets_alone(name) -> None:
    options = {"cache": small_cache(name), "max_new_tokens": 40, "capacity": 96, "sampler": SAMPLER}
    together = generate(tiny_model(), PROMPTS, seed=5, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_model(), [prompt], seed=5 + row, **options)
        assert alone.sequences() == [together.sequences()[row]]
    # What would hide a mistake: equal rows, or one token again and again.
    assert len({tuple(row) for row in together.sequences()}) == 3
    assert min(len(set(row)) for row in together.sequences()) > 10


def test_array_with_lengths_is_the_same_as_lists() -> None:
    padded = np.full((3, 50), 10**6, np.int64)  # padding is not looked at
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    lengths = [len(prompt) for prompt in PROMPTS]
    wanted = generate(tiny_model(), PROMPTS, cache="full", max_new_tokens=5).tokens
    for ids, sizes in ((padded, lengths), (jnp.asarray(padded, jnp.int32), jnp.array(lengths))):
        assert np.array_equal(generate(tiny_model(), ids, sizes, cache="full", max_new_tokens=5).tokens, wanted)
    whole = generate(tiny_model(), np.array([PROMPTS[0]]), cache="full", max_new_tokens=5)
    assert np.array_equal(whole.tokens[0], wanted[0])


def test_seeds() -> None:
    options = {"cache": "full", "max_new_tokens": 20, "sampler": SAMPLER}
    same = [PROMPTS[0]] * 3
    first = generate(tiny_model(), same, seed=3, **options).sequences()
    assert first == generate(tiny_model(), same, seed=3, **options).sequences()
    assert first == generate(tiny_model(), same, seed=[3, 4, 5], **options).sequences()
    assert len({tuple(row) for row in first}) == 3
    assert generate(tiny_model(), same, seed=[5, 5, 3], **options).sequences() == [first[2], first[2], first[0]]


def test_eos_ends_each_sequence_at_its_own_step() -> None:
    free = generate(tiny_model(), PROMPTS, **OPTIONS)
    eos = [int(free.tokens[0, 3]), int(free.tokens[2, 17])]
    result = generate(tiny_model(), PROMPTS, eos=eos, keep_state=True, **OPTIONS)
    lengths = [next((i + 1 for i, t in enumerate(row) if t in eos), 40) for row in free.sequences()]
    assert len(set(lengths)) > 1
    assert result.lengths.tolist() == lengths
    assert result.finished_by_eos.tolist() == [
        row[n - 1] in eos for row, n in zip(free.sequences(), lengths, strict=True)
    ]
    for row, n in enumerate(lengths):
        assert result.sequences()[row] == free.sequences()[row][:n]
        assert (result.tokens[row, n:] == -1).all()
    # The cache holds the prompt and all new tokens but the last: an ended sequence is left alone.
    assert result.state.lengths.tolist() == [len(p) + n - 1 for p, n in zip(PROMPTS, lengths, strict=True)]


def test_the_loop_stops_when_all_have_ended() -> None:
    free = generate(tiny_model(), PROMPTS, cache="full", max_new_tokens=40, sampler=SAMPLER)
    eos = sorted({int(row[i]) for row, i in zip(free.tokens, (2, 4, 6), strict=True)})
    generation = prepare(tiny_model(), PROMPTS, cache="full", max_new_tokens=40, sampler=SAMPLER, eos=eos)
    run = generation.advance(generation.start(), 40)
    assert int(run.num_new.max()) <= 7
    assert not run.active.any()


def test_one_new_token_needs_no_decode_step() -> None:
    generation = prepare(tiny_model(), PROMPTS, cache="full", max_new_tokens=1)
    result = generation.run(keep_state=True)
    assert result.lengths.tolist() == [1, 1, 1]
    assert result.state.lengths.tolist() == [len(prompt) for prompt in PROMPTS]


def test_prompts_lengths_eos_and_limits_compile_nothing_new() -> None:
    traced = []

    def sampler(logits, keys):  # runs only while JAX traces
        traced.append(logits.shape)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    options = {"cache": small_cache("kitty_pro"), "capacity": 128, "sampler": sampler}
    generate(tiny_model(), PROMPTS, max_new_tokens=5, **options)
    before, sizes = len(traced), (jit_start._cache_size(), jit_advance._cache_size())
    assert before
    for prompts, changes in (
        ([[1], [2, 3], [4, 5, 6]], {"max_new_tokens": 60}),
        ([[9] * 64, [2] * 33, [4]], {"max_new_tokens": 17, "seed": 11, "eos": [3, 4, 5]}),
        (np.ones((3, 40), int), {"max_new_tokens": 88, "eos": 96, "seed": [1, 2, 3]}),
    ):
        generate(tiny_model(), prompts, **changes, **options)
    # Another model of the same shape, split anew.
    generate(tiny_model(seed=1), PROMPTS, max_new_tokens=9, **options)
    assert len(traced) == before
    assert (jit_start._cache_size(), jit_advance._cache_size()) == sizes


def test_default_capacity_is_rounded_so_that_near_requests_agree() -> None:
    def shapes(prompt, new):
        generation = prepare(tiny_model(), [[1] * prompt], cache="full", max_new_tokens=new)
        return generation.steps[0].tokens.shape, generation.programs.capacity

    assert shapes(3, 30) == shapes(20, 40) == ((1, 64), 64)
    assert shapes(64, 65) == ((1, 64), 192)
    sizes = [bucket(n) for n in range(1, 40_000)]
    assert all(n <= size <= max(n + 63, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(bucket(size) == size for size in set(sizes))
    assert len(set(sizes)) <= 40


@pytest.mark.parametrize("name, pool_pages", [("kitty_pro", 11), ("full", None)])
@pytest.mark.parametrize("step", ["start", "advance"])
def test_the_state_is_updated_in_place(name, pool_pages, step) -> None:
    options = OPTIONS | {"cache": small_cache(name), "max_new_tokens": 9, "pool_pages": pool_pages}
    generation = prepare(tiny_model(), PROMPTS, **options)
    run = generation.programs.empty(generation.seeds)()
    programs, until = generation.programs, np.full(3, 9, np.int32)
    call = programs.start(run, generation.steps[0]) if step == "start" else programs.advance(run, until)
    compiled = call.func.lower(*call.args, **call.keywords).compile()
    text = compiled.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?) \}, entry", text).group(1)
    assert aliases.count("may-alias") + aliases.count("must-alias") == len(jax.tree.leaves(run))
    layer = run.cache.layers[0]
    pools = [layer.kv.key_pages, layer.kv.value_pages] if isinstance(layer, QuantizedCache) else [layer.keys]
    for pool in pools:
        kind = {"uint32": "u32", "float32": "f32"}[pool.dtype.name]
        shape = f"{kind}[{','.join(map(str, pool.shape))}]"
        assert shape in text
        assert not re.findall(rf"= {re.escape(shape)}\S* copy(?:-start)?\(", text)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(run.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    call()
    assert all(pool.is_deleted() for pool in pools)


def test_a_pool_that_runs_out_stops_the_sequence_and_loses_nothing() -> None:
    prompts = [PROMPTS[2][:20], PROMPTS[2][1:21]]
    options = OPTIONS | {"max_new_tokens": 60}
    whole = [generate(tiny_model(), [p], seed=row, **options).sequences()[0] for row, p in enumerate(prompts)]
    # Sink 4, pages of 16: 20 tokens fill one page each; the third page goes to row 0 when both reach 36 tokens.
    with pytest.raises(PoolExhaustedError) as caught:
        generate(tiny_model(), prompts, pool_pages=3, **options)
    error = caught.value
    # The token that would fill a page is not cached, so it is the last one.
    assert error.result.lengths.tolist() == [52 - 20, 36 - 20]
    assert error.result.sequences() == [whole[0][:32], whole[1][:16]]
    assert error.rows == (0, 1)
    assert error.result.state.lengths.tolist() == [51, 35]
    chunks = []
    with pytest.raises(PoolExhaustedError) as caught:
        chunks.extend(stream(tiny_model(), prompts, pool_pages=3, chunk=4, **options))
    assert np.array_equal(joined(chunks), error.result.tokens[:, :32])
    assert np.array_equal(caught.value.result.tokens, error.result.tokens)
    text = str(error)
    assert "pool_pages=3 were not enough" in text
    assert "0 (after 32 new tokens), 1 (after 16 new tokens)" in text
    assert "Raise pool_pages (10 hold the whole capacity of all 2 sequences" in text


def test_a_prompt_that_gets_no_pages_has_no_new_tokens() -> None:
    options = OPTIONS | {"max_new_tokens": 5}
    with pytest.raises(PoolExhaustedError) as caught:
        generate(tiny_model(), PROMPTS, pool_pages=1, **options)
    assert caught.value.rows == (2,)
    assert caught.value.result.lengths.tolist() == [5, 5, 0]
    wanted = [generate(tiny_model(), [p], seed=row, **options).sequences()[0] for row, p in enumerate(PROMPTS[:2])]
    assert caught.value.result.sequences()[:2] == wanted


def test_one_config_per_layer_and_the_edge_of_the_vocabulary() -> None:
    model = functional(tiny_model(num_layers=2))  # split before
    caches = [small_cache("full"), small_cache("kitty_pro")]
    prompts = [*PROMPTS[:2], [0, VOCAB - 1]]
    result = generate(model, prompts, cache=caches, max_new_tokens=40, capacity=96, keep_state=True)
    assert [type(layer).__name__ for layer in result.state.layers] == ["FullCache", "QuantizedCache"]
    assert result.lengths.tolist() == [40, 40, 40]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_stream_gives_the_tokens_of_generate_without_compiling_again(chunk) -> None:
    wanted = generate(tiny_model(), PROMPTS, **OPTIONS)
    sizes = (jit_start._cache_size(), jit_advance._cache_size())
    chunks = list(stream(tiny_model(), PROMPTS, chunk=chunk, **OPTIONS))
    assert np.array_equal(joined(chunks), wanted.tokens)
    assert (jit_start._cache_size(), jit_advance._cache_size()) == sizes
    assert [c.shape for c in chunks] == [(3, min(chunk, 40 - i)) for i in range(0, 40, chunk)]
    assert all(isinstance(c, np.ndarray) and c.dtype == np.int32 for c in chunks)


@pytest.mark.parametrize("chunk", [1, 5])
def test_stream_stops_when_all_have_ended(chunk) -> None:
    free = generate(tiny_model(), PROMPTS, **OPTIONS)
    eos = sorted({int(row[i]) for row, i in zip(free.tokens, (2, 4, 6), strict=True)})
    wanted = generate(tiny_model(), PROMPTS, eos=eos, **OPTIONS)
    tokens = joined(stream(tiny_model(), PROMPTS, chunk=chunk, eos=eos, **OPTIONS))
    longest = int(wanted.lengths.max())
    assert tokens.shape[1] == longest <= 7
    assert np.array_equal(tokens, wanted.tokens[:, :longest])


def test_stream_can_be_closed_and_started_again() -> None:
    generation = prepare(tiny_model(), PROMPTS, **OPTIONS)
    iterator = generation.stream()
    first = joined(itertools.islice(iterator, 3))
    iterator.close()
    assert list(iterator) == []
    assert np.array_equal(first, generation.run().tokens[:, :3])


def test_compile_leaves_nothing_to_compile() -> None:
    # A shape that no other test has.
    generation = prepare(tiny_model(), [[1, 2]] * 2, cache="full", max_new_tokens=5, capacity=77)
    compiled = []

    def listen(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert generation.compile() > 0
        assert len(compiled) >= 2  # so that an empty list below means something
        compiled.clear()
        chunks = list(generation.stream())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(chunks) == 5
    assert not compiled
