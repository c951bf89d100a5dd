"""Engine: equal to `generate` request by request, slots and pages reused, small pools, nothing compiled for others."""

import dataclasses
import functools

import numpy as np
import pytest

from kitty_jax.inference import decode_loop
from kitty_jax.inference.engine import Engine, Request
from kitty_jax.inference.generate import generate
from kitty_jax.inference.sampling import Greedy, Sampling
from kitty_jax.inference.scheduler import Scheduler
from tests.inference.generate_cases import VOCAB, small_cache, tiny_model

CACHE = small_cache("kitty_pro")  # sink 4, pages of 16
SAMPLER = Sampling(temperature=1.2)
SIZES = [(5, 20), (40, 3), (1, 1), (20, 40), (33, 17), (60, 30), (2, 9), (16, 33)]  # prompt, new tokens
REQUESTS = [
    Request([(7 * i + 3 * j) % (VOCAB - 1) + 1 for j in range(prompt)], new, seed=50 + i)
    for i, (prompt, new) in enumerate(SIZES)
]


@functools.cache
def alone(index: int, sampler=SAMPLER) -> list[int]:
    """What `generate` gives a request by itself."""
    request = REQUESTS[index]
    options = {"cache": CACHE, "capacity": 96, "sampler": sampler, "seed": request.seed}
    return generate(tiny_model(), [request.prompt], max_new_tokens=request.max_new_tokens, **options).sequences()[0]


def wanted(sampler=SAMPLER) -> list[list[int]]:
    return [alone(i, sampler) for i in range(len(REQUESTS))]


def engine(**options) -> Engine:
    """Three slots and six pages, one more than the largest of REQUESTS fills: one shape for most tests."""
    defaults = {"cache": CACHE, "slots": 3, "capacity": 96, "pool_pages": 6, "sampler": SAMPLER, "chunk": 4}
    return Engine(tiny_model(), **{**defaults, **options})


def tokens_of(results) -> list[list[int]]:
    return [result.tokens for result in results]


def to_text(ids) -> str:
    return "".join(f"<{i}>" for i in ids)


def assert_empty(some: Engine) -> None:
    assert some.state.pool.num_free.tolist() == [6]
    assert not any(x.any() for x in (some.state.pool.reference_counts, some.state.lengths, some.state.exhausted))


@pytest.fixture
def preempted(monkeypatch) -> list[int]:
    """Rows whose requests went back to the queue, as it happens."""
    rows, original = [], Scheduler._preempt

    def record(self, group, refused):
        out = original(self, group, refused)
        rows.extend(out)
        return out

    monkeypatch.setattr(Scheduler, "_preempt", record)
    return rows


@pytest.mark.parametrize("overcommit", [False, True])
def test_each_request_gets_what_it_gets_alone_and_no_page_is_lost(overcommit, preempted) -> None:
    """Eight requests in three slots and six pages, one more than the largest fills; pieces as they are made."""
    some = engine(overcommit=overcommit)
    results = some.run(iter(REQUESTS))
    assert tokens_of(results) == wanted()
    assert [(len(r.tokens), r.ended, r.text) for r in results] == [(new, "length", None) for _, new in SIZES]
    assert len({tuple(tokens[:8]) for tokens in wanted()}) == len(SIZES)  # equal rows would hide a mistake
    got: list[list[int]] = [[] for _ in REQUESTS]
    ended: list[int] = []
    for piece in some.stream(REQUESTS):
        assert piece.index not in ended
        assert len(piece.tokens) <= 4 + 1  # the prompt step gives one more
        got[piece.index] += piece.tokens
        ended += [piece.index] * bool(piece.ended)
    assert got == wanted()  # nothing is handed out twice
    assert bool(preempted) == overcommit
    assert sorted(ended) == list(range(8))
    assert set(ended[:2]) == {1, 2}  # the two shortest of the first three
    assert_empty(some)


def test_greedy_one_slot_and_long_prompts_in_parts() -> None:
    long = Request(list(range(1, 81)), 9, 3)
    options = {"cache": CACHE, "capacity": 96, "prefill_tokens": 64, "seed": 3}
    single = generate(tiny_model(), [long.prompt], max_new_tokens=9, **options).sequences()
    got = engine(slots=1, pool_pages=None, prefill_tokens=64, sampler=None).run([REQUESTS[0], long])
    assert tokens_of(got) == [alone(0, Greedy()), *single]


def test_fewer_requests_than_slots_none_and_lists_of_ids() -> None:
    some = engine()
    assert some.run([]) == []
    assert some.compile(REQUESTS) > 0
    assert tokens_of(some.run(REQUESTS[5:6])) == [alone(5)]  # alone it may fill the pool but for a page
    ids = [REQUESTS[0].prompt, np.array(REQUESTS[1].prompt)]  # their seeds follow each other, as those of REQUESTS do
    first, second = tokens_of(some.run(ids, max_new_tokens=3, seed=50))
    assert (first, second) == (alone(0)[:3], alone(1))


def test_stop_strings_end_a_request() -> None:
    tokens = wanted()
    stop = f"{tokens[3][9]}><{tokens[3][10]}>"  # over two tokens
    assert to_text(tokens[3]).count(stop) == 1
    requests = [dataclasses.replace(r, stop=(stop, "never")) for r in REQUESTS]
    for overcommit in (False, True):  # a request that is recomputed keeps its text
        some = engine(overcommit=overcommit, decode=to_text)
        for ids, got in zip(tokens, some.run(requests), strict=True):
            text = to_text(ids)
            if stop in text:
                assert (got.text, got.ended) == (text[: text.index(stop)], "stop")
                assert ids[: len(got.tokens)] == got.tokens
                assert len(got.tokens) < len(ids)
            else:
                assert (got.text, got.ended, got.tokens) == (text, "length", ids)
        assert_empty(some)
    last = f"<{tokens[0][-1]}>"
    (got,) = engine(decode=to_text).run([dataclasses.replace(REQUESTS[0], stop=[last])])
    assert got.text == to_text(tokens[0]).split(last)[0]
    with pytest.raises(ValueError, match=r"request 0: stop \('x',\) needs an engine with decode="):
        engine().run([dataclasses.replace(REQUESTS[0], stop=("x",))])
    for wrong in ("abc", [""], [3]):
        with pytest.raises(ValueError, match="request 0: stop must be a list of non-empty texts"):
            engine(decode=to_text).run([dataclasses.replace(REQUESTS[0], stop=wrong)])


def test_eos_ends_a_sequence_and_the_next_takes_its_slot() -> None:
    eos = sorted({alone(0)[0], alone(3)[7], alone(5)[11]})
    results = engine(eos=eos, chunk=16).run(REQUESTS)
    for free, result in zip(wanted(), results, strict=True):
        ends = [i + 1 for i, token in enumerate(free) if token in eos]
        assert result.tokens == free[: ends[0] if ends else None]
        assert result.ended == ("eos" if ends else "length")
    assert results[0].ended == "eos"
    assert len(results[0].tokens) == 1
    assert {result.ended for result in results} == {"eos", "length"}


def test_a_short_request_gives_its_slot_to_the_next_at_once() -> None:
    # The long ones are in two slots all the time; the others pass through the third.
    long, short = (
        [REQUESTS[3], dataclasses.replace(REQUESTS[3], max_new_tokens=39)],
        [dataclasses.replace(REQUESTS[6], max_new_tokens=3, seed=i) for i in range(4)],
    )
    order = [piece.index for piece in engine(chunk=16).stream([*long, *short]) if piece.ended]
    assert order == [2, 3, 4, 5, 1, 0]


def test_other_requests_compile_nothing() -> None:
    jits = [getattr(decode_loop, f"jit_{name}") for name in ("init", "reset", "start", "advance", "progress")]
    some, another = engine(), engine(eos=[3, 4], sampler=dataclasses.replace(SAMPLER, temperature=0.7))
    # Three, one, and two slots filled at a time.
    some.run([Request([1] * 9, new) for new in (4, 9, 9, 15, 3, 3)])
    before = [jit._cache_size() for jit in jits]
    rng = np.random.default_rng(0)
    for seed in range(3):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 65)).tolist() for _ in range(9)]
        some.run([Request(ids, int(rng.integers(1, 32)), seed) for ids in prompts])
    assert len(another.run(REQUESTS)) == len(REQUESTS)
    assert [jit._cache_size() for jit in jits] == before
    assert all(before)


def test_overcommit_under_pressure_and_eos(preempted) -> None:
    # Prompts of one page that grow to five each, all at the same time, in a pool of six.
    requests = [dataclasses.replace(REQUESTS[3], max_new_tokens=70, seed=i) for i in range(5)]
    options = {"cache": CACHE, "capacity": 96, "sampler": SAMPLER}
    free = [
        generate(tiny_model(), [r.prompt], max_new_tokens=70, seed=r.seed, **options).sequences()[0] for r in requests
    ]
    assert tokens_of(engine(overcommit=True).run(requests)) == free
    assert len(preempted) >= 2
    some = engine(overcommit=True, eos=free[4][30])
    results = some.run(requests)
    for tokens, result in zip(free, results, strict=True):
        assert result.tokens == tokens[: tokens.index(free[4][30]) + 1 if free[4][30] in tokens else None]
    assert_empty(some)


def test_what_breaks_off_leaves_the_engine_usable(monkeypatch) -> None:
    some = engine()
    pieces = some.stream(REQUESTS)
    next(pieces)
    with pytest.raises(RuntimeError, match="run it to its end or close it"):
        some.run(REQUESTS[:1])
    pieces.close()
    assert some.state is None
    some.stream(REQUESTS)  # one that never began holds nothing up
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            some.run(REQUESTS)
    assert tokens_of(some.run(REQUESTS[:3])) == wanted()[:3]
    assert_empty(some)


@pytest.mark.parametrize(
    "requests, message",
    [
        (
            [REQUESTS[0], Request([1] * 90, 7)],
            "request 1: .* 90 tokens, and with max_new_tokens 7 needs a capacity of 97",
        ),
        ([Request([], 7)], "request 0: empty prompt"),
        ([REQUESTS[0], Request([1, VOCAB], 7)], f"request 1: token id {VOCAB} at position 1"),
        ([Request([1], 0)], "request 0: max_new_tokens must be a whole number, 1 or more, got 0"),
        ([Request([1], 1, -1)], "request 0: seed must be"),
        ([Request([1], 1, 2**32)], "request 0: seed must be from 0"),
        ([[1, 2]], "request 0: plain token ids need max_new_tokens"),
        ([Request("text", 4)], "request 0: row 0 of token_ids is text"),
        # 60 + 36 - 1 cached tokens past a sink of 4 fill 5 pages
        (
            [REQUESTS[0], Request([1] * 60, 36)],
            "60 prompt tokens and max_new_tokens 36 fill 5 pages, but the pool has 4;",
        ),
    ],
)
def test_requests_are_refused_before_anything_runs(requests, message) -> None:
    some = engine(pool_pages=4)
    with pytest.raises(ValueError, match=message):
        some.stream(requests)
    assert some.state is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slots": 0}, "slots must be a whole number, 1 or more, got 0"),
        ({"capacity": 1}, "capacity must be a whole number, 2 or more, got 1"),
        ({"chunk": 0}, "chunk must be"),
        ({"overcommit": True, "pool_pages": None}, "overcommit is about a page pool: give pool_pages"),
        ({"cache": "full", "pool_pages": 4}, "pool_pages is for quantized caches"),
    ],
)
def test_arguments(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


def schedule(sizes, **options) -> Scheduler:
    requests = [Request([1] * prompt, new) for prompt, new in sizes]
    defaults = {"slots": 4, "groups": 1, "pool": 10, "overcommit": False, "eos": set()}
    return Scheduler(requests, lambda tokens: tokens // 10, **{**defaults, **options})


def test_admission_counts_all_pages_that_a_request_can_fill() -> None:
    # 30 + 21 - 1 tokens fill 5 pages, 30 + 20 - 1 fill 4. The last request would fit beside the first two: it waits.
    assert schedule([(30, 21), (30, 21), (5, 1)]).admit() == [0, 1, 2]
    assert schedule([(30, 21), (30, 20), (30, 21), (5, 1)]).admit() == [0, 1]
    # Promised the pages of the prompt and one more, three fit.
    assert schedule([(20, 50)] * 5, overcommit=True).admit() == [0, 1, 2]


def test_admission_by_group() -> None:
    assert schedule([(30, 21)] * 5, groups=2, pool=5).admit() == [0, 2]
    assert schedule([(30, 21)] * 5, groups=2, pool=10).admit() == [0, 2, 1, 3]


def test_the_youngest_goes_back_until_the_refused_have_pages() -> None:
    plan = schedule([(20, 50)] * 4, overcommit=True)
    assert plan.admit() == [0, 1, 2]
    # 20 + 20 - 1 tokens: 3 pages each. All three are refused a fourth, while one page of ten is free.
    tokens, going = np.ones((4, 20), np.int32), np.zeros(4, bool)
    pieces, vacant, resumed = plan.read(tokens, going)
    assert [(piece.index, len(piece.tokens), piece.ended) for piece in pieces] == [(i, 20, "") for i in range(3)]
    assert vacant.tolist() == [False, False, True, False]
    assert resumed.tolist() == [True, True, False, False]
    assert plan.admit() == []  # request 2 needs 5 pages to get as far as it was, and 8 of ten are promised
