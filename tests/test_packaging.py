"""Wheel and sdist as a user gets them: built, installed without extras into a clean environment, and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import skimage

import edje_index
from tests.conftest import REPO
from tests.smoke import CHECKS, NOT_CHECKED, Installation, extras

INDEX = REPO / "tests" / "golden" / "release_0_1" / "index"
LIGHT = {"click", "edje-index", "google-crc32c", "ml-dtypes", "numba", "numpy", "psutil", "pyarrow", "rich"}
HEAVY = {"faiss-cpu", "open-clip-torch", "ray", "torch", "transformers", "zarr"}
LIGHT_MEGABYTES = 700  # measured: 480 on Linux
READER = """
import importlib.metadata, json, sys
from pathlib import Path
from storage_formats import TokenStore, verify_index

store = TokenStore.open(sys.argv[1], "fp8")
assert store.fetch([11, 0, 3]).shape == (3, 4, 16)
assert verify_index(sys.argv[1]) == []
distributions = list(importlib.metadata.distributions())
files = (Path(item.locate_file(file)) for item in distributions for file in item.files or [])
size = sum(path.stat().st_size for path in files if path.is_file())
print(json.dumps({"names": [item.name for item in distributions], "bytes": size}))
"""


def test_one_version_number():
    assert version("edje-index") == edje_index.__version__


def test_every_extra_is_tried_before_a_release():
    assert CHECKS.keys() | NOT_CHECKED.keys() == extras() | {""}
    assert not CHECKS.keys() & NOT_CHECKED.keys()


def test_a_command_that_fails_stops_the_release(tmp_path):
    installed = Installation(Path(sys.executable).parent, tmp_path)
    assert installed.run("python", "-c", "print(1)") == "1\n"
    with pytest.raises(SystemExit, match="exit code 3"):
        installed.run("python", "-c", "raise SystemExit(3)")


def run(*command: str | Path, folder: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree; fails unless the exit code is `expect`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == expect, f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "tests", "results", "docs")
    shutil.copytree(REPO, folder / "source", ignore=ignored)
    run(sys.executable, "-m", "build", folder / "source", "--outdir", folder / "dist", folder=folder)
    sdist, wheel = next((folder / "dist").glob("*.tar.gz")), next((folder / "dist").glob("*.whl"))
    return sdist, wheel


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that holds the wheel, without extras."""
    folder = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", built[1], folder=folder)
    return folder / "bin"


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_same_modules(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(built[1]) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {"storage_formats/SPEC.md", "pipelines/cli/main.py"} <= packaged <= names
    assert re.search(rf"-{re.escape(edje_index.__version__)}\b", built[1].name)


@pytest.mark.slow
def test_light_install_reads_and_verifies(clean, tmp_path):

    told = json.loads(run(clean / "python", "-c", READER, INDEX, folder=tmp_path).stdout)
    names = {re.sub("[-_.]+", "-", name).lower() for name in told["names"]}
    assert names >= LIGHT
    assert not names & HEAVY
    assert told["bytes"] < LIGHT_MEGABYTES * 1e6


@pytest.mark.slow
def test_the_package_index_would_accept_the_files(built, tmp_path):
    told = run(sys.executable, "-m", "twine", "check", "--strict", *built, folder=tmp_path).stdout
    assert told.count("PASSED") == 2


@pytest.fixture
def borrowing(built: tuple[Path, Path], tmp_path: Path) -> Path:
    """The `bin` folder of an environment that holds the wheel. Other packages come from this process's environment."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", built[1], folder=tmp_path)
    own = next((folder / "lib").glob("python*/site-packages"))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_holds_a_trained_model_that_searches(borrowing, tmp_path):
    wheels = ["--wheels", os.environ["EDJE_WHEELS"]] if "EDJE_WHEELS" in os.environ else []
    run(borrowing / "edje-index", "model", "get", *wheels, folder=tmp_path)
    shown = json.loads(run(borrowing / "edje-index", "model", "show", "model", "--json", folder=tmp_path).stdout)
    assert shown["trained"]
    assert shown["fingerprint"] in (REPO / "models/flickr8k-dinov2-small/MODEL_CARD.md").read_text()
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("coffee.png", "motorcycle_left.png", "astronaut.png", "chelsea.png"):
        shutil.copy(Path(skimage.__file__).parent / "data" / name, photos)
    build = ["build", photos, "--out", "photos.edje", "--model", "model", "--engine", "inline"]
    run(borrowing / "edje-index", *build, folder=tmp_path)
    found = run(borrowing / "edje-index", "search", "photos.edje", "a motorcycle", "--json", folder=tmp_path).stdout
    assert Path(json.loads(found)["hits"][0]["uri"]).name == "motorcycle_left.png"


@pytest.mark.slow
def test_light_install_has_the_command_line(clean, tmp_path):
    assert "search" in run(clean / "edje-index", "--help", folder=tmp_path).stdout
    assert "12" in run(clean / "edje-index", "info", INDEX, folder=tmp_path).stdout
    assert "sound" in run(clean / "edje-index", "verify", INDEX, folder=tmp_path).stdout
    assert edje_index.__version__ in run(clean / "edje-index", "--version", folder=tmp_path).stdout
    refused = run(clean / "edje-index", "search", INDEX, "a dog", folder=tmp_path, expect=1)
    assert refused.stderr.count("\n") == 1
    assert "pip install 'edje-index[search]'" in refused.stderr
