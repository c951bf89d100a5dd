"""The package as a whole: names, import direction, and what the built archives hold."""

import ast
import graphlib
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


def module_name(path: Path) -> str:
    """The name that a file of the package is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kitty_jax" else ("kitty_jax", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


MODULES = {module_name(path): path for folder in FOLDERS for path in sources(folder)}
# What each part of the house may import, beside itself.
BELOW = {
    "pallas_kernels": set(),
    "cache": {"pallas_kernels"},
    "inference": {"cache", "pallas_kernels"},
    "research": {"inference", "cache", "pallas_kernels"},
    "models": {"cache", "pallas_kernels"},
}


def wrong_imports(part: str, source: str) -> set[str]:
    """Imports of a file in a part of the package that go against :data:`BELOW`."""
    wrong = set()
    for name in imported_names(source):
        package, *rest = name.split(".")
        outside = package not in ("kitty_jax", "models", "pallas_kernels", "scripts", "tests", "")
        if not outside and (package != "kitty_jax" or not rest or rest[0] not in {part} | BELOW[part]):
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


@pytest.mark.parametrize("part", BELOW)
def test_import_direction(part: str) -> None:
    own = {name: path for name, path in MODULES.items() if name.split(".")[1:2] == [part]}
    assert own
    assert not {name: wrong for name, path in own.items() if (wrong := wrong_imports(part, path.read_text()))}


@pytest.mark.parametrize(
    "part, source",
    [
        ("pallas_kernels", "from kitty_jax.cache.config import CacheConfig"),
        ("pallas_kernels", "from kitty_jax import models"),
        ("pallas_kernels", "def f():\n    import kitty_jax"),
        ("cache", "from kitty_jax.research.calibration import load_caches"),
        ("inference", "import kitty_jax.models.decoder"),
        ("research", "from pallas_kernels import packing"),
        ("models", "from ..attention import attend"),
        ("models", "from scripts.generate import main"),
    ],
)
def test_import_direction_check_sees_a_wrong_import(part: str, source: str) -> None:
    assert wrong_imports(part, source)
    assert not wrong_imports(part, "import jax\nfrom kitty_jax.pallas_kernels import packing")


def test_no_import_cycles() -> None:
    """Imports inside functions count too."""
    graph = {}
    for name, path in MODULES.items():
        names = imported_names(path.read_text())
        graph[name] = {x if x in MODULES else x.rpartition(".")[0] for x in names} & MODULES.keys() - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_private_parts_of_jax_have_one_home() -> None:
    """What a new release of JAX may move is imported in one module."""
    private = re.compile(r"jax\._src|jax\.experimental\.mosaic|jaxlib")
    files = [*MODULES.values(), *sources("scripts")]
    found = [p.name for p in files if any(private.match(x) for x in imported_names(p.read_text()))]
    assert found == ["private_jax.py"]


def test_modules_are_short() -> None:
    """At most 350 lines, so that a module has one purpose."""
    files = [*MODULES.values(), *sources("scripts")]
    assert not {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 350}


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
