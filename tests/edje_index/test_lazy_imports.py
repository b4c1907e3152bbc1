"""Importing the package is cheap, and every public name is there when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import edje_index

HEAVY = ("torch", "ray", "faiss", "zarr", "pyarrow", "numba", "open_clip", "transformers", "PIL")
SCRIPT = """
import sys
import edje_index
from edje_index.bundles.info import read_bundle_info
print([name for name in {heavy} if name in sys.modules])
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT.format(heavy=HEAVY)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", edje_index.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(edje_index, name) is getattr(edje_index, name)


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = edje_index.nothing_such
