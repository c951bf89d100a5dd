"""A real model: what SmolLM2-135M-Instruct says after "The capital of France is"."""

import pytest

from kitty_jax.inference.generate import generate
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.tokenizer import load_tokenizer

PROMPT = [504, 3575, 282, 4649, 314]
CONTINUATION = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path, dtype="float32")


def test_greedy_continuation_with_the_full_cache(model, smollm2_path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    assert tokenizer("The capital of France is")["input_ids"] == PROMPT
    result = generate(model, [PROMPT], cache="full", max_new_tokens=20, capacity=64)
    assert result.sequences() == [CONTINUATION]
    assert tokenizer.decode(result.sequences()[0]).startswith(" Paris.\n\nThe answer is:")


@pytest.mark.slow
def test_kitty_pro_starts_alike(model) -> None:
    # 25 tokens lie in the sink, so nothing is quantized yet: the packed path must give the same tokens.
    result = generate(model, [PROMPT], cache="kitty_pro", max_new_tokens=20, capacity=64)
    assert result.sequences()[0] == CONTINUATION
