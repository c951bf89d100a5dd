"""What the evaluations share: their options, the model, answering items under every cache, and the summary."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.spec import caches_from_spec
from kitty_jax.inference.detokenize import encode_prompts
from kitty_jax.inference.engine import Engine, Request
from kitty_jax.inference.prompts import check_capacity
from kitty_jax.models import checkpoint as checkpoints
from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids
from kitty_jax.pallas_kernels.implementation import IMPLEMENTATIONS
from kitty_jax.research.tasks.comparison import compare, summarize
from kitty_jax.research.tasks.protocol import Protocol
from kitty_jax.research.tasks.results import open_results
from scripts.command_line import CACHES, whole
from scripts.tables import markdown, percent, write_json

DTYPES = ("float32", "bfloat16", "float16")
REPEAT_SEEDS = 1_000_003  # between the seeds of an item's repeats: more than any task has items
_HASHED = 1 << 20  # bytes at the start and the end of a file that go into a fingerprint
_CHANGES = ("temperature", "top_p", "top_k", "max_new_tokens", "repeats")  # options that change the protocol

Cache = CacheConfig | tuple[CacheConfig, ...]


@dataclasses.dataclass(frozen=True)
class ItemTask:
    """A task whose problems lie in a JSON Lines file.

    Attributes:
        name: of the task in the head of its results.
        load: (file, offset, how many) -> problems.
        key: the name of a problem in the results.
        prompt: (problem, whether it goes through the chat template) -> text.
        prompt_settings: (the same) -> what stands for all prompts in the head of the results.
        row: (problem, completion, chat) -> what the results say of a completion.
        stops: texts that end an answer outside the chat template.
    """

    name: str
    load: Callable[[Path, int, int | None], list]
    key: Callable[[Any], str]
    prompt: Callable[[Any, bool], str]
    prompt_settings: Callable[[bool], str]
    row: Callable[[Any, str, bool], Mapping[str, Any]]
    stops: tuple[str, ...]


def add_checkpoint_arguments(parser: argparse.ArgumentParser, dtype: str | None = None) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face model directory")
    parser.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a cache, several times if wanted: {CACHES}. `full` always runs",
    )
    default = dtype or "as stored; float32 for .gguf"
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"of the model (default: {default})")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto", help="of the operations on pages")
    parser.add_argument("--batch", type=whole(1), default=16, help="sequences at a time (default: %(default)s)")


def add_protocol_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that change the protocol; None where they are not given."""
    group = parser.add_argument_group("generation", "the paper's protocol by default")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: 0.6)")
    group.add_argument("--top-p", type=float, metavar="X", help="default: 0.95")
    group.add_argument("--top-k", type=int, metavar="K", help="default: 20")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 4096)")
    group.add_argument("--repeats", type=int, metavar="N", help="answers to each item (default: 1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")


def add_item_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Everything of a task whose items lie in a JSON Lines file."""
    add_model_arguments(parser)
    parser.add_argument("--file", type=Path, required=True, help=f"JSON Lines, in the format of {what}")
    parser.add_argument("--items", type=int, metavar="N", help="how many problems (default: all)")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="problems to pass over (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for results by item and the summary")
    parser.add_argument(
        "--prompt",
        choices=("auto", "chat", "text"),
        default="auto",
        help="chat: an instruction in the checkpoint's chat template; text: plain text to continue; auto: chat where "
        "there is a template (default: %(default)s)",
    )
    add_protocol_arguments(parser)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options of :func:`add_protocol_arguments` change."""
    return {name: getattr(arguments, name) for name in _CHANGES if getattr(arguments, name) is not None}


def protocol_of(arguments: argparse.Namespace, default: Protocol = Protocol()) -> Protocol:  # noqa: B008 (frozen)
    """The default with what the options change."""
    given = changes_of(arguments)
    if given.get("temperature") == 0 and (filters := sorted({"top_p", "top_k"} & given.keys())):
        raise ValueError(f"temperature 0 always takes the most likely token: leave out {' and '.join(filters)}")
    protocol = dataclasses.replace(default, **given)
    if protocol.greedy and protocol.repeats > 1:
        raise ValueError(f"repeats {protocol.repeats} at temperature 0 would give equal answers: use 1")
    return protocol


def caches_of(names: Sequence[str]) -> dict[str, Cache]:
    """The caches by the names given, ``full`` first; file names of their results must differ."""
    caches = {"full": CacheConfig.full()} | {name: caches_from_spec(name) for name in names}
    files = [file_name(name) for name in caches]
    if len(set(files)) < len(files):
        raise ValueError(f"two of the caches {list(caches)} would share a file; name each once, in one spelling")
    return caches


def file_name(cache: str) -> str:
    """A cache's name as that of a file."""
    return re.sub(r"[^a-z0-9.=-]", "_", cache.strip().lower().replace("_", "-"))


def cache_settings(cache: Cache) -> dict | list[dict]:
    """A cache's fields, for the head of a results file; those of each layer where there is a config per layer."""
    if isinstance(cache, CacheConfig):
        return dataclasses.asdict(cache)
    return [dataclasses.asdict(layer) for layer in cache]


class Checkpoint:
    """A checkpoint whose tokenizer and config are read, and whose weights are read when they are first needed."""

    def __init__(self, arguments: argparse.Namespace):
        self.path, self.dtype = arguments.model, arguments.dtype
        self.config = checkpoints.plan_checkpoint(self.path, dtype=self.dtype).config
        self.tokenizer = load_tokenizer(self.path)
        own = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        self.eos = sorted({*stop_token_ids(self.path), *own})

    @functools.cached_property
    def model(self):
        """The model, loaded on first use."""
        say(f"loading {self.path}")
        return checkpoints.load_model(self.path, dtype=self.dtype)

    def encode(self, text: str) -> list[int]:
        """Text to ids, no special token added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def wants_chat(self, prompt: str) -> bool:
        """Whether prompts go through the chat template, for the option --prompt."""
        if prompt == "chat" and not self.tokenizer.chat_template:
            raise ValueError(f"{self.path} has no chat template; use --prompt text")
        return prompt != "text" and bool(self.tokenizer.chat_template)

    def settings(self) -> dict[str, Any]:
        """What decides the model's answers, for the head of a results file."""
        files = [self.path]
        if not self.path.is_file():
            files = [*sorted(self.path.glob("*.safetensors")), *sorted(self.path.glob("*.json"))]
        return {
            "model": digest(*map(_ends, files)),
            "dtype": self.dtype or "as stored",
            "chat_template": digest((self.tokenizer.chat_template or "").encode()),
        }


def _ends(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(_HASHED)
        stream.seek(max(size - _HASHED, 0))
        return f"{size}:".encode() + start + stream.read()


def digest(*parts: bytes) -> str:
    """Sixteen hexadecimal digits for some bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def answer_items(arguments: argparse.Namespace, task: ItemTask) -> dict[str, list[dict[str, Any]]]:
    """Answers a task under every cache, as far as the files in ``arguments.out`` do not hold the answers already.

    Args:
        arguments: of :func:`add_item_arguments`.
        task: what to answer, as often as the protocol repeats it.

    Returns:
        By cache, the rows of the problems in their order, repeat by repeat: the task's own fields with "item",
        "repeat", "text", "tokens" and "ended".
    """
    caches, protocol = caches_of(arguments.cache), protocol_of(arguments)  # refused before anything is read
    problems = task.load(arguments.file, arguments.offset, arguments.items)
    checkpoint = Checkpoint(arguments)
    chat = checkpoint.wants_chat(arguments.prompt)
    prompts = encode_prompts(checkpoint.tokenizer, [task.prompt(p, chat) for p in problems], chat=chat)
    sizes = [len(ids) for ids in prompts]
    new, longest = protocol.max_new_tokens, max(sizes)
    if longest + new > checkpoint.config.max_position:
        raise ValueError(
            f"prompt {task.key(problems[sizes.index(longest)])} has {longest} tokens, and with max_new_tokens {new} "
            f"needs {longest + new} positions; the model was made for {checkpoint.config.max_position}. Lower "
            "max_new_tokens"
        )
    work = {}  # by the key of a row: the problem, the repeat, the request
    for repeat in range(protocol.repeats):
        for number, (problem, ids) in enumerate(zip(problems, prompts, strict=True), arguments.offset):
            seed = (arguments.seed + number + REPEAT_SEEDS * repeat) % 2**32
            request = Request(ids, new, seed, () if chat else task.stops)
            work[task.key(problem) + (f"#{repeat}" if repeat else "")] = problem, repeat, request
    settings = {"task": task.name, "data": digest(arguments.file.read_bytes()), "prompt": task.prompt_settings(chat)}
    settings |= {**checkpoint.settings(), **protocol.settings(), "seed": arguments.seed}
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "batch": arguments.batch}
    about["implementation"] = arguments.implementation
    out = {}
    for name, cache in caches.items():
        path = arguments.out / f"{file_name(name)}.jsonl"
        with open_results(path, {**settings, "cache": cache_settings(cache)}, about) as results:
            missing = [key for key in work if key not in results.rows]
            if len(missing) < len(work):
                say(f"{name}: {len(work) - len(missing)} of {len(work)} answers are in {path}")
            if missing:
                engine = Engine(
                    checkpoint.model,
                    slots=arguments.batch,
                    capacity=check_capacity([longest], new, None),
                    decode=checkpoint.decode,
                    cache=cache,
                    sampler=protocol.sampler(),
                    eos=checkpoint.eos,
                    implementation=arguments.implementation,
                )
                progress = Progress(name)
                for done, (index, got) in enumerate(engine.as_completed([work[key][2] for key in missing]), 1):
                    problem, repeat, _ = work[missing[index]]
                    row = {"item": task.key(problem), "repeat": repeat, "tokens": len(got.tokens), "ended": got.ended}
                    results.append(missing[index], {**row, **task.row(problem, got.text, chat), "text": got.text})
                    progress(done, len(missing))
            out[name] = [results.rows[key] for key in work]
    return out


def write_summary(out: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Figures by cache from their rows, into ``summary.json`` and as a table."""
    summary, lines = {}, []
    for name, answers in rows.items():
        result = summary[name] = summarize(answers)
        if "answer" in answers[0]:
            result["no_answer"] = sum(row["answer"] is None for row in answers)
        difference = wrong = same = ""
        if name != "full":
            pair = result["against_full"] = compare(rows["full"], answers)
            difference = f"{100 * pair['difference']:+.1f} ({percent(pair['difference_interval'])})"
            wrong = f"{pair['only_cache']} / {pair['only_full']}"
            same = f"{100 * pair['same_answer']:.1f}" if "same_answer" in pair else ""
        accuracy = f"{100 * result['accuracy']:.1f} ({percent(result['interval'])})"
        shown = [name, result["items"], accuracy, difference, wrong, same, result["cut_off"]]
        lines.append([*shown, f"{result['mean_tokens']:.0f}"])
    write_json(out / "summary.json", summary)
    header = ["cache", "items", "accuracy % (95 % interval)", "against full, points (95 % interval)"]
    print(markdown([*header, "right / wrong only here", "same answer %", "cut off", "tokens"], lines))


class Progress:
    """Says how far a cache's run is, at most every ten seconds, and at its end."""

    def __init__(self, name: str):
        self._name, self._begin, self._last = name, time.perf_counter(), 0.0

    def __call__(self, done: int, count: int) -> None:
        now = time.perf_counter()
        if done == count or now - self._last > 10:
            self._last = now
            say(f"{self._name}: {done} of {count} answered, {now - self._begin:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
