"""What is public can be sent to another process, or says what to send instead."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import edje_index
import pipelines
import storage_formats
from edje_index import (
    Client,
    DeviceFetcher,
    LateInteractionSearch,
    TokenDataset,
    TokenIndex,
    delete_rows,
)
from storage_formats import IndexWriter, TokenStore
from storage_formats.remote.objects import ObjectFolder
from tests.conftest import write_arrays

SHAPE = (4, 32)
BLOCKS = np.random.default_rng(0).standard_normal((20, *SHAPE)).astype(np.float32)


def write(root, rows=20):
    write_arrays(root, BLOCKS[:rows], BLOCKS[:rows, 0, :8], shard_size=8)


def error_classes():
    classes = set()
    for package in (storage_formats, edje_index, pipelines):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "__main__" in module.name or ".integrations" in module.name:
                continue
            members = vars(importlib.import_module(module.name)).values()
            classes |= {
                each
                for each in members
                if inspect.isclass(each)
                and issubclass(each, Exception)
                and each.__module__.partition(".")[0]
                in ("storage_formats", "edje_index", "pipelines")
            }
    return sorted(classes, key=lambda each: each.__qualname__)


VALUES = {
    "row_ids": (3, 5),
    "status": 429,
    "retry_after": 2.0,
    "parameter": "out",
}


def example(kind):
    """Return an error with a value for each parameter of its class."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:
        # that of Exception
        return kind("a message")
    for name, each in parameters.items():
        value = VALUES.get(name, f"the {name}")
        if each.kind is each.VAR_POSITIONAL:
            given.append("a message")
        elif each.kind is each.KEYWORD_ONLY:
            named[name] = value
        elif each.kind is not each.VAR_KEYWORD:
            given.append(value)
    return kind(*given, **named)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__qualname__)
def test_an_error_keeps_its_message_and_attributes(kind):
    error = example(kind)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)
    assert str(copy.copy(error)) == str(error)


@pytest.mark.parametrize("kind", ["store", "search"])
def test_a_copy_reads_the_snapshot_of_its_original(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write(Path("i.edje"))
    opened: Any = {
        "store": lambda: TokenStore.open("i.edje"),
        "search": lambda: LateInteractionSearch.open("i.edje"),
    }[kind]()
    sent = pickle.dumps(opened)
    assert len(sent) < 8000
    delete_rows("i.edje", rows=[3])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for each in (opened, pickle.loads(sent), copy.copy(opened)):
        store = each if kind == "store" else each.store
        found = store.fetch([3])[0].astype(np.float32)
        np.testing.assert_allclose(found, BLOCKS[3], rtol=0.01)


def test_a_loader_runs_over_the_rows_that_are_left(tmp_path):
    root = tmp_path / "i.edje"
    write(root)
    delete_rows(root, rows=[3, 8, 19])
    data = TokenDataset(root)
    left = np.delete(BLOCKS, [3, 8, 19], axis=0)
    delete_rows(root, rows=[0])
    loader = DataLoader(data, batch_size=4, num_workers=2)
    for _ in range(2):
        np.testing.assert_allclose(
            torch.cat(list(loader)).float().numpy(), left, rtol=0.01
        )
    assert len(data.row_ids) == len(data) == 17


def test_a_fetcher_is_sent_without_its_buffers(tmp_path):
    write(tmp_path / "i.edje")
    fetcher = DeviceFetcher(TokenStore.open(tmp_path / "i.edje"), "cpu", 3000)
    sent = pickle.dumps(fetcher)
    assert len(sent) < 8000
    assert torch.equal(pickle.loads(sent).fetch([1, 5]), fetcher.fetch([1, 5]))


def test_what_cannot_be_sent_says_so(tmp_path):
    with pytest.raises(TypeError, match="Client cannot be sent"):
        pickle.dumps(Client("http://localhost:1"))
    for kind in (TokenIndex, Client, IndexWriter):
        with pytest.raises(TypeError, match=f"a {kind.__name__} cannot be sent"):
            kind.__new__(kind).__reduce__()
    writer = IndexWriter.create(tmp_path / "i.edje", block_shape=SHAPE, embed_dim=8)
    with pytest.raises(TypeError, match=r"IndexWriter cannot be sent .* one process"):
        pickle.dumps(writer)
    writer.abort()


def test_a_connection_is_made_anew():
    folder = ObjectFolder.open("https://example.org/i.edje")
    assert pickle.loads(pickle.dumps(folder)).url == folder.url
