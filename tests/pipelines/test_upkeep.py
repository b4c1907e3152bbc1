"""What `info` says about the upkeep of an index: checks, history, compaction."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from pipelines import compact_index, delete_rows
from pipelines.cli import main
from storage_formats.change import MOST_SNAPSHOTS
from tests.conftest import write_arrays


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    rng = np.random.default_rng(0)
    write_arrays(
        root,
        rng.standard_normal((80, 2, 8), dtype=np.float32),
        rng.standard_normal((80, 4), dtype=np.float32),
        shard_size=8,
    )
    return root


def output(capsys, *words) -> str:
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def described(capsys, index) -> dict:
    return json.loads(output(capsys, "info", index, "--json"))


def test_info_says_when_to_compact(index, tmp_path, capsys):
    value = described(capsys, index)
    assert value["compact"] == []
    assert value["history"] == {"snapshots": 1, "most": MOST_SNAPSHOTS}
    delete_rows(index, rows=range(0, 40, 2))
    assert described(capsys, index)["compact"] == ["20 of 80 rows are deleted"]
    text = output(capsys, "info", index)
    assert re.search("run 'compact' +20 of 80 rows are deleted", text)
    assert re.search(f"history +snapshots 2, most {MOST_SNAPSHOTS}", text)
    compact_index(index, tmp_path / "dense")
    assert described(capsys, tmp_path / "dense")["compact"] == []
