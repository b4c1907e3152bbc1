"""The checks of the machine, the packages and the disk."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines.doctor import disk, examine, packages
from pipelines.doctor.disk import disk_findings, measure_reads, measure_with_fio
from pipelines.doctor.packages import package_findings, shadow_findings
from storage_formats.format.manifest import CommittedIndex
from storage_formats.launch import PACKAGES
from storage_formats.token_store import TokenStore
from storage_formats.writing.snapshots import commit_deletion, plan_deletion
from tests.command_line import run_here
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "index"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(disk, "_SECONDS", 0.02)
    monkeypatch.setattr(disk, "_SCRATCH_ROWS", 512)
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)


@pytest.fixture
def index(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "index"))


def by_check(findings):
    return {finding["check"]: finding for finding in findings}


def test_an_index_is_checked_and_its_disk_measured(index):
    result = run_here("doctor", index)
    findings = by_check(result["findings"])
    assert result["usable"] is True
    with TokenStore.open(index) as store:
        assert findings["index"]["values"]["rows"] == len(store)
        assert findings["reading"]["values"]["record_bytes"] == store.record_bytes
    assert findings["reading"]["values"]["records_per_second"] > 0
    assert findings["asynchronous reads"]["values"]["engines"]
    assert {finding["level"] for finding in findings.values()} <= {"ok", "advice"}
    assert all(bool(finding["advice"]) == (finding["level"] != "ok") for finding in findings.values())


def test_a_damaged_index_is_a_problem_with_exit_code_1(index):
    file = next((index / "tokens").glob("*/c.*"))
    file.write_bytes(file.read_bytes()[:-1])
    result = run_here("doctor", index, expect=1)
    problems = [finding for finding in result["findings"] if finding["level"] == "problem"]
    assert result["usable"] is False
    assert [finding["check"] for finding in problems] == ["index"]
    assert file.name in problems[0]["result"]


def test_a_directory_is_measured_with_a_temporary_index_that_is_removed(tmp_path):
    findings = {finding.check: finding for finding in disk_findings(tmp_path)}
    assert findings["reading"].values["record_bytes"] == 64 * 384 * 2
    assert findings["free space"].values["free_bytes"] > 0
    assert not list(tmp_path.iterdir())


def test_little_free_space_is_said_and_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_disk", lambda path: 1000)
    monkeypatch.setattr(disk, "measure_reads", lambda *_: pytest.fail("measured"))
    findings = {finding.check: finding for finding in disk_findings(tmp_path)}
    assert (findings["free space"].level, findings["reading"].level) == ("advice", "advice")


def delete_rows(root, row_ids):
    index = CommittedIndex.open(root)
    commit_deletion(index, plan_deletion(index, row_ids))


def test_deleted_rows_are_not_read(index):
    with TokenStore.open(index) as store:
        row_ids = store.row_ids()
    delete_rows(index, row_ids[1:])
    assert measure_reads(index, "bf16").records_per_second > 0
    delete_rows(index, row_ids[:1])
    assert measure_reads(index, "bf16") is None


def test_a_path_that_is_no_directory_is_wrong_usage(run, tmp_path):
    code, out, err = run("doctor", str(tmp_path / "absent"))
    assert (code, out) == (2, "")
    assert "absent is not a directory" in err


def requirements(monkeypatch, *lines):
    monkeypatch.setattr(packages, "requires", lambda name: list(lines))
    return {finding.check: finding for finding in package_findings()}


def test_missing_and_unsuited_packages_are_named(monkeypatch):
    found = requirements(
        monkeypatch,
        "numpy>=2",
        "no-such-package>=1",
        'click>=99; extra == "search"',
        'edje-index[search]; extra == "build"',
        'no-such-extra>=1; extra == "build"',
    )
    core, search, build, train = (
        next(finding for name, finding in found.items() if part in name)
        for part in ("Python", "[search]", "[build]", "[train]")
    )
    assert (core.level, core.values) == ("problem", {"numpy": version("numpy"), "no-such-package": None})
    assert "missing: no-such-package" in core.result
    assert search.level == "advice"
    assert f"click {version('click')} (needs >=99)" in search.result
    assert build.level == "advice"
    assert build.values == {"no-such-extra": None}
    assert "pip install 'edje-index[build]'" in build.advice
    assert train.level == "ok"


def test_packages_of_a_source_tree_without_metadata_are_unknown(monkeypatch):
    def absent(name):
        raise packages.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "requires", absent)
    (finding,) = package_findings()
    assert finding.level == "advice"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_of_the_same_name_is_found(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert [finding.level for finding in shadow_findings()] == ["ok"]  # a plain directory hides no package
    (tmp_path / name / "__init__.py").write_text("raise SystemExit\n")
    (finding,) = shadow_findings()
    assert finding.level == "advice"
    assert finding.values == {"name": name, "path": str(tmp_path / name / "__init__.py")}


def test_a_check_that_fails_is_a_finding_and_the_others_run(monkeypatch):
    def broken():
        raise OSError(5, "Input/output error", "/proc/x")

    monkeypatch.setattr(examine, "package_findings", broken)
    findings = list(examine.examine(None))
    assert findings[0].level == "problem"
    assert "/proc/x" in findings[0].result
    assert "memory" in {finding.check for finding in findings}


@pytest.mark.slow
def test_fio_reads_the_same_file(index, monkeypatch):
    monkeypatch.undo()
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    file = next((index / "tokens").glob("bf16/c.*"))
    before = file.read_bytes()
    speed = measure_with_fio(file, 100)
    assert speed.record_bytes == 4096
    assert speed.records_per_second > 0
    assert file.read_bytes() == before
