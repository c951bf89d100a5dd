"""``KVPlan``: how many sequences of which length fit into a device's memory, before anything is allocated.

    plan = KVPlan.for_budget(config, "kitty_pro", length=8192, budget=80 * 10**9, weights=params)
    plan.batch, plan.parts["total"], print(plan)

Every figure is the size of the arrays of the very state that ``init_state`` would make, taken from its shapes.
"""

from __future__ import annotations

import bisect
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
from kitty_jax.cache.state import CacheShape, KVShape, init_state, nbytes, pages_per_sequence
from kitty_jax.inference.memory import format_bytes
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
        for name, size in (("batch", batch), ("length", length), ("pool_pages", pool_pages)):
            if size is not None:
                check_whole(name, size, 1)
        for name, size in (("batch", batch), ("pool_pages", pool_pages or 0)):
            if size % base.data:
                raise ValueError(f"{name} must be a multiple of the mesh's {base.data} 'data' places, got {size}")
        batch, length, pool_pages = int(batch), int(length), pool_pages and int(pool_pages)
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
                least = base.weights / (1 - base.workspace / budget)
            raise ValueError(
                f"a budget of {format_bytes(budget)} leaves nothing for the cache: the weights on one device take "
                f"{format_bytes(base.weights)} and {format_bytes(base.workspace)} are kept free as workspace; give "
                f"more than {format_bytes(least)}, or spread the weights over more than {base.model} 'model' places"
            )
        if length is not None:
            check_whole("length", length, 1)
            plan = functools.partial(dataclasses.replace, base, length=int(length))
            one, two = (plan(batch=n * base.data).parts["total"] for n in (1, 2))
            best = max(1 + (base.room - one) // (two - one), 0)  # every sequence takes as much as the second
            final = plan(batch=max(best, 1) * base.data)
        else:
            check_whole("batch", batch, 1)
            if batch % base.data:
                raise ValueError(f"batch must be a multiple of the mesh's {base.data} 'data' places, got {batch}")
            plan = functools.partial(dataclasses.replace, base, batch=int(batch))
            best = base._greatest_length(plan)
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
        if np.ndim(lengths) != 1 or not len(lengths):
            raise ValueError(
                f"lengths must be a sequence with the tokens of each request, got {lengths!r}; a single one is [tokens]"
            )
        lengths = list(lengths)
        for i, n in enumerate(lengths):
            check_whole(f"the length of request {i}", n, 1)
        own = -(-len(lengths) // base.data)
        quantized = next((c for c in base.caches if c.quantized), None)
        pool = None
        if quantized and len(set(lengths)) > 1:
            pages = [pages_per_sequence(int(n), quantized) for n in lengths]
            pool = base.data * max(sum(pages[i : i + own]) for i in range(0, len(pages), own)) or None
        sizes = {"length": int(max(lengths)), "tokens": int(sum(lengths))}
        return dataclasses.replace(base, batch=own * base.data, pool_pages=pool, **sizes)

    def _greatest_length(self, plan: Callable[..., KVPlan]) -> int:
        """The greatest length that fits, 0 if not even 1 does."""
        quantized = [c for c in self.caches if c.quantized]
        page = math.lcm(*(c.page for c in quantized))
        # From here on buffers have their full size, and a page's worth of tokens always takes the same bytes.
        far = page * max([256, *(-(-(c.sink + c.window) // page) + 2 for c in quantized)])
        near, step = plan(length=far).parts["total"], plan(length=far + page).parts["total"]
        low, high = 0, far
        if near <= self.room:
            guess = far + (self.room - near) * page // (step - near)
            low, high = max(guess - 2 * page, far), guess + 2 * page
        return low + bisect.bisect_left(range(low + 1, high), True, key=lambda n: not plan(length=n).fits)

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
        sizes = {"batch": batch, "capacity": self.length, "pool_pages": pool_pages}
        return nbytes(jax.eval_shape(lambda: init_state(caches, local, **sizes)))

    @property
    def payload(self) -> int:
        """Bytes of quantized codes, or all of a full-precision layer, on all devices together."""
        return self.devices * sum(self.parts[name] for name in ("key_codes", "value_codes", "full_precision"))

    @property
    def buffers(self) -> int:
        """Bytes of full-precision sink, key tail and value window."""
        return self.devices * sum(self.parts[name] for name in ("sink", "key_tail", "value_window"))

    @property
    def metadata(self) -> int:
        """Bytes of scales, minima, boosted channels, padding of the records, page table, lengths, free pages."""
        return self.total - self.payload - self.buffers

    @property
    def bits_per_element(self) -> float:
        """Bits per cached key or value when the cache is full, metadata and buffers included."""
        return 16 / self.ratio

    @property
    def total(self) -> int:
        """Bytes of the cache on all devices together."""
        return self.parts["total"] * self.devices

    @property
    def bf16(self) -> int:
        """Bytes of the same tokens in bfloat16, on all devices together."""
        return 2 * 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * self.tokens

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


def cache_bytes(
    cache: Cache, shape: CacheShape, *, batch: int = 1, capacity: int, pool_pages: int | None = None
) -> KVPlan:
    """The plan of what :func:`kitty_jax.cache.state.init_state` allocates for the same arguments; see there."""
    return KVPlan.for_batch(shape, cache, batch=batch, length=capacity, pool_pages=pool_pages)


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
    workspace = round((budget or 0) * float(reserve)) if workspace is None else workspace
    check_whole("workspace (bytes)", workspace, 0)
    whole = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, jnp.dtype(shape.dtype))
    caches, held = layer_configs(cache, shape.num_layers), _weight_bytes(weights, model)
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
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            split += math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        else:
            whole += math.prod(leaf.shape) * leaf.dtype.itemsize
    return split - (-whole // int(model))


def _of_heads(config: CacheConfig, heads: int) -> CacheConfig:
    """The config for ``heads`` of the KV heads; a channel list for each head would not fit fewer."""
    lists = config.channel_lists()
    return dataclasses.replace(config, selection=lists[:heads]) if len(lists) > heads else config
