"""The installed command, where other modules have the names of its packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPO

SCRIPT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["edje-index"]
START = "import importlib, sys; name, _, call = sys.argv.pop(1).partition(':'); "
START += "sys.exit(getattr(importlib.import_module(name), call)())"


def start(shadow: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command as its script does, with `shadow` before this repository on PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shadow), str(REPO)])}
    command = [sys.executable, "-c", START, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=shadow, env=environment)


def write_module(shadow: Path, name: str) -> None:
    (shadow / f"{name}.py").write_text("raise ImportError('not the package of edje-index')")


def write_package(shadow: Path, name: str) -> None:
    (shadow / name).mkdir()
    (shadow / name / "__init__.py").write_text("")


@pytest.mark.parametrize("write", [write_module, write_package])
@pytest.mark.parametrize("name", ["pipelines", "benchmarks", "edje_index"])
def test_a_module_of_the_same_name_hides_no_package(tmp_path, write, name):
    write(tmp_path, name)
    done = start(tmp_path, "bench", "--help")
    assert done.returncode == 0, done.stderr
    assert "make-synthetic" in done.stdout


def test_processes_that_it_starts_find_the_packages_too(tmp_path):
    shadow, work = tmp_path / "shadow", tmp_path / "work"
    shadow.mkdir()
    work.mkdir()
    write_module(shadow, "pipelines")
    code = "import os, subprocess, sys; from storage_formats import launch; sys.argv = ['edje-index', '--version']; "
    code += "launch.main(); sys.exit(subprocess.run([sys.executable, '-c', 'import pipelines.cli']).returncode)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shadow), str(REPO)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=work, env=environment)
    assert done.returncode == 0, done.stderr
