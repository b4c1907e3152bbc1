"""The random changes of `test_lifecycle`, made on an S3-compatible server. Some of them are killed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import pytest

from pipelines import copy_index
from tests.integration.test_lifecycle import ForkingCli, Trial, run_trial
from tests.object_store import s3_server, use_endpoint

pytestmark = pytest.mark.slow  # they start a server
_numbers = itertools.count()


class RemoteTrial(Trial):
    """One sequence of random changes of an index on an object store. An erasure needs a directory."""

    kill_factor: ClassVar[float] = 2.0
    kinds: ClassVar[dict[str, int]] = {kind: share for kind, share in Trial.kinds.items() if kind != "erase"}

    def placed(self, index: Path) -> Path | str:
        url = f"s3://bucket/{self.folder.name}-{next(_numbers)}.edje"
        copy_index(index, url)
        return url

    def directory(self) -> Path:
        """A copy of the current snapshot, in which every file has been compared with its checksum."""
        copy = self.folder / f"copy-{next(_numbers)}.edje"
        copy_index(self.root, copy)
        return copy


def run_remote(tmp_path, bundle, monkeypatch, **options) -> Trial:
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    with s3_server() as endpoint:
        use_endpoint(monkeypatch, endpoint)
        cli = ForkingCli(tmp_path)
        try:
            return run_trial(cli, tmp_path, bundle, kind=RemoteTrial, **options)
        finally:
            cli.close()


def test_changes_on_an_object_store_equal_those_of_a_model(tmp_path, tiny_bundle, monkeypatch):
    trial = run_remote(tmp_path, tiny_bundle, monkeypatch, seed=1, changes=12, kills=0)
    assert trial.model.commits > 3


def test_many_killed_changes_on_an_object_store(tmp_path, tiny_bundle, monkeypatch):
    trial = run_remote(tmp_path, tiny_bundle, monkeypatch, seed=2, changes=40, kills=0.4)
    assert trial.model.commits > 12
    assert sum(trial.model.killed.values()) > 3, trial.model.killed
