"""A real checkpoint: SmolLM2-135M-Instruct from its GGUF file.

Tokenizer, q and k rows, names and maths are right together or not at all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.export import convert_checkpoint
from kitty_jax.models.registry import config_from_name, params_of
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids

PROMPT, PROMPT_IDS = "The capital of France is", [504, 3575, 282, 4649, 314]
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]
SCORED = 2048
NLL = 3.2212  # nats per token, over the first SCORED tokens of the essays


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(graphdef, state, tokens):
    """tokens int32 [1, T] -> hidden [1, T, E]."""
    model = nnx.merge(graphdef, state)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return model(tokens, positions, (None,) * model.config.num_layers, causal_attend)[0]


def test_config(model):
    assert (model.config.dtype, model.config.tied_head) == (jnp.float32, True)
    named = config_from_name("smollm2-135m")
    assert {**vars(model.config), "dtype": named.dtype} == vars(named)


def test_tokenizer(tokenizer, smollm2_path):
    assert tokenizer.encode(PROMPT) == PROMPT_IDS  # and no token in front
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    assert stop_token_ids(smollm2_path) == (2,)


@pytest.mark.slow
def test_greedy_continuation(model):
    graphdef, state = nnx.split(model)
    tokens = list(PROMPT_IDS)
    for _ in GREEDY:
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        hidden = hidden_of(graphdef, state, padded)[:, len(tokens) - 1]
        tokens.append(int(model.logits(hidden)[0].argmax()))
    assert tokens[len(PROMPT_IDS) :] == GREEDY


@pytest.mark.slow
def test_negative_log_likelihood_of_the_essays(model, tokenizer, essays_text):
    tokens = np.asarray(tokenizer.encode(essays_text[: 8 * SCORED], add_special_tokens=False)[:SCORED], np.int32)
    assert tokens.shape == (SCORED,)
    hidden = hidden_of(*nnx.split(model), tokens[None])[0]
    losses = []
    for start in range(0, SCORED - 1, 256):  # 256 rows of logits at a time
        stop = min(start + 256, SCORED - 1)
        scores = jax.nn.log_softmax(model.logits(hidden[start:stop]))
        losses.append(-np.asarray(scores)[np.arange(stop - start), tokens[start + 1 : stop + 1]])
    assert np.concatenate(losses).mean() == pytest.approx(NLL, abs=0.002)


@pytest.mark.slow
def test_the_converted_directory_is_the_same_model(model, tokenizer, smollm2_path, tmp_path):
    convert_checkpoint(smollm2_path, tmp_path / "out", max_shard_bytes=200_000_000)
    again = load_model(tmp_path / "out")
    assert again.config == model.config
    for path, value in params_of(model).items():
        np.testing.assert_array_equal(np.asarray(params_of(again)[path]), np.asarray(value), err_msg=str(path))
    prompt = np.asarray([PROMPT_IDS], np.int32)
    hidden, hidden_again = (hidden_of(*nnx.split(m), prompt) for m in (model, again))
    np.testing.assert_array_equal(np.asarray(again.logits(hidden_again)), np.asarray(model.logits(hidden)))
    text = f"{PROMPT} 1984?<|im_end|>\n  naïve"
    assert load_tokenizer(tmp_path / "out").encode(text) == tokenizer.encode(text)
