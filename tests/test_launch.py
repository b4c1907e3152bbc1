"""The installed command, where other modules have the names of its packages."""

import os
import subprocess
import sys
import tomllib

import pytest

from storage_formats.launch import are_packages_hidden
from tests.conftest import REPO

SCRIPT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"][
    "edje-index"
]
START = "import importlib, sys; name, _, call = sys.argv.pop(1).partition(':'); "
START += "sys.exit(getattr(importlib.import_module(name), call)())"


def run_python(folder, words, *path):
    """Run Python in `folder`, with `path` as PYTHONPATH."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=variables,
    )


def write_module(shadow, name):
    (shadow / f"{name}.py").write_text(
        "raise ImportError('not the package of edje-index')"
    )


def write_package(shadow, name):
    (shadow / name).mkdir()
    (shadow / name / "__init__.py").write_text("")


@pytest.mark.parametrize("write", [write_module, write_package])
def test_modules_of_the_same_names_hide_no_package(tmp_path, write):
    for name in ("pipelines", "benchmarks", "edje_index"):
        write(tmp_path, name)
    words = ["-c", START, SCRIPT, "bench", "--help"]
    done = run_python(tmp_path, words, tmp_path, REPO)
    assert done.returncode == 0, done.stderr
    assert "make-synthetic" in done.stdout


def test_processes_that_it_starts_find_the_packages_too(tmp_path):
    write_module(tmp_path, "pipelines")
    child = "subprocess.run([sys.executable, '-c', 'import pipelines.cli'])"
    code = "import subprocess, sys; from storage_formats import launch"
    code += (
        f"; sys.argv[1:] = ['--version']; launch.main(); sys.exit({child}.returncode)"
    )
    done = run_python(REPO / "docs", ["-c", code], tmp_path, REPO)
    assert done.returncode == 0, done.stderr


def run_script(folder, script):
    """Run a script in `folder`, which comes before this repository in the search
    path of Python.
    """
    (folder / "script.py").write_text(
        f"import sys\nsys.path.insert(1, {str(REPO)!r})\n{script}\n"
    )
    return run_python(folder, ["script.py"])


@pytest.mark.parametrize(
    "write",
    [lambda folder, name: (folder / f"{name}.py").write_text(""), write_package],
)
def test_a_project_with_a_module_of_the_same_name_imports_jobs(tmp_path, write):
    write(tmp_path, "pipelines")
    done = run_script(
        tmp_path, "from edje_index import delete_rows; print(delete_rows.__module__)"
    )
    assert (done.returncode, done.stdout) == (
        0,
        "pipelines.jobs.snapshots\n",
    ), done.stderr


def test_a_project_that_hides_a_module_is_told_which(tmp_path):
    write_package(tmp_path, "pipelines")
    write_package(tmp_path / "pipelines", "jobs")
    done = run_script(tmp_path, "from edje_index import delete_rows")
    assert (
        f"ImportError: {tmp_path}/pipelines/jobs has the name of a module of edje-index"
        in done.stderr
    )


def test_a_worker_of_ray_imports_the_packages_before_those_of_a_user(tmp_path):
    for name in ("pipelines", "storage_formats", "edje_index"):
        folder = tmp_path / f"with {name}"
        for package in (folder / name, tmp_path / name):
            package.mkdir(parents=True)
        assert not are_packages_hidden([str(folder)]), (
            "a folder without code hides nothing"
        )
        for package in (folder / name, tmp_path / name):
            (package / "__init__.py").write_text("")
        assert are_packages_hidden([str(folder)])
    # the order in which a worker does this
    code = (
        "import sys; from storage_formats.launch import share_package as hook; hook()"
    )
    code += f"; sys.path.insert(0, {str(tmp_path)!r}); import pipelines.engines"
    code += ", edje_index, storage_formats.errors; print(edje_index.__file__)"
    done = run_python(tmp_path, ["-P", "-c", code], REPO)
    assert done.stdout == f"{REPO}/edje_index/__init__.py\n", done.stderr
