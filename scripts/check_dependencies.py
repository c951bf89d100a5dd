"""Check that an installed distribution does not require torch, directly or through something else.

python scripts/check_dependencies.py [DISTRIBUTION]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BANNED = "torch"


def chain_to(banned: str, requirements: Iterable[str]) -> list[str] | None:
    """The shortest chain of distribution names from `requirements` to `banned`, or None where there is none.

    Follows the metadata of what is installed; a required distribution that is not installed ends its chain.
    """
    banned = canonicalize_name(banned)
    queue = [(text, []) for text in requirements]
    seen = set()
    while queue:
        text, path = queue.pop(0)
        requirement = Requirement(text)
        extras = requirement.extras or {""}
        name = canonicalize_name(requirement.name)
        if name == banned:
            return [*path, name]
        key = (name, frozenset(extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            children = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for child in children:
            marker = Requirement(child).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                queue.append((child, [*path, name]))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("distribution", nargs="?", default="kitty-jax", help="with extras if need be: kitty-jax[dev]")
    name = parser.parse_args().distribution
    metadata.version(Requirement(name).name)  # raises PackageNotFoundError, so an absent distribution never passes
    chain = chain_to(BANNED, [name])
    if chain:
        raise SystemExit(f"{name} must not require {BANNED}, but does: {' -> '.join(chain)}. Change pyproject.toml.")
    print(f"{name} requires no {BANNED}")


if __name__ == "__main__":
    main()
