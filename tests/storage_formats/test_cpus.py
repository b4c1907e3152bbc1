"""The number of CPUs that this process may use."""

from __future__ import annotations

import os

import pytest

from storage_formats import threads


def test_without_a_container_the_affinity_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "QUOTA_FILE", tmp_path / "cpu.max")
    assert threads.usable_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("300000 100000\n", 3),
        ("max 100000\n", 8),
        ("", 8),
    ],
)
def test_the_quota_of_a_container_limits_the_cpus(
    tmp_path, monkeypatch, quota, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(threads, "QUOTA_FILE", tmp_path / "cpu.max")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert threads.usable_cpus() == threads.default_threads() == expected
