"""The public names of the packages: each can be imported, is described, and has an
example; every example runs.
"""

import contextlib
import doctest
import importlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import edje_index
from edje_index import Client, CrossEncoder, LateInteractionSearch, TokenIndex
from edje_index.bundles.bundle import write_feature_bundle
from edje_index.integrations.documents import find_images, rerank_metadata
from pipelines import build_index, copy_index, delete_rows
from pipelines.jobs.snapshots import roll_back
from pipelines.service.server import listen
from storage_formats import (
    RowIdError,
    TokenStore,
    UsageError,
)
from tests.conftest import REPO, write_arrays
from tests.edje_index.published_cases import Case, write_case

PACKAGES = ["storage_formats", "edje_index"]
NAMES = [
    (package, name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if not name.startswith("__")
]
MODULES = [
    ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
    for package in (*PACKAGES, "pipelines")
    for path in sorted((REPO / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_bundle):
    """A directory with the files that the examples name: photos, captions, a model,
    indexes, a published checkpoint.
    """
    folder = tmp_path_factory.mktemp("files") / "examples"
    (folder / "photos").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for row in range(6):
        Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(
            folder / "photos" / f"{row}.jpg"
        )
    for name, key, value in (
        ("captions.jsonl", "image", "{}.jpg"),
        ("list.jsonl", "path", "photos/{}.jpg"),
    ):
        lines = [
            json.dumps({key: value.format(row), "caption": f"photo number {row}"})
            for row in range(6)
        ]
        (folder / name).write_text("\n".join(lines))
    shutil.copytree(tiny_bundle, folder / "model")
    write_feature_bundle(folder / "model", folder / "features")
    for source, name, model in (
        ("photos", "photos.edje", "model"),
        ("list.jsonl", "features.edje", "features"),
    ):
        build_index(
            folder / source, folder / name, folder / model, engine="inline", threads=1
        )
    write_arrays(
        folder / "pages.edje",
        rng.standard_normal((30, 4, 16), np.float32),
        rng.standard_normal((30, 8), np.float32),
    )
    edje_index.add_ann(folder / "pages.edje")
    # the tower of the model above
    write_case(folder, Case(vision_dim=32, vision_heads=2))
    return folder


@contextlib.contextmanager
def fresh_files(files):
    """`files` as the working directory, restored afterwards; their path stays,
    because the index holds it.
    """
    saved = files.with_name("saved")
    shutil.copytree(files, saved)
    try:
        with contextlib.chdir(files):
            yield
    finally:
        shutil.rmtree(files)
        saved.rename(files)


def undescribed_members(value):
    """Yield the names of public methods and properties of a class that have no
    docstring.
    """
    for name in vars(value):
        member = getattr(value, name)
        is_member = inspect.isroutine(member) or isinstance(member, property)
        if not name.startswith("_") and is_member and not inspect.getdoc(member):
            yield name


@pytest.mark.parametrize(
    ("package", "name"), NAMES, ids=[f"{package}.{name}" for package, name in NAMES]
)
def test_every_name_is_described_by_an_example(package, name):
    value = getattr(importlib.import_module(package), name)
    description = inspect.getdoc(value) or ""
    assert doctest.DocTestParser().get_examples(description), (
        f"the docstring of {name} has no example"
    )
    assert list(undescribed_members(value) if inspect.isclass(value) else []) == []
    assert not inspect.isclass(value) or value.__repr__ is not object.__repr__
    assert value.__module__ in MODULES, f"no test runs the example of {name}"


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module_run(module, files):
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for examples in doctest.DocTestFinder().find(importlib.import_module(module)):
        if examples.examples:
            with fresh_files(files):
                runner.run(examples)
    assert runner.tries > 0
    assert runner.failures == 0


def rows_of_late_interaction(k):
    search = LateInteractionSearch.open("pages.edje")
    return [hit.row_id for hit in search.search(np.ones((1, 16)), k, row_ids=range(9))]


def rolled_back(snapshot):
    """The change that restores a snapshot, written to a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy_index("photos.edje", f"{folder}/copy.edje")
        delete_rows(f"{folder}/copy.edje", [1])
        return roll_back(f"{folder}/copy.edje", snapshot).change


# For each argument, a number, and a call with it.
NUMBERS: dict[str, tuple[float, Callable[[Any, TokenIndex], Any]]] = {
    "Hits.first": (2, lambda n, index: index.search("a", 3).first(n)),
    "Hits.at_least": (0.5, lambda n, index: index.search("a", 3).at_least(n)),
    "CrossEncoder top_k": (
        1,
        lambda n, index: CrossEncoder(index).rank("a", [3, 1], n),
    ),
    "re-rankers": (
        3,
        lambda n, index: rerank_metadata(index, "a", [{"id": n}], "id", 1),
    ),
    "re-rankers top_n": (
        1,
        lambda n, index: rerank_metadata(index, "a", [{"id": 1}] * 2, "id", n),
    ),
    "retrievers k": (2, lambda n, index: find_images(index, "a", n, None, None)),
    "retrievers pool": (2, lambda n, index: find_images(index, "a", 2, n, None)),
    "fetch": (3, lambda n, index: index.store.fetch([n]).tolist()),
    "empty": (3, lambda n, index: index.store.empty(n).shape),
    "iter_fetch": (
        2,
        lambda n, index: [len(each) for each in index.store.iter_fetch([[1]], n)],
    ),
    "late interaction": (3, lambda n, _: rows_of_late_interaction(n)),
    "snapshot": (0, lambda n, _: len(TokenStore.open("photos.edje", snapshot=n))),
    "roll_back": (0, lambda n, _: rolled_back(n)),
    "Client timeout": (1.5, lambda n, _: Client("http://a", timeout=n).close()),
    "listen": (0, lambda n, _: listen("127.0.0.1", n).close()),
}


def test_a_build_and_an_update_take_numbers_of_numpy(files, tmp_path):
    numbers = {"threads": 1, "shard_size": 4, "batch_size": 2, "max_pixels": 10_000}
    built = build_index(
        files / "photos",
        tmp_path / "new",
        files / "model",
        engine="inline",
        dedupe=np.True_,
        max_failed=np.float32(0.5),
        **{name: np.int64(number) for name, number in numbers.items()},
    )
    assert built.rows == 6
    options = {"retry_failed": np.True_, "max_vanished": np.float32(0.5)}
    updated = edje_index.update_index(tmp_path / "new", engine="inline", **options)
    assert updated.unchanged == 6


@pytest.fixture(scope="module")
def opened(files):
    return TokenIndex.open(files / "photos.edje")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers_and_others_are_refused(name, files, opened):
    number, call = NUMBERS[name]
    kind = np.int64 if isinstance(number, int) else np.float32
    with contextlib.chdir(files):
        assert call(kind(number), opened) == call(number, opened)
        for wrong in (-1, float("nan"), "3", True, np.bool_(True), [2], -np.float64(2)):
            with pytest.raises((UsageError, RowIdError)):
                call(wrong, opened)


def test_a_row_id_may_be_a_whole_float(opened):
    ranked = [
        rerank_metadata(opened, "a", [{"id": row}], "id", None) for row in (1, 1.0)
    ]
    assert ranked[0] == ranked[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_complete(package):
    module: ModuleType = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = module.nothing_such
    namespace: dict[str, object] = {}
    exec(f"from {package} import *", namespace)
    assert set(module.__all__) <= namespace.keys()
