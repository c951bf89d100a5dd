"""scripts/multihost_example.py: two processes of two CPU devices each generate what one device does."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kitty_jax.inference.generate import generate
from kitty_jax.models.registry import random_model
from scripts import multihost_example as script


@pytest.mark.slow
def test_two_processes_generate_what_one_device_does() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(script.__file__).resolve()), "--coordinator", f"localhost:{port}"]
    command += ["--processes", "2", "--new", "100", "--process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen([*command, str(i)], **pipes) for i in range(2)]
    try:
        (out, errors), (_, other) = (process.communicate(timeout=300) for process in both)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], errors + other
    got = [json.loads(line) for line in re.findall(r"^\[[\d, ]+\]$", out, re.MULTILINE)]  # gloo prints lines too
    # 70 prompt tokens and 100 new ones: the longest sequence fills a page of its own.
    wanted = generate(random_model(script.TINY), script.PROMPTS, cache="kitty-pro", max_new_tokens=100).sequences()
    assert got == wanted * 3  # by generate, and each prompt twice by the engine
    assert len(set(map(tuple, wanted))) == 4
