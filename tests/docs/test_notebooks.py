"""The notebooks run from top to bottom on an index of the tiny model, and print
what is true of it.
"""

import re

import pytest

from tests.conftest import REPO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:zmq", "ignore::RuntimeWarning:zmq"
    ),
]


def executed(name, folder, monkeypatch):
    """What a notebook prints in `folder`, and its number of pictures, after a run by a
    kernel in a process of its own.
    """
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(REPO / f"docs/notebooks/{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    texts = [
        output.get("text") or each.get("text/plain", "")
        for output, each in zip(outputs, data, strict=True)
    ]
    return "\n".join(texts), sum("image/png" in each for each in data)


def test_explore_an_index(template, monkeypatch):
    text, _ = executed("explore", template, monkeypatch)
    assert "1100 rows; (4, 16)" in text
    assert "'failed': 1" in text


def test_quantization_and_ranking(template, monkeypatch):
    text, pictures = executed("quantization", template, monkeypatch)
    errors = dict(re.findall(r"(\w+) +[\d,]+ bytes .* relative error ([\d.]+)", text))
    assert 0 == float(errors["bf16"]) < float(errors["fp8"]) < float(errors["sign1"])
    assert pictures == 1


def test_inside_the_tokens(template, monkeypatch):
    text, pictures = executed("tokens", template, monkeypatch)
    assert "200 images, 4 tokens of 16 values" in text
    assert pictures == 2
