"""Stop early where the Python of the build is too old: what came, what was wanted, what to change.

    python check_python.py

Runs under any Python since 2.7, so nothing newer than that may stand in this file.
"""

import sys

WANTED = (3, 12)


def problem(version):
    """The message for a Python of `version` (a tuple like sys.version_info), or None where it will do."""
    if tuple(version[:2]) >= WANTED:
        return None
    got = ".".join(str(part) for part in version[:3])
    wanted = ".".join(str(part) for part in WANTED)
    return (
        "kitty-jax needs Python %s or newer, but %s is Python %s.\n"
        "Name a newer one, for example: make demo PYTHON=python%s" % (wanted, sys.executable, got, wanted)
    )


if __name__ == "__main__":
    message = problem(sys.version_info)
    if message:
        sys.exit(message)
