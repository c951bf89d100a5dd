"""``generate`` and ``stream``: token ids in, token ids out, from a jitted loop over a 2-bit cache.

    result = generate(model, [[504, 3575], [42]], cache="kitty_pro", max_new_tokens=64, eos=tokenizer.eos_token_id)
    result.tokens[0, : result.lengths[0]]

A batch gives each sequence what it would get alone: prompts are right-padded and never see the padding, and every
sequence draws from its own random keys. Lengths are padded to :func:`.prompts.bucket`, so that other prompts
of a batch shape compile nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.mesh import to_host
from kitty_jax.cache.state import KVShape, KVState, pages_per_sequence
from kitty_jax.cache.steps import FunctionalModel, functional
from kitty_jax.inference.decode_loop import SamplingState, jit_advance, jit_init, jit_progress, jit_start
from kitty_jax.inference.prompt_steps import PREFILL_TOKENS, PromptSlice, plan_prefill, power_of_two
from kitty_jax.inference.prompts import (
    BUCKET,
    Prompts,
    check_capacity,
    check_eos,
    check_prompts,
    check_seeds,
    check_whole,
)
from kitty_jax.inference.sampling import Greedy, Sampler
from kitty_jax.pallas_kernels.implementation import Implementation, choose


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What was generated.

    Attributes:
        tokens: int32 [B, max_new_tokens], new tokens, the eos included; -1 after a sequence's end. With ``samples``, B
            is prompts times samples, and the samples of a prompt follow each other.
        lengths: int32 [B], new tokens of each sequence.
        finished_by_eos: bool [B]; the others ran into ``max_new_tokens``, or ran out of cache.
        state: the cache, where ``keep_state`` was given. It holds each sequence's prompt and all its new tokens but the
            last.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finished_by_eos: np.ndarray
    state: KVState | None = None

    def sequences(self) -> list[list[int]]:
        """The new tokens of each sequence as a list of ids."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


class PoolExhaustedError(RuntimeError):
    """The page pool had no page left for some sequences. They stopped early; nothing of any sequence is lost.

    Attributes:
        result: the :class:`GenerateResult` up to there; sequences that needed no further page are complete.
        rows: the sequences that stopped.
    """

    def __init__(self, result: GenerateResult, rows: Sequence[int], pool_pages: int, pages_for_all: int):
        self.result, self.rows = result, tuple(rows)
        stopped = ", ".join(f"{row} (after {result.lengths[row]} new tokens)" for row in rows)
        super().__init__(
            f"pool_pages={pool_pages} were not enough; sequences that stopped early: {stopped}. Raise pool_pages "
            f"({pages_for_all} hold the whole capacity of all {len(result.lengths)} sequences, None gives each its "
            "own), or generate fewer sequences or tokens at a time. The tokens so far are in this error's `result`."
        )


@dataclasses.dataclass
class Generation:
    """A checked request. :func:`prepare` makes it; :meth:`run` or :meth:`stream` carry it out, as often as wanted.

    Attributes:
        model: the split model.
        prompts: padded prompts.
        caches: one cache config per layer.
        capacity: tokens that a sequence's cache can hold.
        slices: the prompt steps.
    """

    model: FunctionalModel
    prompts: Prompts
    caches: tuple[CacheConfig, ...]
    capacity: int
    max_new_tokens: int
    sampler: Sampler
    seeds: np.ndarray
    eos: np.ndarray
    pool_pages: int | None
    implementation: Implementation
    samples: int
    mesh: Mesh | None
    slices: list[PromptSlice]

    @property
    def sequences(self) -> int:
        """Sequences that were asked for."""
        return self.prompts.batch * self.samples

    @property
    def batch(self) -> int:
        """B, sequences of the state: those asked for, rounded up to a multiple of the mesh's "data" axis."""
        return _padded(self.sequences, _data_ways(self.mesh))

    @property
    def shape(self) -> KVShape:
        """What the cache needs to know of the model."""
        config = self.model.config
        return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, jnp.dtype(config.dtype))

    def _empty(self) -> SamplingState:
        return jit_init(self.caches, self.shape, self.seeds, **self._sizes())

    def _sizes(self) -> dict[str, int | None]:
        # Room for as many new tokens as the capacity, so that max_new_tokens decides no shape.
        return {
            "batch": self.batch,
            "capacity": self.capacity,
            "room": self.capacity,
            "pool_pages": self.pool_pages,
            "mesh": self.mesh,
        }

    def compile(self) -> float:
        """Compiles everything without running it, and returns the seconds that took."""
        begin = time.perf_counter()
        jit_init.lower(self.caches, self.shape, self.seeds, **self._sizes()).compile()
        run = jax.eval_shape(self._empty)
        for shape in {(x.tokens.shape, x.rows is None, x.fresh): x for x in self.slices}.values():
            arguments, options = self._start_arguments(run, shape)
            jit_start.lower(*arguments, **options).compile()
        jit_advance.lower(*self._advance_arguments(run, 0), implementation=self.implementation).compile()
        jit_progress.lower(run, np.int32(0), size=1).compile()
        return time.perf_counter() - begin

    def _start_arguments(self, run, piece: PromptSlice | None = None) -> tuple[tuple, dict]:
        piece = piece or self.slices[0]
        arrays = (piece.tokens, piece.lengths, piece.rows, piece.ends)
        options = {"fresh": piece.fresh, "copies": self.samples, "implementation": self.implementation}
        return (self.model, run, *arrays, self.sampler, self.eos), options

    def _advance_arguments(self, run, limit: int) -> tuple:
        until = np.full(self.batch, limit, np.int32)
        return self.model, run, until, np.bool_(False), self.sampler, self.eos

    def start(self) -> SamplingState:
        """Runs the prompts and samples the first new token of every sequence."""
        run = self._empty()
        for piece in self.slices:
            arguments, options = self._start_arguments(run, piece)
            run = jit_start(*arguments, **options)
        return run

    def advance(self, run: SamplingState, limit: int) -> SamplingState:
        """Decodes up to ``limit`` new tokens per sequence. ``run`` is donated."""
        limit = min(limit, self.max_new_tokens)
        return jit_advance(*self._advance_arguments(run, limit), implementation=self.implementation)

    def run(self, keep_state: bool = False) -> GenerateResult:
        """All of it at once; see :func:`generate`."""
        return self._result(self.advance(self.start(), self.max_new_tokens), keep_state)

    def stream(self, chunk: int = 1) -> Iterator[np.ndarray]:
        """See :func:`stream`."""
        check_whole("chunk", chunk, 1)
        return self._stream(int(chunk))

    def _stream(self, chunk: int) -> Iterator[np.ndarray]:
        run, first, going = self.start(), 0, True
        while going and first < self.max_new_tokens:
            size = min(chunk, self.max_new_tokens - first)
            run = self.advance(run, first + size)
            tokens, going = to_host(jit_progress(run, np.int32(first), size=size))
            tokens, going = tokens[: self.sequences], going.any()
            width = int((tokens >= 0).any(axis=0).sum())
            if width:
                yield tokens[:, :width]
            first += size
        self._result(run, keep_state=False)

    def _result(self, run: SamplingState, keep_state: bool) -> GenerateResult:
        read = to_host((run.tokens, run.num_new, run.finished, run.cache.exhausted))
        tokens, lengths, finished, exhausted = (x[: self.sequences] for x in read)
        result = GenerateResult(
            tokens[:, : self.max_new_tokens], lengths, finished, run.cache if keep_state or exhausted.any() else None
        )
        if exhausted.any():
            quantized = next(config for config in self.caches if config.quantized)
            pages = self.batch * pages_per_sequence(self.capacity, quantized)
            raise PoolExhaustedError(result, np.flatnonzero(exhausted).tolist(), self.pool_pages, pages)
        return result


def prepare(
    model: Any,
    token_ids: Any,
    lengths: Any = None,
    *,
    cache: CacheConfig | str | Sequence[CacheConfig] = "kitty_pro",
    max_new_tokens: int,
    sampler: Sampler | None = None,
    seed: Any = 0,
    eos: int | Sequence[int] | None = None,
    capacity: int | None = None,
    pool_pages: int | None = None,
    samples: int = 1,
    prefill_tokens: int = PREFILL_TOKENS,
    mesh: Mesh | None = None,
    implementation: Implementation = "auto",
) -> Generation:
    """Checks a request without running or compiling anything. Arguments and errors as in :func:`generate`."""
    config = model.config
    caches = layer_configs(cache, config.num_layers)
    prompts = check_prompts(token_ids, lengths, config.vocab_size)
    capacity = check_capacity(prompts.lengths, max_new_tokens, capacity)
    if pool_pages is not None:
        check_whole("pool_pages", pool_pages, 1)
    check_whole("samples", samples, 1)
    check_whole("prefill_tokens", prefill_tokens, BUCKET)
    choose(implementation, None)
    ways = _data_ways(mesh)
    if samples > 1 and ways > 1:
        raise ValueError(f"samples={samples} needs a mesh with one place on 'data', got {ways}")
    quantized = next((c for c in caches if c.quantized), None)
    if samples > 1 and pool_pages is None and quantized and pages_per_sequence(capacity, quantized):
        pool_pages = _shared_pool(prompts.lengths, samples, capacity, quantized)
    batch = _padded(prompts.batch * samples, ways)
    rows = [b * samples for b in range(prompts.batch)]
    ids = [row[:n] for row, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    slices = plan_prefill(ids, rows, batch=batch, groups=ways, budget=prefill_tokens)
    sampler = Greedy() if sampler is None else sampler
    if not callable(sampler):
        raise ValueError(f"sampler must be Greedy(), Sampling(...) or a function of (logits, keys), got {sampler!r}")
    if jax.tree_util.all_leaves([sampler]):  # a plain function: static, known by its identity
        sampler = jax.tree_util.Partial(sampler)
    generation = Generation(
        model=functional(model),
        prompts=prompts,
        caches=caches,
        capacity=capacity,
        max_new_tokens=int(max_new_tokens),
        sampler=sampler,
        seeds=check_seeds(seed, prompts.batch * samples, batch),
        eos=check_eos(eos, config.vocab_size),
        pool_pages=pool_pages,
        implementation=implementation,
        samples=int(samples),
        mesh=mesh,
        slices=slices,
    )
    jax.eval_shape(generation._empty)  # refuses a cache that does not fit the model
    return generation


def _data_ways(mesh: Mesh | None) -> int:
    if mesh is None:
        return 1
    if set(mesh.axis_names) != {"data", "model"}:
        raise ValueError(
            f"the mesh must have the axes 'data' and 'model', got {mesh.axis_names}: make it with "
            "kitty_jax.models.sharding.make_mesh(data, model), and load the model with the same mesh"
        )
    return mesh.shape["data"]


def _padded(sequences: int, ways: int) -> int:
    return -(-sequences // ways) * ways


def _shared_pool(lengths: np.ndarray, samples: int, capacity: int, config: CacheConfig) -> int:
    """Pages for all samples up to the capacity, those of the prompts once; rounded up so that the number recurs."""
    whole = pages_per_sequence(capacity, config)
    prompt = np.maximum(lengths - config.sink, 0) // config.page
    return power_of_two(int(np.sum(prompt + samples * (whole - prompt))))


def generate(model: Any, token_ids: Any, lengths: Any = None, *, keep_state: bool = False, **options) -> GenerateResult:
    """Continues prompts.

    Args:
        model: a model of ``kitty_jax.models``, or what :func:`kitty_jax.cache.steps.functional` makes of one.
        token_ids: integers [B, T], right-padded, or a list of B lists of integers.
        lengths: integers [B], real tokens of each row; by default all of them.
        keep_state: put the cache into the result.

    Keyword arguments, which :func:`prepare` and :func:`stream` take as well:
        cache: a name, a :class:`CacheConfig`, or one of them per layer. Default ``"kitty_pro"``.
        max_new_tokens: most new tokens of a sequence, 1 or more. Required.
        sampler: ``Greedy()``, the default, ``Sampling(...)``, or any function (logits [B, V], keys [B]) -> int32 [B].
        seed: an integer, and sequence b draws as one alone with seed + b does; or one integer per sequence.
        eos: id or ids that end a sequence; none by default. The eos is the last token of its sequence.
        capacity: tokens that a sequence's cache holds, at least its prompt and ``max_new_tokens``. By default just
            enough, rounded up to a :func:`.prompts.bucket`. Requests of equal batch, capacity, kind of sampler
            and padded prompt length share one compilation.
        pool_pages: pages for all sequences together; by default each has its own for the whole capacity.
        samples: continuations of each prompt, 1 by default. They share the pages of the prompt, which is run once;
            sample i of prompt b is sequence ``b * samples + i`` of the result, and draws as one alone with its seed.
        prefill_tokens: most prompt tokens, padding included, that run at a time, 8,192 by default. Prompts longer than
            that, rounded down to a power of two, are cut into pieces, which attend to the packed pages of those before.
        mesh: devices to use, from :func:`kitty_jax.models.sharding.make_mesh`; load the model with the same mesh.
        implementation: ``"auto"``, ``"mosaic"`` or ``"xla"``, for the operations on pages.

    Raises:
        ValueError: empty or overlong prompt, id outside the vocabulary, lengths that disagree with the array, unknown
            cache, or any other argument out of its range: before anything is compiled.
        PoolExhaustedError: ``pool_pages`` did not suffice; it carries the result up to there.
    """
    return prepare(model, token_ids, lengths, **options).run(keep_state)


def stream(model: Any, token_ids: Any, lengths: Any = None, *, chunk: int = 1, **options) -> Iterator[np.ndarray]:
    """Continues prompts and yields the new tokens as they come. Arguments and errors as in :func:`generate`.

    The request is checked here and now; the first ``next`` compiles and runs. The same compiled loop as
    :func:`generate`'s decodes ``chunk`` tokens between two yields, so the tokens are the same ones. Close the iterator
    to stop early.

    Returns:
        An iterator of int32 [B, n], n up to ``chunk``: the next tokens of each sequence, -1 after its end. It stops
        when all sequences have ended. A pool that ran out raises PoolExhaustedError after the last tokens.
    """
    return prepare(model, token_ids, lengths, **options).stream(chunk)
