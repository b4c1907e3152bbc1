"""Indexes for the tests of reading."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from storage_formats import TokenStore
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_random_index
from tests.storage_formats.reading_cases import HOLES, ODD, SPEC


@pytest.fixture(scope="module")
def built(disk):
    root = Path(tempfile.mkdtemp(dir=disk))
    return root, write_random_index(root, SPEC, failed=HOLES)


@pytest.fixture(scope="module")
def sound(request, tmp_path_factory):
    """An index of the shape SPEC of the module, and its blocks."""
    root = tmp_path_factory.mktemp("sound") / "index"
    return root, write_random_index(root, request.module.SPEC)


@pytest.fixture
def index(sound, tmp_path):
    """`sound` in a copy that a test may change."""
    return Path(shutil.copytree(sound[0], tmp_path / "index")), sound[1]


@pytest.fixture(scope="module")
def odd(disk):
    root = Path(tempfile.mkdtemp(dir=disk))
    return root, write_random_index(root, ODD)


@pytest.fixture(scope="module")
def many_shards(disk):
    root = Path(tempfile.mkdtemp(dir=disk))
    return root, write_random_index(root, IndexSpec(60, 4, (2, 8), 4))


@pytest.fixture(scope="module")
def whole(built):
    """All blocks of each precision, read by the simplest engine."""
    return {
        name: TokenStore.open(built[0], name, "portable").fetch(range(SPEC.rows))
        for name in SPEC.precisions
    }
