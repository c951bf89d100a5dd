"""A cache as one word, for command lines and tables: a name, perhaps with changes to its fields, or a file."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from kitty_jax.cache.config import CacheConfig, cache_from_name


def cache_from_spec(spec: str) -> CacheConfig:
    """``NAME`` or ``NAME:FIELD=VALUE,FIELD=VALUE``: "kitty:boost=0.25,selection=range,key_shrink=1/0.9/0.8".

    Fields are those of :class:`CacheConfig`; the values of a tuple are separated by ``/``.

    Raises:
        ValueError: unknown name or field, or a value that the config refuses.
    """
    name, _, changes = spec.partition(":")
    known = {field.name: field.type for field in dataclasses.fields(CacheConfig)}
    fields = {}
    for change in filter(None, changes.split(",")):
        field, equals, value = (part.strip() for part in change.partition("="))
        if not equals or field not in known:
            raise ValueError(f"{spec!r}: wanted FIELD=VALUE with a field of {', '.join(known)}, got {change!r}")
        fields[field] = _value(value, as_tuple="/" in value or known[field].startswith("tuple"))
    return cache_from_name(name, **fields)


def caches_from_spec(spec: str) -> CacheConfig | tuple[CacheConfig, ...]:
    """What :func:`cache_from_spec` takes, or ``@FILE``: one config per layer, as :func:`.calibration.save_caches` (or
    ``scripts/calibrate.py``) wrote them.

    Raises:
        ValueError, OSError: see :func:`cache_from_spec` and :func:`.calibration.load_caches`.
    """
    if not spec.startswith("@"):
        return cache_from_spec(spec)
    from kitty_jax.research.calibration import load_caches

    return load_caches(Path(spec[1:]))


def _value(text: str, as_tuple: bool):
    if as_tuple:
        return tuple(_value(part, False) for part in text.split("/"))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
