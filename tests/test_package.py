"""The package as a whole: names, import direction, and what the built archives hold."""

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import jax
import pytest

import kitty_jax
from scripts.check_dependencies import chain_to
from scripts.check_python import WANTED, problem

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("kitty_jax", "models", "pallas_kernels")
# module: (what it imports, the extra that brings it)
NEEDS_EXTRA = {"kitty_jax.research.lm_eval_adapter": ("lm_eval", "eval")}


def sources(folder: str) -> list[Path]:
    """The Python files of one top-level folder, without what its symlinks lead to."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if path.resolve().is_relative_to(ROOT / folder))


def imported_names(source: str) -> set[str]:
    """Dotted names that a file imports, at any depth: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def wrong_imports(folder: str, source: str) -> set[str]:
    """Imports of a file in `folder` that go against pallas_kernels <- kitty_jax <- models <- scripts."""
    wrong = set()
    for name in imported_names(source):
        parts = name.split(".")
        outside = parts[0] != "kitty_jax"
        layer = "kitty_jax" if len(parts) < 2 or parts[1] not in FOLDERS else parts[1]
        allowed = {
            "pallas_kernels": {"pallas_kernels"},
            "kitty_jax": {"pallas_kernels", "kitty_jax"},
            "models": set(FOLDERS),
        }[folder]
        relative_out = name.startswith("..")
        bare = parts[0] in ("models", "pallas_kernels", "scripts", "tests")
        if relative_out or bare or (not outside and layer not in allowed):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("name", ["models", "pallas_kernels"])
def test_bare_name_is_refused(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"`{name}`" in last
    assert f"kitty_jax.{name}`" in last


@pytest.mark.parametrize("name", ["models", "pallas_kernels"])
def test_subpackages_are_relative_symlinks(name: str) -> None:
    assert os.readlink(ROOT / "kitty_jax" / name) == f"../{name}"
    assert importlib.import_module(f"kitty_jax.{name}").__name__ == f"kitty_jax.{name}"


def test_version_is_the_one_of_pyproject() -> None:
    assert kitty_jax.__version__ == PROJECT["version"]


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(kitty_jax.__path__, "kitty_jax.")]
    assert {"kitty_jax.models", "kitty_jax.pallas_kernels"} <= set(names)
    assert len(names) == sum(len(sources(folder)) for folder in FOLDERS) - 1  # kitty_jax/__init__.py is not listed
    for name in names:
        needs, extra = NEEDS_EXTRA.get(name, (None, None))
        if needs and importlib.util.find_spec(needs) is None:
            with pytest.raises(ImportError, match=re.escape(f"kitty-jax[{extra}]")):
                importlib.import_module(name)
        else:
            assert importlib.import_module(name).__name__ == name


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_direction(folder: str) -> None:
    wrong = {path.name: found for path in sources(folder) if (found := wrong_imports(folder, path.read_text()))}
    assert not wrong


@pytest.mark.parametrize(
    "folder, source",
    [
        ("pallas_kernels", "from kitty_jax.cache.config import CacheConfig"),
        ("pallas_kernels", "from kitty_jax import models"),
        ("pallas_kernels", "def f():\n    import kitty_jax"),
        ("kitty_jax", "import kitty_jax.models.decoder"),
        ("kitty_jax", "from pallas_kernels import packing"),
        ("models", "from ..attention import attend"),
        ("models", "from scripts.generate import main"),
    ],
)
def test_import_direction_check_sees_a_wrong_import(folder: str, source: str) -> None:
    assert wrong_imports(folder, source)
    assert not wrong_imports(folder, "import jax\nfrom kitty_jax.pallas_kernels import packing")


def test_tests_run_with_strict_promotion() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        _ = jax.numpy.ones(1, "float32") + jax.numpy.ones(1, "bfloat16")


@pytest.mark.parametrize("expression, code, message", [("", 0, "1 passed, 1 skipped"), ("gpu", 4, "sees only: cpu")])
def test_gpu_tests_are_never_passed_over_in_silence(tmp_path: Path, expression: str, code: int, message: str) -> None:
    test = "import pytest\n@pytest.mark.gpu\ndef test_on_gpu(): assert False\ndef test_anywhere(): pass\n"
    (tmp_path / "test_it.py").write_text(test)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest", "-m", expression]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert message in result.stdout + result.stderr


def test_core_dependencies_do_not_reach_torch() -> None:
    assert chain_to("torch", PROJECT["dependencies"]) is None
    assert chain_to("jaxlib", PROJECT["dependencies"]) == ["jax", "jaxlib"]  # the walk does follow what is installed


def test_python_check_says_what_came_and_what_was_wanted() -> None:
    assert PROJECT["requires-python"] == f">={WANTED[0]}.{WANTED[1]}"
    assert problem((*WANTED, 0, "final", 0)) is None
    assert problem((4, 0, 0)) is None
    message = problem((3, 9, 18, "final", 0))
    for part in ("Python 3.12 or newer", "3.9.18", "PYTHON="):
        assert part in message


def test_built_archives(tmp_path: Path) -> None:
    """Wheel and source archive hold the two linked folders as files, and the wheel imports from another folder."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    result = subprocess.run(build, capture_output=True, text=True)  # the wheel is built from the source archive
    assert result.returncode == 0, result.stdout + result.stderr

    expected = {f"kitty_jax/{path.relative_to(ROOT / 'kitty_jax')}" for path in sources("kitty_jax")}
    for folder in ("models", "pallas_kernels"):
        expected |= {f"kitty_jax/{path.relative_to(ROOT)}" for path in sources(folder)}

    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = sdist.name.removesuffix(".tar.gz")
        members = {member.name.removeprefix(f"{top}/"): member for member in archive.getmembers()}
    assert {name for name in members if name.endswith(".py")} == expected
    assert all(member.isfile() for name, member in members.items() if name.endswith(".py"))
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= set(members)

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {name for name in names if ".dist-info/" not in name} == expected

    code = "import kitty_jax.models, kitty_jax.pallas_kernels as p; print(kitty_jax.__version__, p.__file__, sep='\\n')"
    # -P: the folder that it runs in is not searched, so what it finds is the unpacked wheel.
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        PROJECT["version"],
        str(tmp_path / "site" / "kitty_jax" / "pallas_kernels" / "__init__.py"),
    ]
