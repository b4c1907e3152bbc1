"""A worker starts only on a machine that sees the index directory of its job."""

from __future__ import annotations

import re
import shutil

import pytest

from pipelines.jobs.encode import on_shared_directory
from storage_formats.change import locked
from storage_formats.errors import EdjeError


def test_a_worker_starts_on_a_machine_that_sees_the_index(tmp_path):
    with locked(tmp_path):
        assert on_shared_directory(tmp_path, lambda: "worker")() == "worker"


@pytest.mark.parametrize("seen", ["nothing", "a file", "the index of another job"])
def test_a_machine_that_does_not_see_the_index_is_refused(tmp_path, seen):
    root = tmp_path / "index"
    with locked(root):
        make_worker = on_shared_directory(root, lambda: "worker")
        if seen == "the index of another job":
            (root / "build" / "lock").write_text("1 on another machine")
        else:
            shutil.rmtree(root)
        if seen == "a file":
            root.touch()
        with pytest.raises(EdjeError, match=f"does not see the index directory {re.escape(str(root))} of this job"):
            make_worker()
