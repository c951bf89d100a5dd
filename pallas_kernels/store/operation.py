"""Quantize-and-pack into the pool: pages of keys or values go to their records in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kitty_jax.pallas_kernels.implementation import Implementation, choose
from kitty_jax.pallas_kernels.page_format import PageFormat
from kitty_jax.pallas_kernels.quantize import SCORES, Score, quantize_keys, quantize_values
from kitty_jax.pallas_kernels.store.kernel import KINDS, store, unsupported
from kitty_jax.pallas_kernels.store.shape import StoreShape


def store_key_pages(
    pool: Array,
    keys: Array,
    page_ids: Array,
    fmt: PageFormat,
    *,
    score: Score = "magnitude",
    weights: Array | None = None,
    scores: Array | None = None,
    shrink: tuple[float, ...] = (1.0,),
    implementation: Implementation = "auto",
) -> Array:
    """Quantizes pages of keys into their records of the pool.

    Args:
        pool: uint32 [M, K, fmt.key_words]; donate it (or use it in a loop) and it is updated in place.
        keys: [X, K, G, D], X pages.
        page_ids: int32 [X], the record each page goes to; M skips the page. Ids other than M must differ.
        weights, scores: optional float32 [X, K, D], see :func:`.quantize.quantize_keys`, as are ``score`` and
            ``shrink``.

    Returns:
        The pool with the pages written.
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    _check("keys", pool, keys, page_ids, fmt, fmt.key_words)
    if not pool.size or not keys.size:
        return pool
    if choose(implementation, unsupported(keys.dtype, fmt)) == "mosaic":
        shape = StoreShape(
            fmt=fmt,
            is_keys=True,
            kv_heads=keys.shape[1],
            pool=pool.shape[0],
            slots=fmt.page,
            kind=KINDS[keys.dtype.name],
            score=None if scores is not None else score,
            weighted=weights is not None,
            shrink=tuple(shrink),
        )
        vectors = [v for v in (scores, weights) if v is not None] if shape.chooses else []
        ref = jax.new_ref(pool)
        store(ref, keys, page_ids, None, vectors, shape)
        return jax.freeze(ref)
    records = quantize_keys(keys, fmt, score=score, weights=weights, scores=scores, shrink=shrink)
    return write_records(pool, records, page_ids)


def store_value_pages(
    pool: Array,
    values: Array,
    starts: Array,
    page_ids: Array,
    fmt: PageFormat,
    *,
    shrink: tuple[float, ...] = (1.0,),
    implementation: Implementation = "auto",
) -> Array:
    """Quantizes pages of values out of ring buffers into their records of the pool.

    Args:
        pool: uint32 [M, K, fmt.value_words].
        values: [X, K, W, D], W >= G slots; a page is the G slots ``(starts + i) % W``. With W = G it is all of them
            in order.
        starts: int32 [X], from 0 on; not read where W = G.
        page_ids: int32 [X]; M skips the page.
        shrink: see :func:`.quantize.quantize_values`.

    Returns:
        The pool with the pages written.
    """
    _check("values", pool, values, page_ids, fmt, fmt.value_words)
    if not pool.size or not values.size:
        return pool
    reason = unsupported(values.dtype, fmt)
    if len(shrink) > 1:
        reason = f"the kernel takes one shrink factor of values, got {len(shrink)}"
    if choose(implementation, reason) == "mosaic":
        slots = values.shape[2]
        shape = StoreShape(
            fmt=fmt,
            is_keys=False,
            kv_heads=values.shape[1],
            pool=pool.shape[0],
            slots=slots,
            kind=KINDS[values.dtype.name],
            shrink=tuple(shrink),
        )
        ref = jax.new_ref(pool)
        store(ref, values, page_ids, starts if slots > fmt.page else None, [], shape)
        return jax.freeze(ref)
    return write_records(pool, value_records(values, starts, fmt, shrink=shrink), page_ids)


def value_records(values: Array, starts: Array, fmt: PageFormat, *, shrink: tuple[float, ...] = (1.0,)) -> Array:
    """What :func:`store_value_pages` writes, by the reference: uint32 [X, K, fmt.value_words]."""
    if values.shape[2] != fmt.page:
        slots = (starts[:, None] + jnp.arange(fmt.page, dtype=jnp.int32)) % values.shape[2]
        values = jnp.take_along_axis(values, slots[:, None, :, None], axis=2)
    return quantize_values(values, fmt, shrink=shrink)


def write_records(pool: Array, records: Array, page_ids: Array) -> Array:
    """The pool uint32 [M, K, words] with ``records`` [X, K, words] at ``page_ids`` int32 [X]; M skips a record."""
    if records.shape != (*page_ids.shape, *pool.shape[1:]) or records.dtype != pool.dtype:
        raise ValueError(
            f"records must be {pool.dtype}{[*page_ids.shape, *pool.shape[1:]]} for page_ids {list(page_ids.shape)} and "
            f"a pool {list(pool.shape)}, got {records.dtype}{list(records.shape)}"
        )
    return pool.at[page_ids].set(records, mode="drop") if pool.size and records.size else pool


def _check(name: str, pool: Array, pages: Array, page_ids: Array, fmt: PageFormat, words: int) -> None:
    x = page_ids.shape[0] if page_ids.ndim == 1 else -1
    if pool.ndim != 3 or pool.shape[2] != words or pool.dtype != jnp.uint32:
        raise ValueError(f"the pool of {name} must be uint32 [M, K, {words}], got {pool.dtype}{list(pool.shape)}")
    if x < 0 or pages.ndim != 4 or pages.shape[:2] != (x, pool.shape[1]):
        raise ValueError(
            f"page_ids must be [X] and {name} [X, K = {pool.shape[1]}, tokens, head_dim], got {list(page_ids.shape)} "
            f"and {list(pages.shape)}"
        )
    tokens, head_dim = pages.shape[2:]
    if head_dim != fmt.head_dim or tokens < fmt.page or (name == "keys" and tokens != fmt.page):
        raise ValueError(
            f"{name} must end in {'' if name == 'keys' else 'at least '}[{fmt.page}, {fmt.head_dim}], "
            f"got {list(pages.shape)}"
        )
