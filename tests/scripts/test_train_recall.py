"""`scripts/train_recall.py` and its task: sequences by hand, what counts as right, a micro training, the checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.steps import functional
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.tokenizer import load_tokenizer
from kitty_jax.research.tasks.lookup import Lookup, answers, evaluate, in_pages
from scripts import train_recall

TASK = Lookup(pairs=5, firsts=4, lasts=4, values=8)
SMALL = ["--layers", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--embed", "32", "--mlp", "32"]
SMALL += ["--firsts", "4", "--lasts", "4", "--values", "8", "--tokens", "480", "--dtype", "float32"]
CACHE = "kivi2:page=16,window=16"


def test_sequences_are_pairs_and_then_their_keys_with_the_answers():
    tokens = np.asarray(TASK.sample(jax.random.key(0), 50))
    assert tokens.shape == (50, TASK.length + 1)
    assert tokens.dtype == np.int32
    assert (tokens[:, 0] == 0).all()
    orders = set()
    for row in tokens:
        pairs = [tuple(p) for p in row[1:16].reshape(5, 3).tolist()]
        asked = [tuple(p) for p in row[16:].reshape(5, 3).tolist()]
        assert sorted(pairs) == sorted(asked)
        assert len({pair[:2] for pair in pairs}) == 5
        for first, last, value in pairs:
            assert 1 <= first < 5 <= last < 9 <= value < TASK.vocab_size
        orders.add(tuple(pairs.index(p) for p in asked))
    assert len(orders) > 20
    asked_at = np.arange(TASK.length)[TASK.asked]
    np.testing.assert_array_equal(tokens[:, asked_at + 1], tokens[:, 16:].reshape(50, 5, 3)[:, :, 2])
    assert len(TASK.words()) == TASK.vocab_size


def test_a_task_that_its_alphabets_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="17 pairs need as many keys, and 4 x 4 tokens make only 16"):
        Lookup(pairs=17, firsts=4, lasts=4)
    with pytest.raises(ValueError, match="values must be a whole number"):
        Lookup(pairs=1, values=0)


def test_a_pair_counts_as_in_a_page_once_its_page_is_full():
    cache = CacheConfig.kivi2(page=16, window=16)
    task = dataclasses.replace(TASK, pairs=12, firsts=8, lasts=8)
    tokens = np.asarray(task.sample(jax.random.key(1), 3))
    got = in_pages(tokens, task, cache)
    for row, inside in zip(tokens.tolist(), got, strict=True):
        for j in range(12):
            at = 37 + 3 * j  # the first token of a key that is asked for; its second is the query's
            value = next(i for i in range(1, 37, 3) if row[i : i + 2] == row[at : at + 2]) + 2
            assert inside[j] == (value // 16 < (at + 1) // 16)
    assert 0 < got.mean() <= 1
    assert not in_pages(tokens, task, CacheConfig.full()).any()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(model, task, history, directory) of a training of 120 steps."""
    steps = ["--stages", "2", "5", "--steps", "50", "--decay", "50", "--rate", "1e-2", "--warmup", "5"]
    options = train_recall.parser().parse_args(["--json", "x", *SMALL, *steps])
    config, recipe = train_recall.recipe_of(options)
    lines = []
    model, task, history = train_recall.train(config, recipe, say=lines.append)
    directory = tmp_path_factory.mktemp("recall") / "model"
    train_recall.save(model, task, directory, {"history": history})
    return model, task, history, directory


def test_the_loss_falls_and_the_stages_grow(trained):
    _, task, history, _ = trained
    assert [(row["pairs"], row["step"]) for row in history] == [(2, 50), (5, 100), (5, 150)]
    assert task == TASK
    assert history[2]["loss"] < history[1]["loss"] < np.log(TASK.vocab_size)
    assert history[2]["loss"] < np.log(TASK.values)  # it knows which tokens are values, and some of their pairs


def test_the_first_layer_looks_back_before_it_is_trained():
    small = ["--json", "x", "--stages", "16", "--embed", "64", "--mlp", "16", "--layers", "1", "--dtype", "float32"]
    options = train_recall.parser().parse_args(small)
    config, recipe = train_recall.recipe_of(options)
    model = train_recall.initial_model(config, 0, key_spread=recipe.key_spread, common=recipe.common)
    tokens = recipe.task.sample(jax.random.key(0), 1)[:, :-1]
    seen = []

    def attend(cache, q, k, v):
        logits = jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2)) * q.shape[-1] ** -0.5
        causal = jnp.tri(tokens.shape[1], dtype=bool)
        seen.append(jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), -1)[0])
        return q, cache

    model(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], (None,), attend)
    for head, weights in enumerate(seen[0]):
        back = [float(jnp.mean(jnp.diagonal(weights, -i))) for i in range(4)]
        assert int(np.argmax(back)) == 1 + head % 2
        assert max(back) > 0.4
    spread = np.asarray(model.layers[0].attn.k_norm.weight[...])
    assert spread.max() > 3 * np.median(spread)  # some key channels are much larger than most


def test_the_checkpoint_reloads_with_equal_weights_and_a_word_for_every_token(trained):
    model, task, _, directory = trained
    again = load_model(directory)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, functional(again).params, functional(model).params)
    assert train_recall.load_task(directory) == task
    tokenizer = load_tokenizer(directory)
    assert tokenizer("a0 b3 v7")["input_ids"] == [0, 1, 8, 16]
    assert tokenizer.decode([1, 8, 16]) == "a0 b3 v7"


def test_answers_are_the_argmax_of_a_plain_forward_pass(trained):
    model, task, _, _ = trained
    tokens = np.asarray(task.sample(jax.random.key(7), 5))
    got = answers(model, tokens, task, "full", batch=2)  # the last batch is filled up
    positions = jnp.broadcast_to(jnp.arange(task.length, dtype=jnp.int32), (5, task.length))
    forward = jax.jit(lambda ids: model.logits(model(ids, positions, (None,) * 2, train_recall.attend)[0]))
    logits = forward(tokens[:, :-1])
    np.testing.assert_array_equal(got, (jnp.argmax(logits, -1) == tokens[:, 1:])[:, task.asked])
    with pytest.raises(ValueError, match=r"are \[B, 31\], got \[5, 30\]"):
        answers(model, tokens[:, 1:], task, "full")


@pytest.mark.slow
def test_packed_cache_and_simulation_give_the_same_answers(trained):
    model, task, _, _ = trained
    caches = {"kivi2": CacheConfig.kivi2(page=16, window=16)}
    by = {s: evaluate(model, task, caches, sequences=4, seed=3, scoring=s, workers=2) for s in ("simulation", "packed")}
    assert by["simulation"] == by["packed"]


def test_the_command_evaluates_a_directory(trained, tmp_path, capsys):
    command = ["--evaluate", str(trained[3]), "--json", str(tmp_path / "new" / "out.json"), "--cache", CACHE]
    assert train_recall.main([*command, "--sequences", "3"]) == 0
    report = json.loads((tmp_path / "new" / "out.json").read_text())
    assert list(report["caches"]) == ["full", CACHE]
    assert report["caches"]["full"]["answers"] == 15
    assert report["tokens"] == 30
    full = report["caches"]["full"]
    assert (full["accuracy"], full["same_as_full"]) == (full["correct"] / 15, 1)
    assert (full["in_pages"], full["pages_accuracy"]) == (0, None)
    assert 0 <= full["interval"][0] <= full["accuracy"] <= full["interval"][1] <= 1
    out = capsys.readouterr().out
    assert f"| {CACHE} | {100 * report['caches'][CACHE]['accuracy']:.2f} (" in out


@pytest.mark.parametrize(
    "change,message",
    [
        ([], "give either --out DIR, to train, or --evaluate DIR"),
        (["--evaluate", "nowhere"], "nowhere has no recall_task.json"),
        (["--out", "x", "--stages", "8", "4"], "--stages must grow"),
        (["--out", "x", "--cache", "kitten"], "unknown cache 'kitten'"),
    ],
)
def test_errors(tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    assert train_recall.main(["--json", "out.json", *change]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
