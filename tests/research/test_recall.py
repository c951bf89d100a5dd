"""Recall's prompts in two parts: a text, and a question that sees it as the cache holds it."""

import numpy as np
import pytest

from kitty_jax.cache.steps import functional
from kitty_jax.research.tasks.recall import Case, ask
from tests.inference.generate_cases import greedy_by_recompute, small_cache, tiny_model


def answers(cache, **options):
    rng = np.random.default_rng(0)
    sizes = (45, 40, 33, 50, 60, 55, 48, 62)
    cases = [Case(80, 0, rng.integers(1, 97, n).tolist(), rng.integers(1, 97, 9).tolist(), "") for n in sizes]
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
