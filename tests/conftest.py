"""What all tests share: eight CPU devices, strict dtype promotion, GPU tests kept to GPUs, the small model and text."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Read when JAX makes its CPU client, so it has to stand before any test touches an array. GPUs are not affected by it.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Several test processes may share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

from scripts.fetch_demo import ASSETS, CACHE, join_texts

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Where the processes of a run keep compiled programs: the one that starts the others makes and removes the folder.
PROGRAMS = "KITTY_JAX_TEST_PROGRAMS"
if PROGRAMS not in os.environ:
    os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="kitty-jax-tests-")
    atexit.register(shutil.rmtree, os.environ[PROGRAMS], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _quick_compilation() -> None:
    """Programs for the CPU are compiled without LLVM's optimizer, which would be 40 % of the time all tests take.

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 asks for it. What was compiled is kept for the run. Programs for GPUs are left
    alone; processes that tests start inherit what was chosen.
    """
    if jax.default_backend() == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    if jax.default_backend() == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Many tests compile the same program; a fifth of their time.
        seconds = "jax_persistent_cache_min_compile_time_secs"
        for name, value in (("jax_compilation_cache_dir", os.environ[PROGRAMS]), (seconds, 0.3)):
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where JAX sees no GPU; where nothing but they were asked for, that is an error."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or jax.default_backend() == "gpu":
        return
    found = ", ".join(sorted({f"{device.platform} ({device.device_kind})" for device in jax.devices()}))
    reason = f"needs an NVIDIA GPU, but JAX sees only: {found}"
    if "gpu" in config.option.markexpr and len(gpu_items) == len(items):
        raise pytest.UsageError(
            f"-m {config.option.markexpr!r} selects GPU tests alone: {reason}. Install `kitty-jax[cuda]` on a machine "
            "with an NVIDIA GPU, and see that JAX_PLATFORMS does not exclude it."
        )
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _asset(what: str, override: str | None = None) -> Path:
    """The path of fetched data. Without it: a skip for a user, a failure in CI, where nothing may go missing unseen."""
    named = os.environ.get(override) if override else None
    path = Path(named) if named else CACHE / ASSETS[what].target
    if path.exists():
        return path
    if named:
        pytest.fail(f"{override} names {path}, which does not exist", pytrace=False)
    message = f"{path.relative_to(CACHE.parent)} is missing: run `python scripts/fetch_demo.py --what {what}`"
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; KITTY_JAX_SMOLLM2 names another place."""
    return _asset("smollm2", "KITTY_JAX_SMOLLM2")


@pytest.fixture(scope="session")
def essays_text() -> str:
    """The essays of Paul Graham in the order of their file names, joined by an empty line (644,000 characters)."""
    return join_texts(_asset("essays"))
