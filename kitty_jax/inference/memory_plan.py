"""``KVPlan``: how many sequences of which length fit into a device's memory, before anything is allocated.

    plan = KVPlan.for_budget(config, "kitty_pro", length=8192, budget=80 * 10**9, weights=params)
    plan.batch, plan.parts["total"], print(plan)

Every figure is the size of the arrays of the very state that ``init_state`` would make, taken from its shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kitty_jax.cache.config import CacheConfig, layer_configs
from kitty_jax.cache.state import CacheShape, KVShape, pages_per_sequence
from kitty_jax.inference.memory import bf16_bytes, format_bytes, state_bytes
from kitty_jax.inference.prompts import check_whole

RESERVE = 0.1  # of the budget: activations, logits, the prompts of a step, what a compiled program needs between

Cache = CacheConfig | str | Sequence[CacheConfig]


@dataclasses.dataclass(frozen=True)
class KVPlan:
    """A batch's cache on a mesh of ``data`` x ``model`` devices, all alike; one device by default.

    Make it with :meth:`for_batch`, :meth:`for_budget` or :meth:`for_requests`, which share these keyword arguments:

    * ``budget``: bytes of one device's memory that may be used.
    * ``weights``: bytes of the model's weights, or a pytree of arrays or ``ShapeDtypeStruct``s. A leaf with a
      ``NamedSharding`` counts as what one device holds of it; all else is divided by ``model``.
    * ``reserve``: fraction of the budget to keep free as workspace, by default 0.1; or ``workspace``: the bytes. Not
      both.
    * ``data``, ``model``: the mesh. Sequences and their pages are divided by ``data``, KV heads by ``model``.

    Attributes:
        shape: the whole model's.
        caches: one cache config per layer.
        batch: B, sequences on all devices together.
        length: the capacity, most tokens that a sequence can hold.
        pool_pages: as :func:`kitty_jax.cache.state.init_state` takes it.
        tokens: all that the sequences were planned to hold.
        budget: bytes of one device, or None.
        weights: bytes of weights on one device.
        workspace: bytes of one device that are kept free.
        data, model: sizes of the mesh.
    """

    shape: KVShape
    caches: tuple[CacheConfig, ...]
    batch: int
    length: int
    pool_pages: int | None
    tokens: int
    budget: int | None
    weights: int
    workspace: int
    data: int
    model: int

    @classmethod
    def for_batch(
        cls, shape: CacheShape, cache: Cache, *, batch: int, length: int, pool_pages: int | None = None, **memory: Any
    ) -> KVPlan:
        """A given batch; ``plan.fits`` says whether the budget, if one is given, holds it.

        Raises:
            ValueError: sizes below 1, or that the mesh does not divide.
        """
        base = _empty_plan(shape, cache, **memory)
        check_whole("batch", batch, 1)
        check_whole("length", length, 1)
        batch, length = int(batch), int(length)
        if pool_pages is not None:
            check_whole("pool_pages", pool_pages, 1)
            pool_pages = int(pool_pages)
        for name, size in (("batch", batch), ("pool_pages", pool_pages or 0)):
            if size % base.data:
                raise ValueError(f"{name} must be a multiple of the mesh's {base.data} 'data' places, got {size}")
        plan = dataclasses.replace(base, batch=batch, length=length, pool_pages=pool_pages, tokens=batch * length)
        plan.parts  # noqa: B018 (refuses a cache that does not fit the model)
        return plan

    @classmethod
    def for_budget(
        cls,
        shape: CacheShape,
        cache: Cache,
        *,
        budget: int,
        length: int | None = None,
        batch: int | None = None,
        **memory: Any,
    ) -> KVPlan:
        """The largest batch of sequences of ``length``, or the greatest length of ``batch`` sequences: give one.

        Raises:
            ValueError: the weights and the workspace leave nothing, or what they leave does not hold one sequence per
                ``data`` place (or ``batch`` sequences of one token); the message says how much is missing.
        """
        if (length is None) == (batch is None):
            raise ValueError(
                f"give either a length, for the largest batch, or a batch, for the longest; got length={length!r}, "
                f"batch={batch!r}"
            )
        base = _empty_plan(shape, cache, budget=budget, **memory)
        if base.room <= 0:
            least = base.weights + base.workspace
            if memory.get("workspace") is None:  # a larger budget keeps more free
                reserve = memory.get("reserve")
                least = round(base.weights / (1 - (RESERVE if reserve is None else reserve)))
            raise ValueError(
                f"a budget of {format_bytes(budget)} leaves nothing for the cache: the weights on one device take "
                f"{format_bytes(base.weights)} and {format_bytes(base.workspace)} are kept free as workspace; give "
                f"more than {format_bytes(least)}, or spread the weights over more than {base.model} 'model' places"
            )
        if length is not None:
            check_whole("length", length, 1)
            plan = functools.partial(dataclasses.replace, base, length=int(length))
            one, two = (plan(batch=n * base.data).parts["total"] for n in (1, 2))
            guess = 1 + (base.room - one) // max(two - one, 1)
            best = _largest(lambda n: plan(batch=n * base.data).fits, guess)
            final = plan(batch=max(best, 1) * base.data)
        else:
            check_whole("batch", batch, 1)
            if batch % base.data:
                raise ValueError(f"batch must be a multiple of the mesh's {base.data} 'data' places, got {batch}")
            plan = functools.partial(dataclasses.replace, base, batch=int(batch))
            far = 64 * max([c.page for c in base.caches if c.quantized], default=128)
            near, later = (plan(length=n).parts["total"] for n in (far, 2 * far))
            guess = far + (base.room - near) * far // max(later - near, 1)
            best = _largest(lambda n: plan(length=n).fits, guess)
            final = plan(length=max(best, 1))
        if not best:
            raise ValueError(
                f"a budget of {format_bytes(budget)} leaves {format_bytes(base.room)} for the cache, after "
                f"{format_bytes(base.weights)} of weights and {format_bytes(base.workspace)} of workspace, and "
                f"{final.batch} x {final.length:,} tokens take {format_bytes(final.parts['total'])} on each device: "
                f"{format_bytes(-final.free)} more are needed, or shorter or fewer sequences"
            )
        return dataclasses.replace(final, tokens=final.batch * final.length)

    @classmethod
    def for_requests(cls, shape: CacheShape, cache: Cache, lengths: Sequence[int], **memory: Any) -> KVPlan:
        """Requests of different lengths, in tokens, all at once.

        Their pages come out of one pool that holds just what they need; a full-precision layer has the greatest length
        for all of them. On a mesh each ``data`` place takes an equal share of the requests, in order, and the pool of
        each is as large as the place with most pages needs.

        Raises:
            ValueError: no lengths, lengths below 1, or something else than a sequence of them.
        """
        base = _empty_plan(shape, cache, **memory)
        try:
            lengths = list(lengths)
        except TypeError as error:
            raise ValueError(
                f"lengths must be a sequence with the tokens of each request, got {lengths!r}; a single one is [tokens]"
            ) from error
        if not lengths:
            raise ValueError("no requests: lengths must hold the tokens of each")
        for i, n in enumerate(lengths):
            check_whole(f"the length of request {i}", n, 1)
        own = -(-len(lengths) // base.data)
        quantized = next((c for c in base.caches if c.quantized), None)
        pool = None
        if quantized and len(set(lengths)) > 1:
            pages = [pages_per_sequence(int(n), quantized) for n in lengths]
            pool = base.data * max(sum(pages[i : i + own]) for i in range(0, len(pages), own)) or None
        return dataclasses.replace(
            base,
            batch=own * base.data,
            length=int(max(lengths)),
            pool_pages=pool,
            tokens=int(sum(lengths)),
        )

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model

    @functools.cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of the cache on one device by part: :func:`.state.nbytes` of what it holds of the state."""
        return self._on_device(self.batch // self.data, self.pool_pages and self.pool_pages // self.data)

    @functools.cached_property
    def per_sequence(self) -> dict[str, int]:
        """The same for a single sequence of ``length`` tokens that owns its pages."""
        return self._on_device(1, None)

    def _on_device(self, batch: int, pool_pages: int | None) -> dict[str, int]:
        heads = self.shape.num_kv_heads // self.model
        local = dataclasses.replace(self.shape, num_kv_heads=heads)
        caches = tuple(_of_heads(c, heads) for c in self.caches)
        return state_bytes(caches, local, batch=batch, capacity=self.length, pool_pages=pool_pages)

    @property
    def total(self) -> int:
        """Bytes of the cache on all devices together."""
        return self.parts["total"] * self.devices

    @property
    def bf16(self) -> int:
        """Bytes of the same tokens in bfloat16, on all devices together."""
        return bf16_bytes(self.shape, batch=1, capacity=self.tokens)

    @property
    def ratio(self) -> float:
        """How many times as much the same tokens would take in bfloat16."""
        return self.bf16 / self.total

    @property
    def room(self) -> int | None:
        """Bytes that budget, weights and workspace leave for the cache of one device; None without a budget."""
        return None if self.budget is None else self.budget - self.weights - self.workspace

    @property
    def free(self) -> int | None:
        """Bytes of one device that are left over, workspace aside; below 0 if the cache does not fit."""
        return None if self.room is None else self.room - self.parts["total"]

    @property
    def fits(self) -> bool:
        """Whether the budget, if there is one, holds weights, workspace and cache."""
        return self.free is None or self.free >= 0

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON takes them; sizes in bytes, ``parts`` and ``per_sequence`` of one device."""
        names = ("batch", "length", "pool_pages", "tokens", "budget", "weights", "workspace", "data", "model")
        more = ("parts", "per_sequence", "total", "bf16", "ratio", "free", "fits")
        return {name: getattr(self, name) for name in (*names, *more)}

    def __str__(self) -> str:
        shape, text = self.shape, format_bytes
        mesh = "one device" if self.devices == 1 else f"{self.data} (data) x {self.model} (model) devices"
        pool = f", a pool of {self.pool_pages:,} pages" if self.pool_pages else ""
        lines = [
            f"{self.batch} sequences of up to {self.length:,} tokens{pool}; {shape.num_layers} layers, "
            f"{shape.num_kv_heads} KV heads, head size {shape.head_dim}; {mesh}",
            f"{self.ratio:.2f} times less than {text(self.bf16)} of bfloat16; on each device:",
        ]
        rows = [(name.replace("_", " "), size) for name, size in self.parts.items() if size and name != "total"]
        rows += [("cache", self.parts["total"]), ("weights", self.weights), ("workspace", self.workspace)]
        if self.budget is not None:
            rows += [("free" if self.fits else "missing", abs(self.free)), ("budget", self.budget)]
        return "\n".join([*lines, *(f"  {name:<16}{text(size):>12}" for name, size in rows)])


def _empty_plan(
    shape: CacheShape,
    cache: Cache,
    *,
    budget: int | None = None,
    weights: Any = 0,
    reserve: float | None = None,
    workspace: int | None = None,
    data: int = 1,
    model: int = 1,
) -> KVPlan:
    """The plan without sequences: everything but the batch, checked."""
    check_whole("data", data, 1)
    check_whole("model", model, 1)
    if shape.num_kv_heads % model:
        raise ValueError(f"{shape.num_kv_heads} KV heads cannot be split over a 'model' axis of {model}")
    if budget is not None:
        check_whole("budget (bytes of one device)", budget, 1)
    if reserve is not None and workspace is not None:
        raise ValueError(
            "reserve and workspace both say what to keep free: give the fraction or the bytes, got "
            f"reserve={reserve!r} and workspace={workspace!r}"
        )
    reserve = RESERVE if reserve is None else reserve
    if isinstance(reserve, bool) or not isinstance(reserve, numbers.Real) or not 0 <= reserve < 1:
        raise ValueError(
            f"reserve is the fraction of the budget to keep free, a number from 0 up to but not 1, got {reserve!r}"
        )
    if workspace is None:
        workspace = round((budget or 0) * float(reserve))
    check_whole("workspace (bytes)", workspace, 0)
    whole = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, jnp.dtype(shape.dtype))
    caches = layer_configs(cache, shape.num_layers)
    held = _weight_bytes(weights, model)
    budget = None if budget is None else int(budget)
    return KVPlan(whole, caches, int(data), 1, None, 0, budget, held, int(workspace), int(data), int(model))


def _weight_bytes(weights: Any, model: int) -> int:
    """Bytes of the weights on one device."""
    if isinstance(weights, np.ndarray) and not weights.ndim:
        weights = weights[()]
    if isinstance(weights, (numbers.Number, np.generic)):  # a NumPy number has a shape, but is no array of weights
        check_whole("weights (bytes)", weights, 0)
        return -(-int(weights) // int(model))
    whole = split = 0
    for path, leaf in jax.tree.leaves_with_path(weights):
        if isinstance(leaf, np.generic) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                "weights must be a number of bytes, or a pytree of arrays or jax.ShapeDtypeStruct, whose leaves have a "
                f"shape and a dtype; got {leaf!r:.80}{where}"
            )
        sharding = getattr(leaf, "sharding", None)
        named = isinstance(sharding, NamedSharding)
        size = math.prod(sharding.shard_shape(leaf.shape) if named else leaf.shape) * leaf.dtype.itemsize
        split, whole = (split + size, whole) if named else (split, whole + size)
    return split - (-whole // int(model))


def _of_heads(config: CacheConfig, heads: int) -> CacheConfig:
    """The config for ``heads`` of the KV heads; a channel list for each head would not fit fewer."""
    lists = config.channel_lists()
    return dataclasses.replace(config, selection=lists[:heads]) if len(lists) > heads else config


def _largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n for which ``fits``, true up to it and false beyond; 0 if not even 1 does. ``guess`` is near it."""
    low, high, step = 0, max(guess, 1), 1  # all up to low fit, high does not
    if fits(high):
        low = high
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        while high - step > 0 and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(high - step, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
