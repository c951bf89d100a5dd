"""What the evaluations that generate answers share: their options, the model, and answering items under every cache."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kitty_jax.cache.config import CacheConfig
from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.inference.engine import Engine, EngineResult, Request
from kitty_jax.inference.prompts import check_capacity
from kitty_jax.pallas_kernels.implementation import IMPLEMENTATIONS
from kitty_jax.research.tasks.protocol import Protocol
from kitty_jax.research.tasks.results import open_results

DTYPES = ("float32", "bfloat16", "float16")
_SEEDS = 1_000_003  # between the seeds of an item's repeats: more than any task has items
_HASHED = 1 << 20  # bytes at the start and the end of a file that go into a fingerprint


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to answer: its name in the results, its number for the seed, and the ids of its prompt."""

    name: str
    number: int
    ids: Sequence[int]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face model directory")
    parser.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="NAME",
        help="a cache, several times if wanted; NAME:FIELD=VALUE,... changes fields of CacheConfig. `full` always runs",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the model (default: as stored; float32 for .gguf)")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto", help="of the operations on pages")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time (default: %(default)s)")


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


def protocol_of(arguments: argparse.Namespace, default: Protocol = Protocol()) -> Protocol:  # noqa: B008 (frozen)
    """The default with what the options change."""
    names = ("temperature", "top_p", "top_k", "max_new_tokens", "repeats")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if given.get("temperature") == 0 and (filters := sorted({"top_p", "top_k"} & given.keys())):
        raise ValueError(f"temperature 0 always takes the most likely token: leave out {' and '.join(filters)}")
    protocol = dataclasses.replace(default, **given)
    if protocol.greedy and protocol.repeats > 1:
        raise ValueError(f"repeats {protocol.repeats} at temperature 0 would give equal answers: use 1")
    return protocol


def caches_of(names: Sequence[str]) -> dict[str, CacheConfig]:
    """The caches by the names given, ``full`` first; file names of their results must differ."""
    caches = {"full": CacheConfig.full()} | {name: cache_from_spec(name) for name in names}
    files = [file_name(name) for name in caches]
    if len(set(files)) < len(files):
        raise ValueError(f"two of the caches {list(caches)} would share a file; name each once, in one spelling")
    return caches


def file_name(cache: str) -> str:
    """A cache's name as that of a file."""
    return re.sub(r"[^a-z0-9.=-]", "_", cache.strip().lower().replace("_", "-"))


class Checkpoint:
    """A checkpoint whose tokenizer and config are read, and whose weights are read when they are first needed."""

    def __init__(self, arguments: argparse.Namespace):
        from kitty_jax.models.checkpoint import plan_checkpoint
        from kitty_jax.models.tokenizer import load_tokenizer, stop_token_ids

        self.path, self.dtype = arguments.model, arguments.dtype
        self.config = plan_checkpoint(self.path, dtype=self.dtype).config
        self.tokenizer = load_tokenizer(self.path)
        own = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        self.eos = sorted({*stop_token_ids(self.path), *own})
        self._model = None

    @property
    def model(self):
        """The model, loaded on first use."""
        if self._model is None:
            from kitty_jax.models.checkpoint import load_model

            say(f"loading {self.path}")
            self._model = load_model(self.path, dtype=self.dtype)
        return self._model

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
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        files += [] if self.path.is_file() else sorted(self.path.glob("*.json"))
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


def answer_items(
    arguments: argparse.Namespace,
    checkpoint: Checkpoint,
    caches: Mapping[str, CacheConfig],
    items: Sequence[Item],
    protocol: Protocol,
    settings: Mapping[str, Any],
    row_of: Callable[[Item, EngineResult], Mapping[str, Any]],
    stops: Sequence[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Answers the items under every cache, as far as the files in ``arguments.out`` do not hold the answers already.

    Args:
        arguments: with ``out``, ``batch``, ``seed``, ``implementation``.
        checkpoint: the model.
        caches: by name.
        items: what to answer, ``protocol.repeats`` times each.
        protocol: how.
        settings: what else decides an answer.
        row_of: the row of an item's completion; "item", "repeat", "text", "tokens" and "ended" are added.
        stops: texts that end an answer.

    Returns:
        By cache, the rows of the items in their order, repeat by repeat.
    """
    import jax

    work = [(item, repeat) for repeat in range(protocol.repeats) for item in items]
    new = protocol.max_new_tokens
    requests = [
        Request(item.ids, new, (arguments.seed + item.number + _SEEDS * repeat) % 2**32, stops) for item, repeat in work
    ]
    longest = max(items, key=lambda item: len(item.ids))
    if len(longest.ids) + new > checkpoint.config.max_position:
        raise ValueError(
            f"prompt {longest.name} has {len(longest.ids)} tokens, and with max_new_tokens {new} needs "
            f"{len(longest.ids) + new} positions; the model was made for {checkpoint.config.max_position}. Lower "
            "max_new_tokens"
        )
    capacity = check_capacity([len(longest.ids)], new, None)
    keys = [item.name if repeat == 0 else f"{item.name}#{repeat}" for item, repeat in work]
    settings = {**settings, **checkpoint.settings(), **protocol.settings(), "seed": arguments.seed}
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "batch": arguments.batch}
    about["implementation"] = arguments.implementation
    out = {}
    for name, cache in caches.items():
        path = arguments.out / f"{file_name(name)}.jsonl"
        with open_results(path, {**settings, "cache": dataclasses.asdict(cache)}, about) as results:
            missing = [i for i, key in enumerate(keys) if key not in results.rows]
            if len(missing) < len(keys):
                say(f"{name}: {len(keys) - len(missing)} of {len(keys)} answers are in {path}")
            if missing:
                engine = Engine(
                    checkpoint.model,
                    slots=arguments.batch,
                    capacity=capacity,
                    decode=checkpoint.decode,
                    cache=cache,
                    sampler=protocol.sampler(),
                    eos=checkpoint.eos,
                    implementation=arguments.implementation,
                )
                progress = Progress(name)
                for done, (index, got) in enumerate(engine.as_completed([requests[i] for i in missing]), 1):
                    item, repeat = work[missing[index]]
                    common = {"item": item.name, "repeat": repeat, "tokens": len(got.tokens), "ended": got.ended}
                    results.append(keys[missing[index]], {**common, **row_of(item, got), "text": got.text})
                    progress(done, len(missing))
            out[name] = [results.rows[key] for key in keys]
    return out


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


def write_json(path: Path, value: Any) -> None:
    """Writes a whole file beside ``path`` and puts it there, so that an interruption never leaves half of one."""
    text = json.dumps(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout, say, is written to and not replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
