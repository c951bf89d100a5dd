"""Parity with Hugging Face on tiny random models: every submodule, then the logits, then a greedy continuation.

Every model here comes through `load_model`, from a directory as Hugging Face writes it.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import MLP, Attention, Block, Embedding, Linear, RMSNorm, causal_attend
from kitty_jax.models.params import tensors_of
from tests.models.checkpoint_files import GOLDEN, NAMES, copy_golden, edit_config, golden_config, logits_of

TOLERANCE = 1e-4  # absolute, float32; activations here have magnitudes up to some tens
WITHOUT_WEIGHT = {(): "", ("attn",): ".self_attn", ("mlp",): ".mlp"}  # modules in a layer


@functools.cache
def load(name):
    """A golden folder -> (decoder, dict of golden arrays)."""
    return load_model(GOLDEN / name), dict(np.load(GOLDEN / name / "golden.npz"))


def hf_outputs(path, value):
    """What the module at a path returned, [B, T, ...], as outputs of the Hugging Face modules that it is made of."""
    if path[0] == "layers" and (name := WITHOUT_WEIGHT.get(path[2:])) is not None:
        return {f"model.layers.{path[1]}{name}": value}
    parts = {name: value[:, :, *index] for name, index in tensors_of(path).items()}
    return {name: part.reshape(*part.shape[:2], -1) if len(parts) > 1 else part for name, part in parts.items()}


def record(model, tokens, monkeypatch):
    """Output of every submodule under its Hugging Face name, and q, k and the attended values of every layer."""
    paths = {id(module): path for path, module in nnx.iter_modules(model) if path}
    out = {}
    for kind in (Attention, Block, Embedding, Linear, MLP, RMSNorm):

        def call(self, *args, original=kind.__call__):
            result = original(self, *args)
            out.update(hf_outputs(paths[id(self)], result[0] if isinstance(result, tuple) else result))
            return result

        monkeypatch.setattr(kind, "__call__", call)

    layers = iter(range(model.config.num_layers))

    def attend(cache, q, k, v):
        attended, cache = causal_attend(cache, q, k, v)
        prefix = f"model.layers.{next(layers)}.self_attn"
        out.update({f"{prefix}.query": q, f"{prefix}.key": k, f"{prefix}.attended": attended})
        return attended, cache

    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = model(tokens, positions, (None,) * model.config.num_layers, attend)
    out["logits"] = model.logits(hidden)
    return out


def assert_equal_structure(model, golden, monkeypatch):
    got = record(model, jnp.asarray(golden["tokens"]), monkeypatch)
    monkeypatch.undo()
    assert set(got) == set(golden) - {"tokens", "kept", "greedy", "margin"}
    worst = {}
    for name, value in got.items():
        value = np.asarray(value if name == "logits" else value[:, golden["kept"]])
        assert value.shape == golden[name].shape, name
        worst[name] = float(np.abs(value - golden[name]).max())
    assert max(worst.values()) < TOLERANCE, {name: gap for name, gap in worst.items() if gap >= TOLERANCE}


@pytest.mark.parametrize("name", NAMES)
def test_every_submodule_matches_the_golden(name, monkeypatch):
    assert_equal_structure(*load(name), monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation_equals_the_golden(name):
    model, golden = load(name)
    assert golden["margin"] > 10 * TOLERANCE  # or equality would be luck
    prompt, greedy = golden["tokens"][0].tolist(), golden["greedy"].tolist()
    # One pass for all: each token of the continuation is the best one after those before it.
    logits = logits_of(model, np.array([prompt + greedy[:-1]]))
    assert logits[0, len(prompt) - 1 :].argmax(axis=-1).tolist() == greedy


@pytest.mark.parametrize("name", ["qwen3_yarn", "llama3"])
def test_the_goldens_see_rope_scaling(name, tmp_path):
    """Without its scaling a scaled golden must miss by far more than the tolerance, or it would test nothing."""
    theta = golden_config(name)["rope_parameters"]["rope_theta"]
    edit_config(copy_golden(name, tmp_path), rope_parameters={"rope_type": "default", "rope_theta": theta})
    golden = load(name)[1]
    assert np.abs(logits_of(load_model(tmp_path), golden["tokens"]) - golden["logits"]).max() > 0.1


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_live_head_sizes(head_dim, monkeypatch, tmp_path):
    live("qwen3", monkeypatch, tmp_path, head_dim=head_dim, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.parametrize("name", NAMES)
def test_live(name, monkeypatch, tmp_path):
    live(name, monkeypatch, tmp_path)


def live(name, monkeypatch, directory, **overrides):
    """Compare with a model that is built and run by Hugging Face now, with weights that no golden has."""
    pytest.importorskip("torch", reason="the live comparison needs torch and transformers")
    from scripts import make_goldens

    reference = make_goldens.build(name, seed=1234, **overrides)
    reference.save_pretrained(directory)
    assert_equal_structure(load_model(directory), make_goldens.golden(reference), monkeypatch)
