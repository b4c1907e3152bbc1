"""A light install: what works without the extras, and the one-line message about a
missing one.
"""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from storage_formats.extras import DISTRIBUTIONS, EXTRAS_OF_MODULE
from tests.conftest import REPO, environment, golden_index

INDEX = golden_index()
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMANDS = {
    "search": ["search", str(INDEX), "a dog"],
    "build": [
        "build",
        str(INDEX),
        "--out",
        "{tmp}/out",
        "--model",
        str(REPO / "tests/golden/release_0_1/model"),
    ],
    "train": [
        "train",
        str(INDEX),
        "--set",
        "loop.steps=1",
        "--out",
        "{tmp}/out",
    ],
}


def run_without_extras(code):
    """Run `code` in a process in which no module of an extra can be imported."""
    script = BLOCK.format(absent=sorted(EXTRAS_OF_MODULE)) + code
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def requirements():
    """Distributions of each extra, those of included extras too."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared: dict[str, list[str]] = project["optional-dependencies"]

    def expand(extra):
        names: set[str] = set()
        for requirement in declared[extra]:
            included = re.match(r"edje-index\[(.*)\]", requirement)
            if included:
                names |= set().union(*(expand(name) for name in included[1].split(",")))
            else:
                names.add(re.match(r"[\w-]+", requirement)[0])
        return names

    return {extra: expand(extra) for extra in declared}


@pytest.mark.parametrize("module", sorted(EXTRAS_OF_MODULE))
def test_named_extras_install_the_module(module):
    distribution = DISTRIBUTIONS.get(module, module)
    of_extras = requirements()
    for extra in EXTRAS_OF_MODULE[module]:
        assert distribution in of_extras[extra], extra


def test_all_holds_every_extra_of_users():
    of_extras = requirements()
    for extra in ("build", "search", "train", "bench", "towers", "serve"):
        assert of_extras[extra] <= of_extras["all"]


def test_a_light_install_reads_verifies_and_quantizes(tmp_path):
    shutil.copytree(INDEX, tmp_path / "index")
    done = run_without_extras(f"""
from pipelines.cli import main
from storage_formats import TokenStore, verify_index
index = {str(INDEX)!r}
print(TokenStore.open(index, "nvfp4").fetch([11, 0]).shape, verify_index(index))
quantize = ["quantize", {str(tmp_path / "index")!r}, "--to", "int8"]
for arguments in (
    ["info", index], ["verify", index], ["bench", "--help"], quantize
):
    assert main(arguments) == 0, arguments
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(2, 4, 16) []")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_extra_that_they_need(command, tmp_path):
    arguments = [argument.format(tmp=tmp_path) for argument in COMMANDS[command]]
    done = run_without_extras(
        f"from pipelines.cli import main\nsys.exit(main({arguments}))"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        f"which is not installed; run: pip install 'edje-index[{command}]'"
    )
    assert "Traceback" not in done.stderr


def test_the_library_names_the_extra_that_it_needs():
    done = run_without_extras(f"""
import edje_index
index = {str(INDEX)!r}
for needs_torch in (
    lambda: edje_index.ModelBundle, lambda: edje_index.TokenIndex.open(index)
):
    try:
        needs_torch()
    except edje_index.MissingExtraError as error:
        print(error)
""")
    assert done.stdout.count("pip install 'edje-index[search]'") == 2, done.stderr
