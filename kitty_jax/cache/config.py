"""Which cache: one frozen configuration for the whole family of the paper (arXiv 2511.18643, Tables 1 to 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import SCORES

QUERY_SELECTIONS: tuple[str, ...] = ("sensitivity", "error")  # these weigh channels by the queries
SELECTIONS: tuple[str, ...] = (*SCORES, "random", *QUERY_SELECTIONS)


SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # factors of a key channel's range that kitty_plus tries


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """How a layer's keys and values are cached. The defaults are Kitty's; use the named constructors for the others.

    Attributes:
        quantized: False keeps everything in the model's dtype; the other fields must then be left alone.
        sink: S, first tokens of a sequence that stay in full precision.
        page: G, tokens quantized together, a multiple of 16 (the GPU kernels take 128).
        window: R, newest values that stay in full precision.
        boost: fraction of the key channels that get 4 bits instead of 2; 1 gives 4-bit keys. ``boost * head_dim`` must
            be a whole number.
        value_bits: 2 or 4.
        selection: how the boosted channels of a page are chosen: "magnitude" (the paper's), "variance", "range",
            "sensitivity" (range times the root mean square of the queries of the page's own steps), "error" (what the
            boost takes off the channel's squared error, times the mean square of those queries), "random", or a fixed
            tuple of channels, the same for every KV head, or a tuple of one such tuple per KV head.
        key_shrink: factors of a key channel's range to try when quantizing; the one of least squared error is kept.
        value_shrink: the same for the range of a token's values.
        rotate_values: whether values are cached rotated by a Hadamard matrix (:mod:`.rotation`).
        seed: seed of the "random" selection.
    """

    quantized: bool = True
    sink: int = 32
    page: int = 128
    window: int = 128
    boost: float = 0.125
    value_bits: int = 2
    selection: str | tuple = "magnitude"
    key_shrink: tuple[float, ...] = (1.0,)
    value_shrink: tuple[float, ...] = (1.0,)
    rotate_values: bool = False
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.selection, str):
            object.__setattr__(self, "selection", _channel_tuple(self.selection))
        for name in ("key_shrink", "value_shrink"):
            object.__setattr__(self, name, _factors(name, getattr(self, name)))
        for name, unit in (("sink", "tokens"), ("page", "tokens"), ("window", "tokens"), ("value_bits", "bits")):
            value = getattr(self, name)
            if not _is_whole(value) or value < 0:
                raise ValueError(f"{name} must be a whole number of {unit}, 0 or more, got {value!r}")
        if not _is_whole(self.seed):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("quantized", "rotate_values"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not _is_number(self.boost) or not 0 <= self.boost <= 1:
            raise ValueError(f"boost is a fraction of the key channels from 0 to 1, got {self.boost!r}")
        if isinstance(self.selection, str) and self.selection not in SELECTIONS:
            names = ", ".join(SELECTIONS)
            raise ValueError(f"selection must be one of {names} or a tuple of channels, got {self.selection!r}")
        # Refuses what no head size could hold.
        PageFormat(page=self.page, value_bits=self.value_bits)
        if not self.quantized:
            changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            if changed != ["quantized"]:
                others = ", ".join(name for name in changed if name != "quantized")
                raise ValueError(
                    f"a full-precision cache (quantized=False) has nothing to set, got a change of {others}"
                )

    @classmethod
    def full(cls) -> CacheConfig:
        """Full precision: keys and values in the model's dtype, for comparison."""
        return cls(quantized=False)

    @classmethod
    def kivi2(cls, **changes) -> CacheConfig:
        """KIVI-K2V2: 2-bit keys and values, no sink, no boost."""
        return cls(**{"sink": 0, "boost": 0.0, **changes})

    @classmethod
    def kivi2_sink(cls, **changes) -> CacheConfig:
        """KIVI-K2V2*: KIVI-K2V2 with a full-precision sink of 32 tokens."""
        return cls(**{"boost": 0.0, **changes})

    @classmethod
    def kivi4(cls, **changes) -> CacheConfig:
        """KIVI-K4V4: 4-bit keys and values, no sink."""
        return cls(**{"sink": 0, "boost": 1.0, "value_bits": 4, **changes})

    @classmethod
    def k2v4(cls, **changes) -> CacheConfig:
        """K2V4*: 2-bit keys, 4-bit values, sink of 32 tokens."""
        return cls(**{"boost": 0.0, "value_bits": 4, **changes})

    @classmethod
    def k4v2(cls, **changes) -> CacheConfig:
        """K4V2*: 4-bit keys, 2-bit values, sink of 32 tokens."""
        return cls(**{"boost": 1.0, **changes})

    @classmethod
    def kitty(cls, **changes) -> CacheConfig:
        """Kitty: 2 bits, 12.5 % of the key channels at 4 bits, sink of 32 tokens."""
        return cls(**changes)

    @classmethod
    def kitty_pro(cls, **changes) -> CacheConfig:
        """Kitty-Pro: Kitty with 25 % of the key channels at 4 bits."""
        return cls(**{"boost": 0.25, **changes})

    @classmethod
    def kitty_plus(cls, **changes) -> CacheConfig:
        """Kitty's bits with less error: channels chosen by sensitivity, ranges shrunk to fit, values rotated.

        Not in the paper. Measured in docs/accuracy.md.
        """
        own = {"selection": "sensitivity", "key_shrink": SHRINKS, "value_shrink": (0.8,), "rotate_values": True}
        return cls(**{**own, **changes})

    @classmethod
    def kitty_pro_plus(cls, **changes) -> CacheConfig:
        """Kitty-Pro at the same bits with less error, as :meth:`kitty_plus`."""
        return cls.kitty_plus(**{"boost": 0.25, **changes})

    @property
    def weighs_queries(self) -> bool:
        """Whether choosing channels needs the queries; not where all or none are boosted."""
        return self.quantized and self.selection in QUERY_SELECTIONS and 0 < self.boost < 1

    def page_format(self, head_dim: int) -> PageFormat:
        """The page format for a head size.

        Raises:
            ValueError: the boost is no whole number of channels at this head size, a fixed list does not fit it, or
                the format does not take the head size.
        """
        if not self.quantized:
            raise ValueError("a full-precision cache has no page format")
        PageFormat(self.page, head_dim, 0, self.value_bits)  # a head size of no format is refused before the boost is
        boosted = round(self.boost * head_dim)
        if abs(boosted - self.boost * head_dim) > 1e-6 * head_dim:
            raise ValueError(
                f"boost {self.boost} of head size {head_dim} is {self.boost * head_dim:g} channels, "
                "not a whole number; "
                f"use {boosted}/{head_dim} = {boosted / head_dim:g}"
            )
        for channels in self.channel_lists():
            if len(channels) != boosted:
                raise ValueError(
                    f"selection lists {len(channels)} channels, "
                    f"but boost {self.boost} of head size {head_dim} is {boosted}"
                )
            if len(set(channels)) != len(channels) or not all(0 <= c < head_dim for c in channels):
                raise ValueError(f"selection must list distinct channels from 0 to {head_dim - 1}, got {channels}")
        return PageFormat(self.page, head_dim, boosted, self.value_bits)

    def channel_lists(self) -> tuple[tuple[int, ...], ...]:
        """The fixed lists of channels: one for all KV heads or one for each; empty where they are chosen by score."""
        if isinstance(self.selection, str):
            return ()
        if self.selection and isinstance(self.selection[0], tuple):
            return self.selection
        return (self.selection,)


def _is_whole(x) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_number(x) -> bool:
    return _is_whole(x) or isinstance(x, (float, np.floating))


def _channel_tuple(selection) -> tuple:
    """A list of channels, or of one list per KV head, as nested tuples of int."""
    if isinstance(selection, (list, tuple, np.ndarray)):
        if all(_is_whole(c) for c in selection):
            return tuple(int(c) for c in selection)
        if all(isinstance(row, (list, tuple, np.ndarray)) and all(_is_whole(c) for c in row) for row in selection):
            return tuple(tuple(int(c) for c in row) for row in selection)
    raise ValueError(
        f"selection must be a name ({', '.join(SELECTIONS)}), a tuple of channel numbers, or one such tuple per KV "
        f"head, got {selection!r}"
    )


def _factors(name: str, factors) -> tuple[float, ...]:
    if not isinstance(factors, (list, tuple, np.ndarray)) or not all(_is_number(f) for f in factors):
        raise ValueError(f"{name} must be a tuple of factors such as (1.0, 0.9, 0.8), got {factors!r}")
    factors = tuple(float(f) for f in factors)
    if not factors or not all(0 < f <= 1 for f in factors):
        raise ValueError(f"{name} must be one or more factors above 0 and up to 1, got {factors}")
    return factors


CACHE_NAMES: tuple[str, ...] = (
    "full",
    "kivi2",
    "kivi2_sink",
    "kivi4",
    "k2v4",
    "k4v2",
    "kitty",
    "kitty_pro",
    "kitty_plus",
    "kitty_pro_plus",
)


def cache_from_name(name: str, **changes) -> CacheConfig:
    """The config whose constructor is called ``name``, ``-`` and ``_`` alike: "kitty-pro" is
    ``CacheConfig.kitty_pro()``.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    known = ", ".join(n.replace("_", "-") for n in CACHE_NAMES)
    if not isinstance(name, str):
        raise ValueError(f"a cache is named by a string, got {name!r}; known caches: {known}")
    key = name.strip().lower().replace("-", "_")
    if key not in CACHE_NAMES:
        how = "; changes to one go like CacheConfig.kitty(boost=0.25)" if ":" in key else ""
        raise ValueError(f"unknown cache {name!r}; known caches: {known}{how}")
    return getattr(CacheConfig, key)(**changes)


def layer_configs(cache: CacheConfig | str | Sequence[CacheConfig], num_layers: int) -> tuple[CacheConfig, ...]:
    """One config per layer from a config, a name, or a list with one config per layer.

    Layers may differ in everything but ``sink`` and ``page``, which decide when a page is handed out; full-precision
    layers mix in.

    Raises:
        ValueError: wrong number of configs, or quantized layers that differ in sink or page.
    """
    if isinstance(cache, str):
        cache = cache_from_name(cache)
    if isinstance(cache, CacheConfig):
        return (cache,) * num_layers
    if not isinstance(cache, (list, tuple)):
        raise ValueError(f"cache must be a CacheConfig, a name, or a list with one of those per layer, got {cache!r}")
    configs = tuple(c if isinstance(c, CacheConfig) else cache_from_name(c) for c in cache)
    if len(configs) != num_layers:
        raise ValueError(f"a list of cache configs needs one per layer: wanted {num_layers}, got {len(configs)}")
    shared = {(c.sink, c.page) for c in configs if c.quantized}
    if len(shared) > 1:
        raise ValueError(f"quantized layers must agree in (sink, page), got {sorted(shared)}")
    return configs
