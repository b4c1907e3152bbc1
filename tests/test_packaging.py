"""Wheel and sdist as a user gets them: built, installed without extras into a clean
environment, and used.
"""

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


def run(*command, folder):
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
