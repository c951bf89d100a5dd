"""Bad input to generate: a clear error before anything is compiled."""

import numpy as np
import pytest

from kitty_jax.cache.config import CACHE_NAMES, CacheConfig
from kitty_jax.inference.decode_loop import jit_advance, jit_start
from kitty_jax.inference.generate import generate, prepare, stream
from kitty_jax.inference.sampling import Sampling
from tests.inference.generate_cases import tiny_model

ARRAY = np.array([[1, 2, 3, 0], [4, 5, 0, 0]])
LISTS = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "token_ids, lengths, message",
    [
        ([[1], []], None, "empty prompt: row 1 of 2 holds no tokens"),
        (np.zeros((2, 0), int), None, "empty prompt: row 0 of 2"),
        ([], None, "no prompts: .* got a batch of 0"),
        (np.zeros((0, 4), int), None, "no prompts: .* got a batch of 0"),
        (ARRAY, [3, 5], r"lengths\[1\] is 5, but the row has 4 tokens; wanted 1 to 4"),
        (ARRAY, [0, 2], r"lengths\[0\] is 0, an empty prompt; wanted 1 to 4"),
        (ARRAY, [3, -1], r"lengths\[1\] is -1"),
        (ARRAY, [3], r"one entry per prompt, shape \(2,\), got shape \(1,\)"),
        (ARRAY, 3, r"one entry per prompt, shape \(2,\), got shape \(\)"),
        (ARRAY, [3.0, 2.0], "lengths must hold integers, got float64"),
        (LISTS, [3, 3], r"lengths\[1\] is 3, but the row has 2 tokens"),
        (
            [[1, 2], [3, 97]],
            None,
            "token id 97 at position 1 of row 1 is outside the vocabulary of 97 tokens; wanted 0 to 96",
        ),
        ([[1, -1]], None, "token id -1 at position 1 of row 0 is outside the vocabulary"),
        ([[1, 2**40]], None, f"token id {2**40} at position 1 of row 0 is outside the vocabulary"),
        ([[1.5, 2]], None, "row 0 of token_ids must hold integers, got float64"),
        ([[1], [True]], None, "row 1 of token_ids must hold integers, got bool"),
        (np.ones((1, 3), np.float32), None, "token_ids must hold integers, got float32"),
        ([1, 2, 3], None, r"wrap a single one as \[ids\]"),
        (np.array([1, 2, 3]), None, r"must have shape \[B, T\], got \(3,\); a single prompt is token_ids\[None\]"),
        ("text", None, "got str; text has to go through the model's tokenizer"),
        (["text"], None, r"row 0 of token_ids is text \('text'\)"),
        ([[[1]]], None, r"row 0 of token_ids must be one sequence of integers, got shape \(1, 1\)"),
        (None, None, "got NoneType"),
    ],
)
def test_prompts(token_ids, lengths, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), token_ids, lengths, max_new_tokens=4)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"capacity": 2},
            "row 0 has 3 tokens, .* needs a capacity of 7, but it is 2; raise capacity or shorten the prompt$",
        ),
        (
            {"capacity": 3},
            "row 0 has 3 tokens, .* needs a capacity of 7, but it is 3; raise capacity or shorten the prompt$",
        ),
        (
            {"capacity": 10, "max_new_tokens": 8},
            "row 0 has 3 tokens, and with max_new_tokens 8 needs a capacity of 11, but it is 10; .* at most 7 new",
        ),
        ({"capacity": 0}, "capacity must be a whole number, 1 or more, got 0"),
        ({"capacity": 9.5}, "capacity must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number, 1 or more, got 2.0"),
        ({"eos": 97}, "eos 97 is outside the vocabulary of 97 tokens"),
        ({"eos": [1, -2]}, "eos -2 is outside the vocabulary of 97 tokens"),
        ({"eos": 1.0}, "eos must be a token id, a sequence of token ids or None, got 1.0"),
        ({"eos": "</s>"}, "eos must be a token id"),
        ({"seed": -1}, "seed must be from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be from 0"),
        ({"seed": 0.5}, "seed must be an integer or 2 integers"),
        ({"seed": [1, 2, 3]}, "seed must be an integer or 2 integers"),
        ({"sampler": "greedy"}, r"sampler must be Greedy\(\), Sampling\(...\) or a function"),
        ({"pool_pages": 0}, "pool_pages must be a whole number, 1 or more, got 0"),
        ({"pool_pages": 4, "cache": "full"}, "pool_pages is for quantized caches"),
        ({"implementation": "fast"}, "implementation must be one of auto, mosaic, xla, got 'fast'"),
        ({"cache": ["full", "full"]}, "one per layer: wanted 1, got 2"),
        ({"cache": CacheConfig.kitty(boost=0.1)}, "boost 0.1 of head size 16 is 1.6 channels, not a whole number"),
        ({"cache": CacheConfig.kitty(boost=0.25, selection=((0, 1, 2, 3),) * 3)}, "for 3 KV heads, the model has 2"),
    ],
)
def test_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), LISTS, **{"max_new_tokens": 4, **options})


def test_unknown_cache_lists_the_names() -> None:
    with pytest.raises(ValueError, match="unknown cache 'kity'") as caught:
        generate(tiny_model(), LISTS, cache="kity", max_new_tokens=4)
    for name in CACHE_NAMES:
        assert name.replace("_", "-") in str(caught.value)


def test_errors_come_before_any_compilation() -> None:
    with pytest.raises(ValueError, match="empty prompt: row 1"):
        stream(tiny_model(), [[1], []], max_new_tokens=3)
    with pytest.raises(ValueError, match="chunk must be a whole number, 1 or more, got 0"):
        stream(tiny_model(), [[1]], max_new_tokens=3, chunk=0)
    sizes = (jit_start._cache_size(), jit_advance._cache_size())
    with pytest.raises(ValueError):
        generate(tiny_model(), [[1, 97]], max_new_tokens=4)
    prepare(tiny_model(), LISTS, max_new_tokens=4, sampler=Sampling())
    assert (jit_start._cache_size(), jit_advance._cache_size()) == sizes


def test_what_just_fits_is_taken() -> None:
    just = prepare(tiny_model(), LISTS, max_new_tokens=7, capacity=10, eos=[0, 96], seed=2**32 - 1)
    assert just.programs.capacity == 10
    (step,) = prepare(tiny_model(), ARRAY, [4, 1], max_new_tokens=1, capacity=5).steps
    assert step.lengths.tolist() == [4, 1]
