"""Train a small Qwen3-architecture model on a synthetic recall task, and hold the caches against it by exact match.

    python scripts/train_recall.py --out recall-model --json recall.json
    python scripts/train_recall.py --evaluate recall-model --json recall.json --cache kitty --cache kitty-pro

The task is `kitty_jax/research/tasks/lookup.py`: hundreds of key-value pairs, then every key again. The recipe: Adam on
the answers alone, float32 parameters, the forward pass in bfloat16 on a GPU; stages of growing length, each left as
soon as a round of steps is solved; then a decay of the learning rate to 0 at the last length. First weights: the
embeddings share a common part, through which the first layer's heads begin by looking one and two tokens back; the key
norms' weights begin unequal, so that key channels differ in magnitude as a real model's do. All random numbers come
from --seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kitty_jax.cache.config import CACHE_NAMES
from kitty_jax.cache.dense_attention import causal_attention, masked_attention
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.cache.steps import FunctionalModel, functional
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.hf_config import config_to_hf
from kitty_jax.models.params import hf_tensors
from kitty_jax.models.registry import config_from_name, random_model
from kitty_jax.models.rope import RopeConfig
from kitty_jax.models.safetensors_dir import CONFIG, WEIGHTS, write_safetensors
from kitty_jax.models.tokenizer import import_transformers
from kitty_jax.research.scoring import SCORINGS
from kitty_jax.research.tasks.lookup import Lookup, evaluate
from scripts.command_line import Parser, run_command, whole
from scripts.tables import markdown, percent, write_json
from scripts.task_runs import say

SHORT = 256  # tokens up to which plain attention is as fast as cuDNN's, which has limits on lengths of its own
ROUND = 50  # steps between two looks at the accuracy; one program
# For a learning rate of 1: `train_round` multiplies by its own.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98))
TASK = "recall_task.json"  # beside the weights: what the model was trained on
LOOK_BACK = 5.0  # of the first layer's queries and keys, the constant component's size against the random one's
LOOK_BACK_SCALE = 2.5  # and the first weights of its query norm


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, but the hardware.

    Attributes:
        task: at the last length.
        stages: pairs of a sequence, growing; the last is the task's.
        tokens: of a batch. most_rows: of a batch, whatever the tokens.
        steps: most steps of a stage. decay: steps at the last length in which the rate goes to 0.
        solved: accuracy of a round that ends a stage.
        rate: learning rate, after ``warmup`` steps.
        key_spread: standard deviation of the logarithm of the key norms' first weights.
        common: length of the embeddings' common part, against their own of 1.
        seed: of weights and data.
    """

    task: Lookup
    stages: tuple[int, ...]
    tokens: int = 65_536
    most_rows: int = 256
    steps: int = 6_000
    decay: int = 500
    solved: float = 0.9
    rate: float = 2e-3
    warmup: int = 200
    key_spread: float = 0.6
    common: float = 1.0
    seed: int = 0

    def batch(self, pairs: int) -> int:
        """Sequences of a batch at a length."""
        return max(1, min(self.most_rows, self.tokens // (6 * pairs)))


RECIPE_OPTIONS = {f.name: f.default for f in dataclasses.fields(Recipe) if f.name not in ("task", "stages")}


def initial_model(config: DecoderConfig, seed: int, *, key_spread: float, common: float):
    """Random weights with a bias towards the task, which saves most of the training (see `look_back`).

    Residual branches are small, embeddings have a common part of length ``common`` (their own is 1), and the key norms'
    weights are unequal: ``key_spread`` is the standard deviation of their logarithm.
    """
    model = random_model(config, seed)
    key = jax.random.key(seed + 1)
    shared = jax.random.normal(jax.random.fold_in(key, 0), (config.embed_dim,), jnp.float32)
    model.embed.weight[...] += common * config.embed_dim**-0.5 * shared
    look_back(model.layers[0].attn, config, shared)
    for i, block in enumerate(model.layers):
        block.attn.o.weight[...] *= (2 * config.num_layers) ** -0.5
        block.mlp.down.weight[...] *= (2 * config.num_layers) ** -0.5
        spread = jax.random.normal(jax.random.fold_in(key, 1 + i), (config.head_dim,), jnp.float32)
        weight = jnp.exp(key_spread * spread)
        # Their mean square is 1, so that logits begin as large as with equal weights.
        block.attn.k_norm.weight[...] = weight * jax.lax.rsqrt(jnp.mean(jnp.square(weight)))
        block.attn.q_norm.weight[...] = jnp.full_like(weight, LOOK_BACK_SCALE if i == 0 else 1.0)
    return model


def look_back(attention, config: DecoderConfig, shared: jax.Array) -> None:
    """Heads of the first layer that attend one token back, two, one, two, ... before anything is learned.

    The embeddings' common part makes a constant component of queries and keys; that of the queries is the keys', turned
    back by the rotary embedding of one or two tokens.
    """
    half = config.head_dim // 2
    frequency = np.asarray(config.rope.theta, np.float32) ** (-np.arange(half, dtype=np.float32) / half)
    used = (frequency > 0.1).astype(np.float32)  # slower ones cannot tell neighbours apart
    size = LOOK_BACK * np.sqrt(half / used.sum())
    towards = np.asarray(shared / jnp.linalg.norm(shared)) / np.sqrt(config.embed_dim)

    def turned(back: int) -> np.ndarray:
        return np.concatenate([used * np.cos(back * frequency), -used * np.sin(back * frequency)]) * size

    group = config.num_heads // config.num_kv_heads
    added = np.zeros(attention.qkv.weight.shape, np.float32)  # [K, Q + 2, D, E]
    for head in range(config.num_heads):
        added[head // group, head % group] = turned(1 + head % 2)[:, None] * towards
    added[:, -2] = turned(0)[:, None] * towards
    attention.qkv.weight[...] += added


def attend(cache, q, k, v):
    """Causal attention of a whole text; nothing is cached."""
    if q.shape[1] <= SHORT:
        return masked_attention(q, k, v, jnp.zeros(q.shape[0], jnp.int32)), cache
    return causal_attention(q, k, v), cache


def answer_loss(model: FunctionalModel, tokens: jax.Array, task: Lookup) -> tuple[jax.Array, jax.Array]:
    """(mean cross-entropy, accuracy) over the answers of tokens int32 [B, length + 1]."""
    decoder = model.merge()
    given = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(given.shape[1], dtype=jnp.int32), given.shape)
    hidden, _ = decoder(given, positions, (None,) * model.config.num_layers, attend)
    logits, wanted = decoder.logits(hidden[:, task.asked]), tokens[:, 1:][:, task.asked]
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, wanted))
    return loss, jnp.mean((jnp.argmax(logits, -1) == wanted).astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("template", "task", "batch"), donate_argnames=("params", "state"))
def train_round(params, state, key, rates, *, template: FunctionalModel, task: Lookup, batch: int):
    """As many steps as there are rates, one after another -> ((params, state), (losses, accuracies)).

    params: float32; the forward pass runs in the template's dtype.
    """

    def loss(params, tokens):
        cast = jax.tree.map(lambda x: x.astype(template.config.dtype), params)
        return answer_loss(dataclasses.replace(template, params=cast), tokens, task)

    def step(carry, x):
        params, state = carry
        key, rate = x
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(params, task.sample(key, batch))
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of the step's number
            updates, state = OPTIMIZER.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (params, state), (value, accuracy)

    keys = jax.random.split(key, rates.shape[0])
    return jax.lax.scan(step, (params, state), (keys, rates))


def train(config: DecoderConfig, recipe: Recipe, *, seconds: float = float("inf"), say=print):
    """Trains stage by stage.

    Args:
        config: of the model; the forward pass runs in its dtype.
        recipe: everything else.
        seconds: after so long the decay begins, at whatever length has been reached.
        say: called with a line after every tenth round.

    Returns:
        (the model in ``config.dtype``, the task at the length reached, history: for every round the pairs, steps so
        far, loss, accuracy, seconds).
    """
    begin = time.perf_counter()
    wide = dataclasses.replace(config, dtype=jnp.float32)
    model = functional(initial_model(wide, recipe.seed, key_spread=recipe.key_spread, common=recipe.common))
    params, state = model.params, OPTIMIZER.init(model.params)
    template = dataclasses.replace(functional(random_model(config, recipe.seed)), params=None)
    key, history, done = jax.random.key(recipe.seed + 2), [], 0

    def run_round(pairs: int, rates: np.ndarray) -> float:
        nonlocal params, state, done
        task = dataclasses.replace(recipe.task, pairs=pairs)
        inputs = params, state, jax.random.fold_in(key, done), jnp.asarray(rates, jnp.float32)
        got = train_round(*inputs, template=template, task=task, batch=recipe.batch(pairs))
        (params, state), (losses, accuracies) = got
        done += len(rates)
        row = {"pairs": pairs, "step": done, "loss": float(losses.mean()), "accuracy": float(accuracies.mean())}
        history.append(row | {"seconds": time.perf_counter() - begin})
        if len(history) % 10 == 0:
            say(", ".join(f"{k} {v:.4g}" for k, v in history[-1].items()))
        return row["accuracy"]

    for pairs in recipe.stages:
        for _ in range(recipe.steps // ROUND):
            rates = recipe.rate * np.minimum((done + 1 + np.arange(ROUND)) / recipe.warmup, 1)
            if run_round(pairs, rates) >= recipe.solved or time.perf_counter() - begin > seconds:
                break
        if time.perf_counter() - begin > seconds:
            break
    count = recipe.decay // ROUND * ROUND
    for rates in (recipe.rate * (1 - np.arange(count) / max(count, 1))).reshape(-1, ROUND):
        run_round(pairs, rates)
    trained = dataclasses.replace(template, params=jax.tree.map(lambda x: x.astype(config.dtype), params)).merge()
    return trained, dataclasses.replace(recipe.task, pairs=pairs), history


def save(model, task: Lookup, directory: Path, about: dict) -> None:
    """A Hugging Face directory with weights, config and a tokenizer of whole words, and beside them the task with
    what is told ``about`` the training."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(task, directory)
    write_safetensors(directory / WEIGHTS, hf_tensors(model))
    write_json(directory / TASK, {"task": dataclasses.asdict(task), **about})
    write_json(directory / CONFIG, {**config_to_hf(model.config), "bos_token_id": 0})


def write_tokenizer(task: Lookup, directory: Path) -> None:
    """Words apart by spaces; <bos> in front of every text."""
    import_transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = task.words()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{words[0]} $A", special_tokens=[(words[0], 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=words[0]).save_pretrained(directory)


def load_task(directory: Path) -> Lookup:
    """The task that a model was trained on.

    Raises:
        ValueError: the directory was not written by this script.
    """
    if not (directory / TASK).is_file():
        raise ValueError(f"{directory} has no {TASK}; wanted a directory that this script wrote with --out")
    return Lookup(**json.loads((directory / TASK).read_text())["task"])


def parser() -> Parser:
    out = Parser("train_recall.py", __doc__)
    out.add_argument("--out", type=Path, help="train, and write the checkpoint directory here")
    out.add_argument("--evaluate", type=Path, metavar="DIR", help="a directory that --out wrote: no training")
    out.add_argument("--json", type=Path, required=True, help="where the results go")
    group = out.add_argument_group("evaluation")
    group.add_argument("--cache", action="append", default=[], metavar="NAME", help="default: every named cache")
    group.add_argument("--scoring", choices=SCORINGS, default="simulation")
    group.add_argument("--sequences", type=whole(1), default=64, help="each asks for all its pairs (default: 64)")
    group.add_argument("--batch", type=whole(1), default=16, help="sequences at a time (default: %(default)s)")
    group.add_argument("--workers", type=whole(1), default=1, help="caches at a time (default: %(default)s)")
    group.add_argument("--evaluation-seed", type=int, default=1234, help="of the sequences (default: %(default)s)")
    group = out.add_argument_group("model and recipe")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    stages = [2, 4, 8, 32, 128, 320]
    group.add_argument("--stages", type=int, nargs="+", default=stages, metavar="P", help="pairs, growing")
    group.add_argument("--seconds", type=float, default=float("inf"), help="after so long the decay begins")
    defaults = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 128, "embed": 256, "mlp": 512}
    defaults |= {"firsts": 64, "lasts": 64, "values": 1024}
    for name, default in (defaults | RECIPE_OPTIONS).items():
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=type(default), default=default, help="default: %(default)s")
    return out


def recipe_of(options: argparse.Namespace) -> tuple[DecoderConfig, Recipe]:
    """The model's configuration and the recipe that the options ask for."""
    if options.stages != sorted(set(options.stages)):
        raise ValueError(f"--stages must grow, got {options.stages}")
    task = Lookup(options.stages[-1], options.firsts, options.lasts, options.values)
    recipe = Recipe(task, tuple(options.stages), **{name: getattr(options, name) for name in RECIPE_OPTIONS})
    config = dataclasses.replace(
        config_from_name("qwen3-0.6b"),
        vocab_size=task.vocab_size,
        embed_dim=options.embed,
        mlp_dim=options.mlp,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position=2 * task.length,
        rope=RopeConfig(theta=1e4),
        dtype=options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32"),
    )
    return config, recipe


def run(options: argparse.Namespace) -> None:
    if (options.out is None) == (options.evaluate is None):
        raise ValueError("give either --out DIR, to train, or --evaluate DIR")
    caches = {name: cache_from_spec(name) for name in options.cache or CACHE_NAMES if name != "full"}
    directory = options.evaluate or options.out
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if options.out:
        config, recipe = recipe_of(options)
        model, task, history = train(config, recipe, seconds=options.seconds, say=say)
        save(model, task, directory, {"recipe": dataclasses.asdict(recipe), "history": history})
        say(f"{task.pairs} pairs, {task.length} tokens: in {directory}")
        report |= {"recipe": dataclasses.asdict(recipe), "history": history}
    task, model = load_task(directory), load_model(directory)
    begin = time.perf_counter()
    results = evaluate(
        model,
        task,
        caches,
        sequences=options.sequences,
        seed=options.evaluation_seed,
        scoring=options.scoring,
        batch=options.batch,
        workers=options.workers,
    )
    report |= {"task": dataclasses.asdict(task), "tokens": task.length, "scoring": options.scoring, "caches": results}
    report["evaluation_seconds"] = time.perf_counter() - begin
    write_json(options.json, report)
    rows = []
    for name, row in results.items():
        inside = "" if row["pages_accuracy"] is None else f"{100 * row['pages_accuracy']:.2f}"
        accuracy = f"{100 * row['accuracy']:.2f} ({percent(row['interval'], 2)})"
        rows.append([name, accuracy, inside, f"{100 * row['same_as_full']:.2f}"])
    print(markdown(["cache", "exact match % (95 % interval)", "of pairs in pages %", "same as full %"], rows))


def main(argv: list[str] | None = None) -> int:
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
