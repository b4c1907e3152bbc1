"""Resources of the machine or its container."""

from __future__ import annotations

import shutil

import psutil
import pytest

from pipelines import environment as machine


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


def test_a_containers_limit_bounds_the_memory(cgroup):
    assert 0 < machine.available_memory() <= psutil.virtual_memory().total
    (cgroup / "memory.max").write_text("5000000")
    (cgroup / "memory.current").write_text("2000000")
    assert machine.available_memory() == 3_000_000
    (cgroup / "memory.stat").write_text("anon 1700000\ninactive_file 200000\nactive_file 50000\nshmem 50000\n")
    assert machine.available_memory() == 3_250_000, "the cache of files is given up when memory is short"
    (cgroup / "memory.stat").unlink()
    (cgroup / "memory.current").write_text("6000000")
    assert machine.available_memory() == 0


def test_no_device_file_means_no_device_and_no_process(monkeypatch):
    monkeypatch.setattr(machine, "_GPU_NODES", ())
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert machine.cuda_devices() == 0


@pytest.mark.parametrize(("probe", "devices"), [("print('noise'); print(3)", 3), ("raise OSError", 0), ("", 0)])
def test_torch_is_asked_in_another_process(monkeypatch, tmp_path, probe, devices):
    monkeypatch.setattr(machine, "_GPU_NODES", (str(tmp_path),))
    monkeypatch.setattr(machine, "_PROBE", probe)
    assert machine.cuda_devices() == devices


def test_free_disk_of_a_folder_that_is_still_to_be_made(tmp_path):
    assert machine.free_disk(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
