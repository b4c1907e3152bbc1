"""Wheel and sdist as a user gets them: built, installed without extras into a clean
environment, and used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import edje_index
from tests.conftest import REPO, golden_index
from tests.smoke import CHECKS, NOT_CHECKED, extras

INDEX = golden_index()
LIGHT = {
    "click",
    "edje-index",
    "google-crc32c",
    "ml-dtypes",
    "numba",
    "numpy",
    "psutil",
    "pyarrow",
    "rich",
}
HEAVY = {"faiss-cpu", "open-clip-torch", "ray", "torch", "transformers", "zarr"}
# measured: 480 on Linux
LIGHT_MEGABYTES = 700
READER = """
import importlib.metadata, json, sys
from pathlib import Path
from storage_formats import TokenStore, verify_index

store = TokenStore.open(sys.argv[1], "fp8")
assert store.fetch([11, 0, 3]).shape == (3, 4, 16)
assert verify_index(sys.argv[1]) == []
distributions = list(importlib.metadata.distributions())
files = (
    Path(item.locate_file(file))
    for item in distributions
    for file in item.files or []
)
size = sum(path.stat().st_size for path in files if path.is_file())
print(json.dumps({"names": [item.name for item in distributions], "bytes": size}))
"""


def test_one_version_number():
    assert version("edje-index") == edje_index.__version__


def test_every_extra_is_tried_before_a_release():
    assert CHECKS.keys() | NOT_CHECKED.keys() == extras() | {""}
    assert not CHECKS.keys() & NOT_CHECKED.keys()


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, (
        f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(
        ".*", "*.egg-info", "build", "dist", "__pycache__", "tests", "results", "docs"
    )
    shutil.copytree(REPO, folder / "source", ignore=ignored)
    run(
        sys.executable,
        "-m",
        "build",
        folder / "source",
        "--outdir",
        folder / "dist",
        folder=folder,
    )
    sdist = next((folder / "dist").glob("*.tar.gz"))
    return sdist, next((folder / "dist").glob("*.whl"))


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_same_modules(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(built[1]) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {"storage_formats/SPEC.md", "pipelines/cli/main.py"} <= packaged <= names
    assert re.search(rf"-{re.escape(edje_index.__version__)}\b", built[1].name)


@pytest.mark.slow
def test_light_install_reads_and_verifies(built, tmp_path):
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    run(
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        built[1],
        folder=tmp_path,
    )
    told = json.loads(
        run(folder / "bin/python", "-c", READER, INDEX, folder=tmp_path).stdout
    )
    names = {re.sub("[-_.]+", "-", name).lower() for name in told["names"]}
    assert names >= LIGHT
    assert not names & HEAVY
    assert told["bytes"] < LIGHT_MEGABYTES * 1e6


@pytest.mark.slow
def test_the_package_index_would_accept_the_files(built, tmp_path):
    told = run(
        sys.executable, "-m", "twine", "check", "--strict", *built, folder=tmp_path
    ).stdout
    assert told.count("PASSED") == 2


@pytest.mark.parametrize("newer", [True, False])
def test_ci_runs_the_tests_on_the_newest_python_too(tmp_path, newer):
    """`make` and the interpreters are scripts that say what they are asked."""
    programs = tmp_path / "bin"
    pyenv = tmp_path / "pyenv/versions"
    scripts = {
        programs / "make": 'echo "make $*"',
        tmp_path / ".venv/bin/python": "echo 3.11",
        # of another version than its name, and one that does not start
        programs / "python3.13": "exit 1",
        pyenv / "3.13.0/bin/python": f"exit {0 if newer else 127}",
        pyenv / "3.14.0/bin/python": "exit 0",
    }
    for script, line in scripts.items():
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    # The interpreters of this machine are not on the search path.
    for tool in ("bash", "dirname", "sed", "sort"):
        (programs / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path / name)
    done = subprocess.run(
        [tmp_path / ".ci/run"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": str(programs), "PYENV_ROOT": str(pyenv.parent)},
    )
    first, second = done.stdout.splitlines()
    assert first == "make test"
    newest = pyenv / "3.13.0/bin/python"
    if newer:
        assert second == f"make suite VENV=.venv-newest PYTHON={newest}"
    else:
        assert "no newer Python than 3.11" in second
