"""Signals that stop a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipelines.progress.events import stop_on_signals
from storage_formats import IndexSpec
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

A_CHECK_THAT_HANGS = """
import sys, time
import storage_formats.verify
from pipelines.cli import main
def check_shard(*shard):
    print("checking", flush=True)
    time.sleep(60)

storage_formats.verify.check_shard = check_shard
sys.exit(main())
"""

AN_INTERRUPT_THAT_BECOMES_ANOTHER_ERROR = """
import contextlib, os, signal, sys
from pipelines.cli.main import cli, main
def invoke(context):
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    raise ValueError("could not determine the shape")
cli.invoke = invoke
sys.exit(main())
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
    done = subprocess.run(
        [sys.executable, "-c", THREE_SIGNALS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_ctrl_c_is_an_interruption_whatever_error_a_library_makes_of_it():
    words = [
        sys.executable,
        "-c",
        AN_INTERRUPT_THAT_BECOMES_ANOTHER_ERROR,
        "info",
        "index",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "error: interrupted\n",
    )


def test_a_second_signal_ends_a_verification_whose_checks_hang(tmp_path):
    write_random_index(tmp_path / "index", IndexSpec(1, 1, (1, 16), 6))
    words = [
        sys.executable,
        "-c",
        A_CHECK_THAT_HANGS,
        "verify",
        str(tmp_path / "index"),
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "checking\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_signal_that_is_ignored_stays_so():
    # as nohup does
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
