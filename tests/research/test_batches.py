"""Generation in batches: equal to `generate` row by row, stop strings, one compilation; recall's two-part prompts."""

import numpy as np
import pytest

from kitty_jax.cache.steps import functional
from kitty_jax.inference.decode_loop import jit_advance, jit_start
from kitty_jax.inference.generate import generate
from kitty_jax.inference.sampling import Sampling
from kitty_jax.research.tasks import batches
from kitty_jax.research.tasks.batches import Prompt, complete, shape_of
from kitty_jax.research.tasks.recall import Case, ask
from tests.inference.generate_cases import PROMPTS, greedy_by_recompute, small_cache, tiny_model

CACHE = small_cache("full")  # compiles fast; the command lines are tested with quantized ones
ROWS = [*PROMPTS, [8, 9], [30] * 12]
HOT = Sampling(temperature=3.0)  # a greedy random model repeats itself, and then a stop string is anywhere


def to_text(ids):
    return "".join(f"<{i}>" for i in ids)


def run(prompts=None, **options):
    prompts = [Prompt(ids, 7 + i) for i, ids in enumerate(ROWS)] if prompts is None else prompts
    options = {"batch": 2, "max_new_tokens": 24, "cache": CACHE, "chunk": 5, "sampler": HOT, **options}
    return sorted(complete(tiny_model(), to_text, prompts, **options), key=lambda c: c.index)


@pytest.fixture(scope="module")
def free():
    return run()


def test_every_prompt_gets_what_it_would_get_alone(free):
    assert [c.index for c in free] == list(range(5))
    for seed, (ids, got) in enumerate(zip(ROWS, free, strict=True), 7):
        options = {"max_new_tokens": 24, "capacity": 128, "sampler": HOT, "seed": seed}
        alone = generate(tiny_model(), [ids], cache=CACHE, **options).sequences()[0]
        assert (got.text, got.tokens, got.ended) == (to_text(alone), 24, "length")


def test_stop_strings_and_eos_end_a_sequence(free):
    tokens = [c.text[1:-1].split("><") for c in free]
    stop = f"{tokens[0][9]}><{tokens[0][10]}>"  # over two tokens, and the end of a chunk
    assert free[0].text.count(stop) == 1
    for whole, got in zip(free, run(stops=[stop, "never"]), strict=True):
        if stop in whole.text:
            assert (got.text, got.ended) == (whole.text[: whole.text.index(stop)], "stop")
        else:
            assert got == whole
    eos = int(tokens[1][6])
    for row, got in zip(tokens, run(eos=eos), strict=True):
        if str(eos) in row:
            assert (got.tokens, got.ended) == (row.index(str(eos)) + 1, "eos")
        else:
            assert got.ended == "length"


def test_seeds_go_with_prompts_and_not_with_places():
    prompts = [Prompt(ids, 40 + i) for i, ids in enumerate(ROWS)]
    whole = run(prompts)
    part = run(prompts[3:], shape=shape_of(prompts, 24))
    assert [c.text for c in part] == [c.text for c in whole[3:]]
    assert whole[0].text != run([Prompt(ROWS[0], 99)], shape=shape_of(prompts, 24))[0].text


def test_prompts_that_do_not_fit_one_step_give_the_same(free, monkeypatch):
    monkeypatch.setattr(batches, "PREFILL_TOKENS", 192)  # three rows of 64 tokens, so a batch of five takes two steps
    assert run(batch=5) == free


def test_batches_of_unlike_prompts_compile_once():
    long = Prompt([5] * 100)  # another bucket than the other prompts'
    run([long])
    before = jit_start._cache_size(), jit_advance._cache_size()
    got = run([Prompt([3]), Prompt([4]), long, Prompt([6]), Prompt([7])], stops=["<1>"])
    assert len(got) == 5
    assert (jit_start._cache_size(), jit_advance._cache_size()) == before


@pytest.mark.parametrize(
    "options,message",
    [
        ({"batch": 0}, "batch must be a whole number"),
        ({"stops": "abc"}, "list of non-empty texts"),
        ({"stops": [""]}, "list of non-empty texts"),
        ({"prompts": [Prompt([1]), Prompt([])]}, "row 1 of 2 holds no tokens"),
        ({"prompts": [Prompt([1]), Prompt([400])]}, "token id 400"),
    ],
)
def test_errors_come_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_prompts_that_the_model_was_not_made_for():
    with pytest.raises(ValueError, match="prompt 1 has 60 tokens, and with max_new_tokens 5 needs 65 positions"):
        shape_of([Prompt([1]), Prompt([1] * 60)], 5, most=64)
    assert shape_of([Prompt([1]), Prompt([1] * 60)], 5, most=65) == (64, 128)


def answers(cache, **options):
    rng = np.random.default_rng(0)
    cases = [Case(80, 0, rng.integers(1, 97, n).tolist(), rng.integers(1, 97, 9).tolist(), "") for n in (45, 40, 33)]
    return cases, ask(tiny_model(), cases, cache, new_tokens=3, batch=2, shape=(64, 64), **options)


def test_recall_answers_are_greedy_continuations():
    cases, got = answers("full")
    fm = functional(tiny_model())
    assert got == [greedy_by_recompute(fm, case.context + case.question, 3) for case in cases]


@pytest.mark.slow
def test_recall_asks_the_cache():
    # In one prompt the first new token is of full precision; asked of a 2-bit cache, it need not be.
    coarse, (_, full) = small_cache("kivi2"), answers("full")
    assert [row[0] for row in answers(coarse, one_prompt=True)[1]] == [row[0] for row in full]
    assert [row[0] for row in answers(coarse)[1]] != [row[0] for row in full]
