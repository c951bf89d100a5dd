"""The Hugging Face side of bench_generate.py: transformers with torch, one cache in a process of its own. Prints rows;
see bench_generate_table.py. Needs neither JAX nor this project's packages.

The model is made from its config with random bfloat16 weights on the GPU, attends by ``sdpa``, and takes greedy tokens
one at a time as ``generate`` does, without its bookkeeping. Caches of a given length are filled with random numbers.
"""

from __future__ import annotations

import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import transformers

TRIES = 24  # of smaller and smaller batches
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def measure(asked: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """All phases of a request, as rows."""
    name = torch.cuda.get_device_name() if GPU else "cpu"
    yield {"kind": "start", "device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    runner = None
    for phase in asked.phases:
        layers = (asked.equal_layers if phase == "equal" else None) or asked.config["num_hidden_layers"]
        if runner is None or runner.layers != layers:
            runner = None
            _forget()
            runner = Runner(asked, layers)
        for row in (_generation if phase == "generate" else _equal_batch)(asked, runner):
            yield {"phase": phase, "layers": layers, **row}
        runner.drop()


def _generation(asked: SimpleNamespace, runner: Runner) -> Iterator[dict[str, Any]]:
    """The whole generation at the largest batch that the budget holds, found by trying."""
    if GPU:  # torch then refuses what the budget does not hold
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(asked.budget / total, 1.0))
    batch = runner.largest_guess(asked.budget) if asked.asked == "max" else int(asked.asked)
    first, *others = asked.sample_lengths
    for _ in range(TRIES):
        try:
            rows = [] if asked.no_prefill else [runner.prefill(batch, min(asked.repeats, 3))]
            rows.insert(0, runner.sample(batch, first))
            break
        except torch.OutOfMemoryError:
            if asked.asked != "max" or batch == 1:
                raise
        runner.drop()  # outside the except clause, whose traceback holds tensors
        batch = batch * 15 // 16
    else:
        raise RuntimeError(f"no batch fitted in {TRIES} tries, the last of {batch} sequences")
    sequence = runner.token_bytes * asked.capacity
    sizes = {"weights_bytes": runner.weights, "cache_bytes": batch * sequence, "sequence_bytes": sequence}
    yield {"kind": "plan", "batch": batch, "budget_bytes": asked.budget, **sizes}
    if GPU:
        peak = torch.cuda.max_memory_allocated()
        yield {"kind": "memory", "peak_bytes": peak, "beyond_bytes": peak - runner.weights - sizes["cache_bytes"]}
    yield from rows
    for length in others:
        yield runner.sample(batch, length)


def _equal_batch(asked: SimpleNamespace, runner: Runner) -> Iterator[dict[str, Any]]:
    """Steps at a batch that all methods share; the whole device may be used."""
    if GPU:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for length in sorted(asked.lengths):
        runner.capacity = length + runner.margin
        row = {"kind": "skipped", "length": length, "why": "out of memory"}
        try:
            row = runner.sample(asked.equal_batch, length)
        except torch.OutOfMemoryError:
            pass
        yield row
        runner.drop()


class Runner:
    """A model and, at times, a cache."""

    def __init__(self, asked: SimpleNamespace, layers: int):
        self.asked, self.layers, self.capacity = asked, layers, asked.capacity
        config = {**asked.config, "num_hidden_layers": layers}
        kind = config.pop("model_type")
        config.pop("layer_types", None)  # derived from the number of layers
        self.config = transformers.AutoConfig.for_model(kind, **config)
        with torch.device(DEVICE):
            made = transformers.AutoModelForCausalLM.from_config(
                self.config, attn_implementation="sdpa", dtype=torch.bfloat16
            )
        self.model = made.eval().requires_grad_(False)
        self.forward = self.model.forward
        if asked.hf_compile:
            self.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)
        # Named past_key_values in older releases.
        self.name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self.weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in self.model.parameters()}.values())
        self.heads = self.config.num_key_value_heads
        each = self.config.hidden_size // self.config.num_attention_heads
        self.head_dim = getattr(self.config, "head_dim", None) or each
        self.token_bytes = 2 * 2 * layers * self.heads * self.head_dim
        self.margin = asked.steps * (asked.repeats + 1)  # tokens that a sample adds
        self.cache = None

    def largest_guess(self, budget: int) -> int:
        """Weights, cache and logits; whether that fits is found by trying."""
        logits = 6 * self.config.vocab_size  # in bfloat16 and float32
        sequence = (1 + 1 / self.layers) * self.token_bytes * self.capacity + logits
        return max(1, int((budget - self.weights) / sequence))

    def drop(self) -> None:
        """Frees the cache."""
        self.cache = None
        _forget()

    def new_cache(self):
        """An empty cache of the method's kind."""
        if self.asked.method == "hf-static":
            return transformers.StaticCache(config=self.config, max_cache_len=self.capacity)
        return transformers.DynamicCache(config=self.config)

    def fill(self, batch: int, length: int) -> None:
        """A cache of ``length`` random tokens in each sequence."""
        self.drop()
        self.cache = self.new_cache()
        shape = (batch, self.heads, length, self.head_dim)
        for layer in range(self.layers):
            keys, values = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            self.cache.update(keys, values, layer)

    @torch.inference_mode()
    def steps(self, tokens: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
        """``count`` greedy steps: tokens [B, T] -> (seconds, [B, 1]). Logits become float32 first, as in generate."""
        _wait()
        begin = time.perf_counter()
        for _ in range(count):
            out = self.forward(tokens, use_cache=True, logits_to_keep=1, **{self.name: self.cache})
            tokens = out.logits[:, -1].float().argmax(-1, keepdim=True)
        _wait()
        return time.perf_counter() - begin, tokens

    def sample(self, batch: int, length: int) -> dict[str, Any]:
        """Steps near ``length`` cached tokens; the cache grows by ``margin`` tokens while they are timed."""
        steps, repeats = self.asked.steps, self.asked.repeats
        start = max(1, min(length, self.capacity - self.margin))
        with torch.inference_mode():
            self.fill(batch, start)
            tokens = torch.randint(self.config.vocab_size, (batch, 1), device=DEVICE)
        _, tokens = self.steps(tokens, steps)
        times = []
        for _ in range(repeats):
            seconds, tokens = self.steps(tokens, steps)
            times.append(seconds / steps)
        row = {"kind": "sample", "batch": batch, "wanted": length, "length": start + steps + steps * repeats / 2}
        return row | {"step_s": statistics.median(times), "low_s": min(times), "high_s": max(times)}

    def prefill(self, batch: int, repeats: int) -> dict[str, Any]:
        """Times the prompts of the whole batch into an empty cache."""
        prompt = torch.randint(self.config.vocab_size, (batch, self.asked.prompt), device=DEVICE)
        times = []
        for _ in range(repeats + 1):
            self.drop()
            with torch.inference_mode():
                self.cache = self.new_cache()
            times.append(self.steps(prompt, 1)[0])
        self.drop()
        row = {"kind": "prefill", "seconds": statistics.median(times[1:]), "low_s": min(times[1:])}
        return row | {"high_s": max(times[1:]), "tokens": batch * self.asked.prompt}


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def _forget() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for made in measure(SimpleNamespace(**json.loads(sys.argv[1]))):
        print(json.dumps(made), flush=True)
