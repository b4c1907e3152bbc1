"""Signals that stop a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from pipelines.progress.events import stop_on_signals
from storage_formats import IndexSpec
from storage_formats.shard_check import check_shard
from tests.conftest import write_random_index

THREE_SIGNALS = """
import os, signal
from pipelines.progress.events import stop_on_signals
with stop_on_signals():
    for _ in range(3):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pass
print("still here")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_insists(number, capfd):
    before = signal.getsignal(number)
    with stop_on_signals() as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), number)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert signal.Signals(number).name in capfd.readouterr().err


def test_a_third_signal_ends_the_process():
    done = subprocess.run([sys.executable, "-c", THREE_SIGNALS], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""


def test_a_thread_cannot_handle_signals_and_runs_without():
    seen = []

    def work():
        with stop_on_signals() as should_stop:
            seen.append(should_stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_on_signals() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_verify_stops_after_the_shards_that_are_being_checked(tmp_path, monkeypatch, run):
    write_random_index(tmp_path / "index", IndexSpec(rows=20, shard_size=1, block_shape=(1, 4), embed_dim=2))
    checked = []

    def interrupted(*shard):
        checked.append(shard)
        if len(checked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return check_shard(*shard)

    monkeypatch.setattr("storage_formats.verify.check_shard", interrupted)
    code, out, _ = run("verify", tmp_path / "index", "--json")
    assert (code, json.loads(out)["error"]) == (1, "stopped; not all files were checked")
    assert len(checked) < 20
