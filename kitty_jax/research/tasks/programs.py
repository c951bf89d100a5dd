"""Running a program that a model wrote: a process of its own with limits of time, memory and files.

This keeps accidents in bounds; it is no wall against a program that means harm. Run programs of models that you do not
trust in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_FILE_MB = 16  # largest file that a program may write, its output included

# Runs in the new process, sets limits that a program without root's powers cannot raise, and becomes the program. In a
# process of its own and not between fork and exec of this one, whose threads (JAX has many) make that unsafe.
_LAUNCHER = """
import os, resource, sys
seconds, memory, size = map(int, sys.argv[1:4])
limits = dict(CPU=seconds, AS=memory << 20, FSIZE=size << 20, NOFILE=64, CORE=0)
for name, value in limits.items():
    what = getattr(resource, "RLIMIT_" + name)
    most = resource.getrlimit(what)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(what, (value, value))
os.execv(sys.executable, [sys.executable, "-I", "-B", sys.argv[4]])
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall-clock time, and processor time rounded up.
        memory_mb: address space, in 2^20 bytes. Python alone needs about 50.
    """

    seconds: float = 10.0
    memory_mb: int = 2048

    def __post_init__(self):
        if not self.seconds > 0 or self.memory_mb < 64:
            raise ValueError(f"wanted seconds above 0 and memory_mb 64 or more, got {self.seconds}, {self.memory_mb}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end, and what it said last otherwise ("timed out", or a line of its error)."""

    passed: bool
    detail: str


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Runs a Python program in an empty folder, without this process's environment, and waits for it.

    It passes if it reaches its last line and then exits with status 0; a program that exits early does not.
    Subprocesses that it leaves in its process group are killed. Its network is not closed off.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        folder = Path(name)
        work, mark = folder / "work", folder / secrets.token_hex(16)  # a name that the program cannot guess
        work.mkdir()
        (folder / "program.py").write_text(f"{source}\n\nopen({str(mark)!r}, 'w').close()\n", encoding="utf-8")
        numbers = [str(math.ceil(limits.seconds)), str(limits.memory_mb), str(_FILE_MB)]
        with (folder / "errors").open("w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _LAUNCHER, *numbers, str(folder / "program.py")],
                cwd=work,
                env={"PATH": os.defpath, "HOME": str(work), "TMPDIR": str(work), "PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status = process.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if status == 0 and mark.exists():
                return Outcome(True, "")
            return Outcome(False, _detail(status, errors))


def _detail(status: int | None, errors) -> str:
    if status is None or status == -signal.SIGXCPU:
        return "timed out"
    if status == 0:
        return "exited before its end"
    errors.seek(max(errors.seek(0, os.SEEK_END) - 4096, 0))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"
