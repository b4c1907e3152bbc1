"""Garbage collection around large libraries."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from pipelines.collector import paused_collector
from pipelines.engines.base import build_worker
from storage_formats.errors import EdjeError
from tests.conftest import REPO

_AT_EXIT = """
import atexit, gc, sys
from pipelines.cli.main import main
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))
sys.argv = ["edje-index", "--version"]
main(ARGUMENTS)
atexit.register(lambda: print("at exit"))
"""


def test_a_worker_is_built_without_collections():
    assert build_worker(gc.isenabled) is False
    assert gc.isenabled()


def test_the_collector_runs_again_after_an_error():
    def fail():
        raise OSError("no model")

    with pytest.raises(EdjeError, match="no model"):
        build_worker(fail)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("arguments", "is_frozen"), [("", True), ("['--version']", False)])
def test_only_a_process_of_the_command_line_skips_the_last_collection(arguments, is_frozen):
    code = _AT_EXIT.replace("ARGUMENTS", arguments)
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["at exit", f"frozen {is_frozen}"]
