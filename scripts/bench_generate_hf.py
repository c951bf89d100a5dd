"""The Hugging Face side of bench_generate.py: transformers with torch, one cache in a process of its own. Prints rows;
see bench_generate_common.py.

The model is made from its config with random bfloat16 weights on the GPU, attends by ``sdpa``, and takes greedy tokens
one at a time as ``generate`` does, without its bookkeeping. Caches of a given length are filled with random numbers.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import torch
import transformers

from scripts.bench_generate_common import Request, in_order, run_child, spread

TRIES = 24  # of smaller and smaller batches
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def measure(request: Request) -> Iterator[dict[str, Any]]:
    """All phases of a request, as rows."""
    name = torch.cuda.get_device_name() if GPU else "cpu"
    yield {"kind": "start", "device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    runner = None
    for phase in request.phases:
        layers = (request.equal_layers if phase == "equal" else None) or request.model["num_hidden_layers"]
        if runner is None or runner.layers != layers:
            runner = None
            _forget()
            runner = Runner(request, layers)
        for row in (_generate if phase == "generate" else _equal)(request, runner):
            yield {"phase": phase, "layers": layers, **row}
        runner.drop()


def _generate(request: Request, runner: Runner) -> Iterator[dict[str, Any]]:
    """The whole generation at the largest batch that the budget holds, found by trying."""
    if GPU:  # torch then refuses what the budget does not hold
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(request.budget / total, 1.0))
    batch = request.batch or runner.largest_guess(request.budget)
    for _ in range(TRIES):
        try:
            rows = [runner.prefill(batch, min(request.repeats, 3))] if request.prefill else []
            first, *others = in_order(request.lengths, request.capacity)
            rows.insert(0, runner.sample(batch, first))
            break
        except torch.OutOfMemoryError:
            if request.batch or batch == 1:
                raise
        runner.drop()  # outside the except clause, whose traceback holds tensors
        batch = batch * 15 // 16
    else:
        raise RuntimeError(f"no batch fitted in {TRIES} tries, the last of {batch} sequences")
    sequence = runner.token_bytes * request.capacity
    plan = {"weights_bytes": runner.weights, "cache_bytes": batch * sequence, "sequence_bytes": sequence}
    yield {"kind": "plan", "batch": batch, "budget_bytes": request.budget, **plan}
    memory = {"kind": "memory", "batch": batch, "budget_bytes": request.budget}
    if GPU:
        peak = torch.cuda.max_memory_allocated()
        memory |= {"peak_bytes": peak, "fits": peak <= request.budget, "reserved": torch.cuda.max_memory_reserved()}
        memory["beyond_bytes"] = peak - runner.weights - plan["cache_bytes"]
    yield memory
    yield from rows
    for length in others:
        yield runner.sample(batch, length)


def _equal(request: Request, runner: Runner) -> Iterator[dict[str, Any]]:
    """Steps at a batch that all methods share; the whole device may be used."""
    if GPU:
        torch.cuda.set_per_process_memory_fraction(1.0)
    batch = request.equal_batch
    for length in sorted(request.equal_lengths):
        runner.capacity = length + runner.margin
        row = None
        try:
            row = runner.sample(batch, length)
        except torch.OutOfMemoryError:
            pass
        if row is None:
            yield {"kind": "skipped", "batch": batch, "length": length, "why": "out of memory"}
        else:
            yield row
        runner.drop()


class Runner:
    """A model and, at times, a cache of ``batch`` sequences."""

    def __init__(self, request: Request, layers: int):
        self.request, self.layers, self.capacity = request, layers, request.capacity
        config = {**request.model, "num_hidden_layers": layers}
        kind = config.pop("model_type")
        config.pop("layer_types", None)  # derived from the number of layers
        self.config = transformers.AutoConfig.for_model(kind, **config)
        with torch.device(DEVICE):
            made = transformers.AutoModelForCausalLM.from_config(
                self.config, attn_implementation="sdpa", dtype=torch.bfloat16
            )
        self.model = made.eval().requires_grad_(False)
        self.forward = self.model.forward
        if request.compiled:
            self.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)
        # Named past_key_values in older releases.
        self.name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self.weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in self.model.parameters()}.values())
        self.heads = self.config.num_key_value_heads
        each = self.config.hidden_size // self.config.num_attention_heads
        self.head_dim = getattr(self.config, "head_dim", None) or each
        self.token_bytes = 2 * 2 * layers * self.heads * self.head_dim
        self.margin = request.steps * (request.repeats + 1)  # tokens that a sample adds
        self.cache, self.batch = None, 0

    def largest_guess(self, budget: int) -> int:
        """Weights, cache and logits; more than that is found by trying."""
        logits = 6 * self.config.vocab_size  # in bfloat16 and float32
        share = 0.3 if self.request.method == "hf-quantized" else 1 + 1 / self.layers
        return max(1, int((budget - self.weights) / (share * self.token_bytes * self.capacity + logits)))

    def drop(self) -> None:
        """Frees the cache."""
        self.cache, self.batch = None, 0
        _forget()

    def new_cache(self):
        """An empty cache of the method's kind."""
        method = self.request.method
        if method == "hf-static":
            return transformers.StaticCache(config=self.config, max_cache_len=self.capacity)
        if method == "hf-dynamic":
            return transformers.DynamicCache(config=self.config)
        return transformers.QuantizedCache(self.request.backend, self.config)

    def fill(self, batch: int, length: int) -> None:
        """A cache of ``length`` random tokens in each sequence."""
        method = self.request.method
        if method == "hf-static" and self.batch == batch:  # its size is always the same: move its end
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(length)
            return
        self.drop()
        self.cache, self.batch = self.new_cache(), batch
        shape = (batch, self.heads, self.capacity if method == "hf-static" else length, self.head_dim)
        for index, layer in enumerate(self.cache.layers):
            if method == "hf-static":
                one = _normal((batch, self.heads, 1, self.head_dim))
                layer.lazy_initialization(one, one)
                layer.keys.normal_()
                layer.values.normal_()
                layer.cumulative_length.fill_(length)
            elif method == "hf-dynamic":
                keys, values = _normal(shape), _normal(shape)
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
            else:
                self.cache.update(_normal(shape), _normal(shape), index)

    @torch.inference_mode()
    def steps(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` greedy steps: tokens [B, T] -> [B, 1]. The logits become float32 first, as in generate."""
        for _ in range(count):
            out = self.forward(tokens, use_cache=True, logits_to_keep=1, **{self.name: self.cache})
            tokens = out.logits[:, -1].float().argmax(-1, keepdim=True)
        return tokens

    def timed(self, tokens: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
        _wait()
        begin = time.perf_counter()
        tokens = self.steps(tokens, count)
        _wait()
        return time.perf_counter() - begin, tokens

    def sample(self, batch: int, length: int) -> dict[str, Any]:
        """Steps near ``length`` cached tokens; the cache grows by ``margin`` tokens while they are timed."""
        steps, repeats = self.request.steps, self.request.repeats
        start = max(1, min(length, self.capacity - self.margin))
        with torch.inference_mode():
            self.fill(batch, start)
            tokens = torch.randint(self.config.vocab_size, (batch, 1), device=DEVICE)
        _, tokens = self.timed(tokens, steps)
        times = []
        for _ in range(repeats):
            seconds, tokens = self.timed(tokens, steps)
            times.append(seconds / steps)
        median, low, high = spread(times)
        row = {"kind": "sample", "batch": batch, "wanted": length, "length": start + steps + steps * repeats / 2}
        row |= {"steps": steps, "repeats": repeats, "low_s": low, "high_s": high, "flush_s": 0.0}
        return row | {"base_s": median, "step_s": median}

    def prefill(self, batch: int, repeats: int) -> dict[str, Any]:
        """Times the prompts of the whole batch into an empty cache."""
        prompt = torch.randint(self.config.vocab_size, (batch, self.request.prompt), device=DEVICE)
        times = []
        for _ in range(repeats + 1):
            self.drop()
            with torch.inference_mode():
                self.cache = self.new_cache()
            times.append(self.timed(prompt, 1)[0])
        self.drop()
        median, low, high = spread(times[1:])
        tokens = batch * self.request.prompt
        return {"kind": "prefill", "batch": batch, "seconds": median, "low_s": low, "high_s": high, "tokens": tokens}


def _normal(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def _forget() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


if __name__ == "__main__":
    sys.exit(run_child(measure, out_of_memory))
