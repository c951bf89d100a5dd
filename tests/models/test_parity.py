"""Parity with Hugging Face on tiny random models: every submodule, then the logits, then a greedy continuation."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kitty_jax.models.decoder import MLP, Attention, Block, Embedding, Linear, RMSNorm, causal_attend
from kitty_jax.models.names import hf_name_of, hf_names
from kitty_jax.models.registry import config_from_hf, model_from_params

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("llama", "llama3", "qwen2", "qwen3", "qwen3_yarn")
TOLERANCE = 1e-4  # absolute, float32; activations here have magnitudes up to some tens


def build(config, tensors):
    """Hugging Face config dict and tensors by Hugging Face name -> decoder in float32."""
    config = config_from_hf(config, dtype=jnp.float32)
    targets = hf_names(config)
    assert set(targets) == set(tensors)
    return model_from_params(config, {targets[name].path: jnp.asarray(value) for name, value in tensors.items()})


@functools.cache
def load(name):
    """A golden folder -> (decoder, dict of golden arrays)."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return build(config, load_file(GOLDEN / name / "model.safetensors")), dict(np.load(GOLDEN / name / "golden.npz"))


def run(model, tokens):
    """tokens [B, T] -> logits [B, T, V], without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * model.config.num_layers, causal_attend)
    return model.logits(hidden)


def record(model, tokens, monkeypatch):
    """Output of every submodule under its Hugging Face name, and q, k and the attended values of every layer."""
    paths = {id(module): path for path, module in nnx.iter_modules(model) if path}
    out = {}
    for kind in (Attention, Block, Embedding, Linear, MLP, RMSNorm):

        def call(self, *args, original=kind.__call__):
            result = original(self, *args)
            # A module's Hugging Face name is its weight's without the last part. Attention, MLP and block have no
            # weight of their own: take one inside and drop more.
            inner = {Attention: ("q", "weight"), MLP: ("up", "weight"), Block: ("input_norm", "weight")}
            path = (*paths[id(self)], *inner.get(type(self), ("weight",)))
            drop = len(path) - len(paths[id(self)])
            out[hf_name_of(path).rsplit(".", drop)[0]] = result[0] if isinstance(result, tuple) else result
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


def greedy(model, tokens, steps):
    """Continue tokens [1, T] by recomputing the whole sequence at every step -> list of steps tokens."""
    graphdef, state = nnx.split(model)
    length = tokens.shape[1]
    # Causal attention: what stands after a position cannot reach it, so one padded shape serves every step.
    sequence = np.zeros((1, length + steps), np.int32)
    sequence[:, :length] = tokens
    step = jax.jit(lambda state, tokens: jnp.argmax(run(nnx.merge(graphdef, state), tokens), axis=-1))
    for i in range(steps):
        sequence[0, length + i] = step(state, jnp.asarray(sequence))[0, length + i - 1]
    return sequence[0, length:].tolist()


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
    assert greedy(model, golden["tokens"], len(golden["greedy"])) == golden["greedy"].tolist()


@pytest.mark.parametrize("name", ["qwen3_yarn", "llama3"])
def test_the_goldens_see_rope_scaling(name):
    """Without its scaling a scaled golden must miss by far more than the tolerance, or it would test nothing."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    model = build(config, load_file(GOLDEN / name / "model.safetensors"))
    golden = load(name)[1]
    assert np.abs(run(model, jnp.asarray(golden["tokens"])) - golden["logits"]).max() > 0.1


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_live_head_sizes(head_dim, monkeypatch):
    pytest.importorskip("torch", reason="the live comparison needs torch and transformers")
    from scripts import make_goldens

    live(make_goldens, "qwen3", monkeypatch, head_dim=head_dim, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.parametrize("name", NAMES)
def test_live(name, monkeypatch):
    pytest.importorskip("torch", reason="the live comparison needs torch and transformers")
    from scripts import make_goldens

    live(make_goldens, name, monkeypatch)


def live(make_goldens, name, monkeypatch, **overrides):
    """Compare with a model that is built and run by Hugging Face now, with weights that no golden has."""
    reference = make_goldens.build(name, seed=1234, **overrides)
    model = build(
        reference.config.to_dict(), {key: value.detach().numpy() for key, value in reference.named_parameters()}
    )
    assert_equal_structure(model, make_goldens.golden(reference), monkeypatch)
