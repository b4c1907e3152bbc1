"""Failed inputs are tried again: those that work get rows, the others keep being listed."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.failed_rows import failed_rows
from pipelines.jobs.build import run_build
from pipelines.jobs.retry_failed import RetryResult, run_retry_failed
from pipelines.planning.config import AppendConfig
from pipelines.progress.events import JobStopped
from storage_formats import read_rows, verify_index
from tests.pipelines.conftest import write_photo


def retry(root: Path, should_stop: Callable[[], bool] = lambda: False) -> RetryResult:
    result = run_retry_failed(AppendConfig(root, (), engine="inline"), lambda event: None, should_stop)
    assert result.inputs == result.indexed + result.duplicates + result.failed
    assert verify_index(root) == []
    return result


def failures(root: Path) -> dict[str, str]:
    return {Path(row["uri"]).name: row["reason"] for row in failed_rows(root)}


def indexed(root: Path) -> set[str]:
    rows = read_rows(root, columns=["uri", "status"]).to_pylist()
    return {Path(row["uri"]).name for row in rows if row["status"] == "indexed"}


@pytest.fixture
def built(config: Callable[..., Any], photos: Path) -> Path:
    """An index of ten photos; 05, 07 and 09 failed."""
    for name in ("05.jpg", "09.jpg"):
        (photos / name).write_bytes((photos / name).read_bytes()[:300])
    run_build(config(), lambda event: None)
    assert failures(config().out) == {"05.jpg": "truncated", "07.jpg": "not-an-image", "09.jpg": "truncated"}
    return Path(config().out)


def test_what_works_is_appended_and_the_rest_stays_listed(built, photos):
    write_photo(photos / "05.jpg", 5)
    (photos / "09.jpg").unlink()
    result = retry(built)
    assert (result.retried, result.inputs, result.indexed, result.failed) == (3, 3, 1, 2)
    assert (result.first_row, result.rows, result.snapshot) == (12, 3, 1)
    assert result.failed_by_reason == {"missing": 1, "not-an-image": 1}
    assert failures(built) == {"07.jpg": "not-an-image", "09.jpg": "missing"}
    assert "05.jpg" in indexed(built)
    assert len(read_rows(built)) == 10


def test_nothing_changes_if_every_input_fails_again(built):
    before = sorted(path for path in built.rglob("*"))
    result = retry(built)
    assert (result.failed, result.rows, result.snapshot) == (3, 0, 0)
    assert sorted(path for path in built.rglob("*")) == before


def test_a_new_reason_is_recorded_although_nothing_works(built, photos):
    (photos / "07.jpg").write_bytes(b"")
    assert retry(built).snapshot == 1
    assert failures(built)["07.jpg"] == "empty"


def test_content_that_another_row_has_gets_no_row(built, photos):
    (photos / "05.jpg").write_bytes((photos / "00.jpg").read_bytes())
    result = retry(built)
    assert (result.indexed, result.duplicates, result.failed, result.snapshot) == (0, 1, 2, 1)
    assert "05.jpg" not in failures(built)


def test_members_of_archives(config, photos, tmp_path):
    def pack(broken: bytes) -> None:
        (photos / "07.jpg").write_bytes(broken)
        with tarfile.open(tmp_path / "photos.tar", "w") as archive:
            for path in sorted(photos.glob("0*.jpg")):
                archive.add(path, path.name)

    pack(b"no photo")
    run_build(replace(config(), sources=(str(tmp_path / "photos.tar"),)), lambda event: None)
    assert list(failures(config().out)) == ["photos.tar!07.jpg"]
    write_photo(photos / "70.jpg", 70)
    pack((photos / "70.jpg").read_bytes())
    assert retry(config().out).indexed == 1
    assert failures(config().out) == {}


def test_all_members_of_an_archive_that_was_truncated(config, photos, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for path in sorted(photos.glob("0[0-6].jpg")):
            archive.add(path, path.name)
    whole = (tmp_path / "photos.tar").read_bytes()
    (tmp_path / "photos.tar").write_bytes(whole[:7000])
    run_build(replace(config(), sources=(str(tmp_path / "photos.tar"),)), lambda event: None)
    before = len(indexed(config().out))
    (tmp_path / "photos.tar").write_bytes(whole)
    result = retry(config().out)
    assert result.failed == 0
    assert before < 6
    assert len(indexed(config().out)) == 6  # 03 repeats 01
    assert failures(config().out) == {}


def test_captions_of_a_list_are_kept(config, photos, tmp_path):
    listing = tmp_path / "list.jsonl"
    lines = [{"path": "photos/00.jpg", "caption": "a dog"}, {"path": "photos/07.jpg", "caption": "a cat"}]
    listing.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"path": "ftp://x.org/a.jpg"}]))
    run_build(replace(config(), sources=(str(listing),)), lambda event: None)
    write_photo(photos / "07.jpg", 7)
    assert retry(config().out).indexed == 1
    assert set(read_rows(config().out)["caption"].to_pylist()) == {"a dog", "a cat", None}
    assert failures(config().out) == {"a.jpg": "not-a-local-path"}


def test_a_stopped_retry_resumes(built, photos):
    write_photo(photos / "05.jpg", 5)
    with pytest.raises(JobStopped):
        retry(built, should_stop=lambda: True)
    assert (built / "build/append.json").exists()
    assert retry(built).indexed == 1


def test_the_command(built, photos, run):
    write_photo(photos / "05.jpg", 5)
    code, output, errors = run("retry-failed", built, "--engine", "inline", "--quiet")
    assert code == 0
    assert "3 failed rows tried again: 3 inputs = 1 indexed + 0 duplicates + 2 failed" in output
    assert "2 inputs failed again: not-an-image 1, truncated 1" in errors
