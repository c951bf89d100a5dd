"""A cache as one word, for command lines and tables: a name, perhaps with changes to its fields, or a file."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Sequence
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
    """What :func:`cache_from_spec` takes, or ``@FILE``: one config per layer, as :func:`save_caches` (or
    ``scripts/calibrate.py``) wrote them.

    Raises:
        ValueError, OSError: see :func:`cache_from_spec` and :func:`load_caches`.
    """
    return load_caches(Path(spec[1:])) if spec.startswith("@") else cache_from_spec(spec)


def save_caches(caches: Sequence[CacheConfig], path: Path) -> None:
    """A config per layer as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": [dataclasses.asdict(c) for c in caches]}, indent=1) + "\n")


def load_caches(path: Path) -> tuple[CacheConfig, ...]:
    """What :func:`save_caches` wrote.

    Raises:
        ValueError: the file is of another kind, or a layer's fields are no cache; the message names the file and layer.
    """
    wanted = 'wanted {"layers": [fields of CacheConfig, ...]}, as calibrate.py writes'
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise ValueError(f"{path}: {wanted}; {error}") from error
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path}: {wanted}, for one layer or more; got {json.dumps(value):.60}")
    caches = []
    for number, fields in enumerate(layers):
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, layer {number}: {wanted}; got {json.dumps(fields):.60}")
        try:
            caches.append(CacheConfig(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, layer {number}: {error}") from error
    return tuple(caches)


def _value(text: str, as_tuple: bool):
    if as_tuple:
        return tuple(_value(part, False) for part in text.split("/"))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
