"""Checked reading of single values of a configuration: the right type and range, or a problem that names the key.

Python would take many wrong values for right ones: "false" is true, 32.0 and True pass for sizes.
"""

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any


def _number(value: Any) -> float | None:
    """The value as a finite float, or None. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_whole and value >= 1 else None


def _positive(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


def _not_negative(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and number >= 0 else None


def _instance(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else None


def _strings(value: Any) -> list[str] | None:
    is_list = isinstance(value, list | tuple)
    return list(value) if is_list and all(isinstance(item, str) for item in value) else None


# Kind -> (what is wanted, in words; the value converted, or None where it is not of the kind).
_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "whole": ("a whole number of at least 1", _whole),
    "positive": ("a finite number above 0", _positive),
    "not negative": ("a finite number of at least 0", _not_negative),
    "bool": ("true or false", _instance(bool)),
    "string": ("a string", _instance(str)),
    "strings": ("a list of strings", _strings),
    "object": ("an object of keys and values", _instance(Mapping)),
}


def checked(config: Mapping[str, Any], key: str, kind: str, problems: list[str], where: str = "") -> Any:
    """config[key] if it is of the kind (a key of _KINDS), else None and one more problem.

    An absent key and null give None and no problem. where: name of the block that `config` is, for the message.
    """
    value = config.get(key)
    if value is None:
        return None
    wanted, convert = _KINDS[kind]
    converted = convert(value)
    if converted is None:
        problems.append(f"{where}{'.' if where else ''}{key} = {reprlib.repr(value)} (wanted {wanted})")
    return converted
