"""The rules that hold the packages apart (docs/architecture.md, "The house")."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ORDER = ["storage_formats", "edje_index", "pipelines", "benchmarks"]
# The only places that may import a library at all; a folder stands for everything below it.
HOMES = {
    "ray": ["pipelines/engines/ray_engine.py", "pipelines/engines/ray_train.py"],
    "faiss": ["edje_index/indexing/faiss_index.py"],
    "click": ["pipelines/cli", "benchmarks/cli.py", "benchmarks/commands"],
    "torch": ["edje_index", "benchmarks"],
    "open_clip": ["edje_index"],
    "transformers": ["edje_index"],
    "rich": ["pipelines"],
    "matplotlib": ["edje_index/evaluation/plots.py", "edje_index/evaluation/figures.py", "benchmarks"],
}


def modules() -> list[Path]:
    return sorted(path for package in ORDER for path in (REPO / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, at its top or inside its functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPO)))
def test_imports_point_one_way(path):
    package = path.relative_to(REPO).parts[0]
    above = set(ORDER[ORDER.index(package) + 1 :])
    assert not imported(path) & (above | {"tests"})
    for library, homes in HOMES.items():
        if library in imported(path):
            assert any(path == REPO / home or REPO / home in path.parents for home in homes), library


HEAVY = ["torch", "ray", "faiss", "zarr", "pyarrow", "numba", "open_clip", "transformers", "PIL", "rich", "matplotlib"]


@pytest.mark.parametrize("code", ["import edje_index", "import storage_formats", "import pipelines.cli"])
def test_importing_a_package_loads_nothing_heavy(code):
    script = f"import sys\n{code}\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "[]"


def test_help_loads_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "pipelines.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    assert "build" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {*HEAVY, "numpy"}
