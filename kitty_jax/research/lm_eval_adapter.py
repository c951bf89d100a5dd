"""A model of this project with one of its caches, for EleutherAI's lm-evaluation-harness (``lm_eval`` 0.4.13).

    from kitty_jax.research.lm_eval_adapter import KittyLM
    results = lm_eval.simple_evaluate(KittyLM(model, tokenizer, cache="kitty_pro"), tasks=["gsm8k_cot_llama"])

Not imported by ``kitty_jax`` itself: ``pip install "kitty-jax[eval]"`` brings lm_eval.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kitty_jax.cache.config import layer_configs
from kitty_jax.cache.steps import functional
from kitty_jax.inference.engine import Engine, Request
from kitty_jax.inference.prompts import bucket, check_capacity, check_whole
from kitty_jax.inference.sampling import Greedy, Sampler, Sampling
from kitty_jax.pallas_kernels.implementation import Implementation
from kitty_jax.research.scoring import Cache, check_scoring, score
from kitty_jax.research.tasks.results import ResultFile

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f'kitty_jax.research.lm_eval_adapter needs lm_eval 0.4.13 (pip install "kitty-jax[eval]"): {error}'
    ) from error

_log = logging.getLogger(__name__)
_MAX_GEN_TOKS = 256  # where a task does not say, as the harness's own models
_KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p")


class KittyLM(TemplateLM):
    """The harness's language model.

    Log-likelihoods are teacher-forced over the cache (:mod:`.scoring`). Generation goes through the
    packed cache, in one :class:`.Engine` for all requests with the same generation settings.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: Cache = "kitty_pro",
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        eos: Sequence[int] | None = None,
        seed: int = 0,
        scoring: str = "simulation",
        implementation: Implementation = "auto",
        answers: ResultFile | None = None,
    ):
        """Args:
        model: a model of ``kitty_jax.models``.
        tokenizer: its Hugging Face tokenizer.
        cache: config, name, or one config per layer.
        batch_size: sequences at a time.
        max_length: most tokens of context and answer; by default the positions that the model was made for. Contexts
            that leave no room are cut at their start, as the harness's own models do, with a warning.
        eos: ids that end an answer; by default the tokenizer's.
        seed: request i of those with equal settings samples with seed + i.
        scoring: "simulation" or "packed".
        implementation: of the operations on pages.
        answers: where generated texts go as they finish, and are taken from in a run that is taken up again.
        """
        super().__init__()
        check_whole("batch_size", batch_size, 1)
        check_scoring(scoring)
        layer_configs(cache, model.config.num_layers)
        own = tokenizer.eos_token_id
        self.eos = sorted(set(([] if own is None else [own]) if eos is None else eos))
        if own is None and not self.eos:
            raise ValueError("the tokenizer has no end-of-sequence token; give eos=[...]")
        self.model, self.tokenizer, self.cache = functional(model), tokenizer, cache
        self.batch_size, self.seed = batch_size, seed
        self.max_length = model.config.max_position if max_length is None else max_length
        check_whole("max_length", self.max_length, 2)
        self.scoring, self.implementation, self.answers = scoring, implementation, answers

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        own = self.tokenizer.eos_token_id
        return self.eos[0] if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the beginning-of-sequence token, or the end-of-text token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests: what decides how a chat is written."""
        template = hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:16]
        return f"{str(self.tokenizer.name_or_path).replace('/', '__')}-{template}"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without ``add_generation_prompt`` its last message is left open."""
        if not self.tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template; run the task without one")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Ids of a text; by default with the tokenizer's own beginning, unless the text holds it already."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def tok_decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding gives it) of (texts, context ids, ids)."""
        rows = []
        for _, context, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation must have 1 to {self.max_length} tokens (max_length), got {len(continuation)}"
                )
            rows.append(([*context, *continuation][-(self.max_length + 1) :], len(continuation)))
        self._warn_cut(sum(len(c) + len(x) > self.max_length + 1 for _, c, x in requests), "loglikelihood")
        out: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            tokens = np.zeros((self.batch_size, bucket(len(rows[indices[0]][0]))), np.int32)
            for b, i in enumerate(indices):
                tokens[b, : len(rows[i][0])] = rows[i][0]
            log_probs, greedy = score(self.model, tokens, self.cache, scoring=self.scoring)
            for b, i in enumerate(indices):
                ids, size = rows[i]
                part = slice(len(ids) - 1 - size, len(ids) - 1)
                out[i] = float(log_probs[b, part].sum(dtype=np.float64)), bool(greedy[b, part].all())
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], out[i])
        return out

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of ``max_length`` where they are longer."""
        windows, owner = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owner.append(number)
        out = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            out[number] += log_prob
        for request, log_prob in zip(requests, out, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_prob)
        return out

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """New text of each request up to the first text of ``until``, the end-of-sequence token or ``max_gen_toks``.

        Generation settings: ``until``, ``max_gen_toks``, ``do_sample``, ``temperature``, ``top_p``, ``top_k``,
        ``min_p``; others are refused. Without ``do_sample``, or at temperature 0, the most likely token is taken.
        """
        out: list[str | None] = [None] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        seen: Counter[str] = Counter()
        for settings, indices in groups.items():
            stops, most, sampler = self._settings(json.loads(settings))
            contexts = self._contexts([requests[i].args[0] for i in indices], most)
            done, missing = self.answers.rows if self.answers is not None else {}, []
            for j, (i, ids) in enumerate(zip(indices, contexts, strict=True)):
                # By its text, and a count where a task repeats a request: what other tasks ran decides nothing.
                key = hashlib.sha256(f"{settings}\n{requests[i].args[0]}".encode()).hexdigest()[:24]
                seen[key] += 1
                key = f"{key}-{seen[key]}"
                if key in done:
                    out[i] = done[key]["text"]
                else:
                    missing.append((i, key, Request(ids, most, (self.seed + j) % 2**32, stops)))
            if not missing:
                continue
            engine = Engine(
                self.model,
                slots=self.batch_size,
                capacity=check_capacity(list(map(len, contexts)), most, None),
                decode=self.tok_decode,
                cache=self.cache,
                sampler=sampler,
                eos=self.eos,
                implementation=self.implementation,
            )
            for index, got in engine.as_completed([request for _, _, request in missing]):
                i, key, _ = missing[index]
                out[i] = got.text
                if self.answers is not None:
                    self.answers.append(key, {"text": got.text, "tokens": len(got.tokens), "ended": got.ended})
                self.cache_hook.add_partial("generate_until", requests[i].args, got.text)
        return out

    def _contexts(self, texts: Sequence[str], most: int) -> list[list[int]]:
        room = self.max_length - most
        if room < 1:
            raise ValueError(f"max_gen_toks {most} leaves no room for a prompt in max_length {self.max_length}")
        rows = [self.tok_encode(text) or [self.prefix_token_id] for text in texts]
        self._warn_cut(sum(len(ids) > room for ids in rows), "generate_until")
        return [ids[-room:] for ids in rows]

    def _warn_cut(self, count: int, what: str) -> None:
        if count:
            _log.warning(
                "%s: %d contexts were longer than max_length %d and lost their start", what, count, self.max_length
            )

    def _settings(self, given: Mapping[str, Any]) -> tuple[tuple[str, ...], int, Sampler]:
        """(stop texts, most new tokens, sampler) of a task's generation settings."""
        unknown = sorted(set(given) - set(_KNOWN))
        if unknown:
            raise ValueError(f"unknown generation settings {unknown}; known ones: {', '.join(_KNOWN)}")
        until = given.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        most = int(given.get("max_gen_toks", _MAX_GEN_TOKS))
        temperature = given.get("temperature")
        if not given.get("do_sample", bool(temperature)) or temperature == 0:
            return until, most, Greedy()
        filters = {name: given[name] for name in ("top_p", "min_p") if given.get(name) is not None}
        if given.get("top_k"):
            filters["top_k"] = int(given["top_k"])
        return until, most, Sampling(1.0 if temperature is None else float(temperature), **filters)
