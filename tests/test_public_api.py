"""The public names of the packages: each can be imported, is described, and has an
example; every example runs.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from pipelines import build_index
from storage_formats import IndexWriter
from tests.conftest import REPO
from tests.edje_index.published_cases import Case, write_case

PACKAGES = ["storage_formats", "edje_index", "pipelines"]
NAMES = [
    (package, name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if not name.startswith("__")
]
MODULES = [
    ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in sorted((REPO / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
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
    lines = [
        json.dumps({"image": f"{row}.jpg", "captions": [f"photo number {row}"]})
        for row in range(6)
    ]
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(tiny_bundle, folder / "model")
    build_index(
        folder / "photos",
        folder / "photos.edje",
        folder / "model",
        engine="inline",
        threads=1,
    )
    with IndexWriter.create(
        folder / "pages.edje", block_shape=(4, 16), embed_dim=8
    ) as writer:
        writer.append(
            rng.standard_normal((30, 4, 16), np.float32),
            rng.standard_normal((30, 8), np.float32),
        )
    # the tower of the model above
    write_case(folder, Case(vision_dim=32, vision_heads=2))
    return folder


@contextlib.contextmanager
def fresh_files(files: Path) -> Iterator[None]:
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


def undescribed_members(value: type) -> Iterator[str]:
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
