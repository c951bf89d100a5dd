"""What ``generate`` and the engine share: their options, checked once, and the calls of the compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.state import KVShape, pages_per_sequence
from kitty_jax.cache.steps import FunctionalModel, functional
from kitty_jax.inference.decode_loop import SamplingState, jit_advance, jit_init, jit_start
from kitty_jax.inference.prompt_steps import PREFILL_TOKENS, PromptStep, prompt_steps
from kitty_jax.inference.prompts import BUCKET, check_eos, check_whole
from kitty_jax.inference.sampling import Greedy, Sampler
from kitty_jax.pallas_kernels.implementation import Implementation, choose

Call = functools.partial  # a jitted function with all of its arguments: call it, or compile it


@dataclasses.dataclass(frozen=True)
class Programs:
    """Checked options of a batch; make it with :meth:`check`. Its methods return calls that are still to be made.

    Attributes:
        model: the split model.
        caches: one cache config per layer.
        batch: B, sequences of the state, a multiple of the mesh's "data" axis.
        capacity: tokens that a sequence's cache can hold.
        eos: int32 ids that end a sequence, padded with -1.
        pool_pages, samples, sampler, prefill_tokens, mesh, implementation: as in :func:`kitty_jax.generate`.
    """

    model: FunctionalModel
    caches: tuple[CacheConfig, ...]
    batch: int
    capacity: int
    eos: np.ndarray
    pool_pages: int | None
    samples: int
    sampler: Sampler
    prefill_tokens: int
    mesh: Mesh | None
    implementation: Implementation

    @classmethod
    def check(
        cls,
        model: Any,
        *,
        sequences: int,
        capacity: int,
        cache: CacheConfig | str | Sequence[CacheConfig] = "kitty_pro",
        pool_pages: int | None = None,
        samples: int = 1,
        sampler: Sampler | None = None,
        eos: int | Sequence[int] | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        mesh: Mesh | None = None,
        implementation: Implementation = "auto",
    ) -> Programs:
        """Checks options, runs and compiles nothing. ``sequences`` is rounded up to a multiple of the "data" axis.

        Raises:
            ValueError: an option out of its range, or a cache that does not fit the model.
        """
        caches = layer_configs(cache, model.config.num_layers)
        if pool_pages is not None:
            check_whole("pool_pages", pool_pages, 1)
        check_whole("samples", samples, 1)
        check_whole("prefill_tokens", prefill_tokens, BUCKET)
        choose(implementation, None)
        if mesh is not None and set(mesh.axis_names) != {"data", "model"}:
            raise ValueError(
                f"the mesh must have the axes 'data' and 'model', got {mesh.axis_names}: make it with "
                "kitty_jax.models.sharding.make_mesh(data, model), and load the model with the same mesh"
            )
        ways = mesh.shape["data"] if mesh else 1
        if samples > 1 and ways > 1:
            raise ValueError(f"samples={samples} needs a mesh with one place on 'data', got {ways}")
        sampler = Greedy() if sampler is None else sampler
        if not callable(sampler):
            raise ValueError(
                f"sampler must be Greedy(), Sampling(...) or a function of (logits, keys), got {sampler!r}"
            )
        if jax.tree_util.all_leaves([sampler]):  # a plain function: static, known by its identity
            sampler = jax.tree_util.Partial(sampler)
        programs = cls(
            model=functional(model),
            caches=caches,
            batch=-(-sequences // ways) * ways,
            capacity=int(capacity),
            eos=check_eos(eos, model.config.vocab_size),
            pool_pages=pool_pages,
            samples=int(samples),
            sampler=sampler,
            prefill_tokens=int(prefill_tokens),
            mesh=mesh,
            implementation=implementation,
        )
        _ = programs.state_shape  # refuses a cache that does not fit the model
        return programs

    @property
    def groups(self) -> int:
        """Places of the mesh's "data" axis; each has its own sequences and pages."""
        return self.mesh.shape["data"] if self.mesh else 1

    @property
    def eos_ids(self) -> set[int]:
        """The ids that end a sequence."""
        return set(self.eos.tolist()) - {-1}

    def pages(self, tokens: int) -> int:
        """Pages that so many cached tokens of a sequence fill."""
        quantized = next((c for c in self.caches if c.quantized), None)
        return pages_per_sequence(tokens, quantized) if quantized else 0

    @functools.cached_property
    def state_shape(self) -> SamplingState:
        """Shapes of the state."""
        return jax.eval_shape(self.empty(np.zeros(self.batch, np.uint32)))

    def prompt_steps(self, prompts: Sequence[np.ndarray], rows: Sequence[int]) -> list[PromptStep]:
        """The steps that cache prompts in sequences ``rows``."""
        return prompt_steps(prompts, rows, batch=self.batch, groups=self.groups, budget=self.prefill_tokens)

    def empty(self, seeds: np.ndarray) -> Call:
        """-> an empty state. ``seeds``: uint32 [B]."""
        config = self.model.config
        shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, jnp.dtype(config.dtype))
        # Room for as many new tokens as the capacity, so that max_new_tokens decides no shape.
        sizes = {"batch": self.batch, "capacity": self.capacity, "room": self.capacity, "pool_pages": self.pool_pages}
        return Call(jit_init, self.caches, shape, seeds, **sizes, mesh=self.mesh)

    def start(self, run: SamplingState, step: PromptStep) -> Call:
        """-> the state after a prompt step. ``run`` is donated."""
        arguments = (self.model, run, step.tokens, step.lengths, step.rows, step.ends, self.sampler, self.eos)
        options = {"fresh": step.fresh, "copies": self.samples, "implementation": self.implementation}
        return Call(jit_start, *arguments, **options)

    def advance(self, run: SamplingState, until: np.ndarray, stop_on_end: bool = False) -> Call:
        """-> the state after decoding up to ``until`` int32 [B] new tokens; see :func:`.decode_loop.advance`.
        ``run`` is donated."""
        arguments = (self.model, run, until, np.bool_(stop_on_end), self.sampler, self.eos)
        return Call(jit_advance, *arguments, implementation=self.implementation)

    def compile(self, steps: Iterable[PromptStep], *others: Call) -> float:
        """Compiles what the prompt steps and all decoding need, and ``others``; returns the seconds that took."""
        begin = time.perf_counter()
        run = self.state_shape
        shapes = {(step.tokens.shape, step.rows is None, step.fresh): step for step in steps}
        calls = [self.empty(np.zeros(self.batch, np.uint32)), *(self.start(run, step) for step in shapes.values())]
        for call in (*calls, self.advance(run, np.zeros(self.batch, np.int32)), *others):
            call.func.lower(*call.args, **call.keywords).compile()
        return time.perf_counter() - begin
