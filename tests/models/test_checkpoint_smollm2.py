"""A real checkpoint: SmolLM2-135M-Instruct from its GGUF file.

Tokenizer, q and k rows, names and maths are right together or not at all.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import causal_attend
from kitty_jax.models.export import convert_checkpoint
from kitty_jax.models.params import params_of
from kitty_jax.models.registry import config_from_name
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids

PROMPT, PROMPT_IDS = "The capital of France is", [504, 3575, 282, 4649, 314]
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]
SCORED = 512
NLL = 3.1755  # nats per token, over the first SCORED tokens of the essays


@pytest.fixture(scope="session")
def model(smollm2_path):
    return load_model(smollm2_path)


@pytest.fixture(scope="session")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)  # the parse of the model's file serves again


def hidden_of(model, tokens):
    """Hidden states [T, E] of a list of T tokens."""
    padded = np.zeros((1, -(-len(tokens) // 64) * 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return _hidden(*nnx.split(model), padded)[0, : len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _hidden(graphdef, state, tokens):
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


def test_greedy_continuation(model):
    # One pass for all: each token of the continuation is the best one after those before it.
    hidden = hidden_of(model, [*PROMPT_IDS, *GREEDY[:-1]])
    best = model.logits(hidden[len(PROMPT_IDS) - 1 :]).argmax(axis=-1)
    assert best.tolist() == GREEDY


def test_negative_log_likelihood_of_the_essays(model, tokenizer, essays_text):
    tokens = tokenizer.encode(essays_text[: 8 * SCORED], add_special_tokens=False)[:SCORED]
    assert len(tokens) == SCORED
    logits = np.asarray(model.logits(hidden_of(model, tokens)[:-1]))
    scores = logits[np.arange(SCORED - 1), tokens[1:]] - np.asarray(jax.nn.logsumexp(logits, axis=-1))
    assert -scores.mean() == pytest.approx(NLL, abs=0.002)


def test_the_converted_directory_is_the_same_model(model, tokenizer, smollm2_path, tmp_path):
    convert_checkpoint(smollm2_path, tmp_path / "out", dtype="bfloat16", max_shard_bytes=100_000_000)
    again = load_model(tmp_path / "out")
    assert again.config == dataclasses.replace(model.config, dtype=jnp.bfloat16)
    parameters, written = params_of(model), params_of(again)
    assert set(written) == set(parameters)
    for path, value in parameters.items():
        rounded = np.asarray(value).astype(jnp.bfloat16)
        assert np.array_equal(np.asarray(written[path]).view(np.uint16), rounded.view(np.uint16)), path
    text = f"{PROMPT} 1984?<|im_end|>\n  naïve"
    assert load_tokenizer(tmp_path / "out").encode(text) == tokenizer.encode(text)
