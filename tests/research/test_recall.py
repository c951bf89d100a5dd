"""Recall's prompts in two parts: a text, and a question that sees it as the cache holds it."""

import numpy as np

from kitty_jax.cache.steps import functional, prefill
from kitty_jax.research.tasks import recall
from kitty_jax.research.tasks.recall import Case, ask
from tests.inference.generate_cases import greedy_by_recompute, tiny_model


def answers(cache, **options):
    rng = np.random.default_rng(0)
    cases = [Case(80, 0, rng.integers(1, 97, n).tolist(), rng.integers(1, 97, 9).tolist(), "") for n in (45, 40, 33)]
    return cases, ask(tiny_model(), cases, cache, new_tokens=3, batch=2, shape=(64, 64), **options)


def test_recall_answers_are_greedy_continuations():
    cases, got = answers("full")
    fm = functional(tiny_model())
    assert got == [greedy_by_recompute(fm, case.context + case.question, 3) for case in cases]


def test_the_question_is_asked_of_the_cached_text(monkeypatch):
    prompts = []

    def recording(*arguments, fresh, **options):
        prompts.append((arguments[2].shape, fresh))
        return prefill(*arguments, fresh=fresh, **options)

    monkeypatch.setattr(recall, "prefill", recording)  # is traced once for each kind of prompt
    answers("full")
    assert prompts == [((2, 64), True), ((2, 64), False)]
    prompts.clear()
    answers("full", one_prompt=True)
    assert prompts == [((2, 128), True)]
