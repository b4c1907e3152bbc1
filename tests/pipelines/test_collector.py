"""Garbage collection around large libraries."""

from __future__ import annotations

import gc

import pytest

from pipelines.engines.base import build_worker
from storage_formats.errors import EdjeError


def test_a_worker_is_built_without_collections():
    assert build_worker(gc.isenabled) is False
    assert gc.isenabled()


def test_the_collector_runs_again_after_an_error():
    def fail():
        raise OSError("no model")

    with pytest.raises(EdjeError, match="no model"):
        build_worker(fail)
    assert gc.isenabled()
