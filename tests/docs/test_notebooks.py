"""The notebooks run from top to bottom on an index of the tiny model, and print
what is true of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:zmq", "ignore::RuntimeWarning:zmq"
    ),
]
FOLDER = REPO / "docs/notebooks"


def executed(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The notebook after a run in `folder`, by a kernel in a process of its own."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(
        output.get("text") or output["data"].get("text/plain", "") for output in outputs
    )


def pictures(notebook) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_explore_an_index(template, monkeypatch):
    text = printed(executed(FOLDER / "explore.ipynb", template, monkeypatch))
    assert "1100 rows; (4, 16)" in text
    assert "'failed': 1" in text
    assert "not-an-image" in text
    assert len(re.search(r"re-ranked: +\[(.*?)\]", text)[1].split(",")) == 5


def test_quantization_and_ranking(template, monkeypatch):
    notebook = executed(FOLDER / "quantization.ipynb", template, monkeypatch)
    errors = dict(
        re.findall(
            r"^(\w+) +[\d,]+ bytes per image  relative error ([\d.]+)$",
            printed(notebook),
            re.MULTILINE,
        )
    )
    assert errors["bf16"] == "0.0000"
    assert float(errors["fp8"]) < float(errors["nvfp4"]) < float(errors["sign1"])
    taus = dict(
        re.findall(r"^(\w+) +Kendall's tau ([\d.-]+)$", printed(notebook), re.MULTILINE)
    )
    assert taus["bf16"] == "1.000"
    assert float(taus["fp8"]) > float(taus["nvfp4"])
    assert pictures(notebook) == 1


def test_inside_the_tokens(template, monkeypatch):
    notebook = executed(FOLDER / "tokens.ipynb", template, monkeypatch)
    text = printed(notebook)
    assert "200 images, 4 tokens of 16 values" in text
    assert 1 <= float(re.search(r"median ([\d.]+)", text)[1]) <= 4
    # an image is nearest to itself
    assert text.rstrip().splitlines()[-1].startswith(("[(0, ", "[(0,"))
    assert pictures(notebook) == 2
