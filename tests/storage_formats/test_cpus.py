"""The number of CPUs that this process may use."""

from __future__ import annotations

import os

import pytest

from storage_formats import threads
from tests.conftest import write_files


def test_without_a_container_the_affinity_decides(tmp_path):
    assert threads.usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/slice/job", {"slice/job/cpu.max": "50000 100000"}, 1),
        ("0::/slice/job", {"cpu.max": "max 100000", "slice/cpu.max": "30 10"}, 3),
        ("0::/slice/job", {"slice/cpu.max": "30 10", "slice/job/cpu.max": "20 10"}, 2),
        # not mounted, as in a container
        ("0::/slice/job", {"cpu.max": "40 10"}, 4),
        ("0::/slice/job", {"cpu.max": "max 100000", "other/cpu.max": "10 10"}, 8),
        (
            "4:memory:/\n1:cpu,cpuacct:/slice/job\n0::/",
            {
                "cpu/slice/cpu.cfs_quota_us": "30",
                "cpu/slice/cpu.cfs_period_us": "10",
                "cpu/slice/job/cpu.cfs_quota_us": "-1",
                "cpu/slice/job/cpu.cfs_period_us": "10",
            },
            3,
        ),
    ],
)
def test_the_quotas_of_all_cgroups_limit_the_cpus(
    tmp_path, monkeypatch, membership, files, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write_files(tmp_path, {"proc/self/cgroup": membership})
    write_files(tmp_path / "sys/fs/cgroup", files)
    assert threads.usable_cpus(tmp_path) == expected


def test_the_environment_limits_the_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert threads.default_threads() == 1
