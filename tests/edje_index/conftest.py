"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random weights with 4 x 16 blocks."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    create_untrained_bundle(path, sizes=TINY)
    return path


@pytest.fixture
def tiny_model(tiny_bundle: Path) -> ModelBundle:
    return ModelBundle.load(tiny_bundle)
