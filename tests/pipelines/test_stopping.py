"""Signals that stop a job."""

import os
import pkgutil
import signal
import subprocess
import sys
import time

import pytest

from pipelines import delete_rows
from pipelines.jobs.quantize import add_ann
from pipelines.progress.events import stop_on_signals
from storage_formats import IndexSpec, Manifest, TokenStore, verify_index
from storage_formats.format.layout import Layout
from tests.conftest import environment, write_random_index

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


def start(program, *words):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("pipelines.jobs.snapshots.read_index_rows", ["delete", "--rows", "1"]),
        ("pipelines.jobs.snapshots.edited_values", ["edit", "--rows=1", "--set=a=b"]),
        ("edje_index.indexing.faiss_build._trained", ["ann", "build"]),
        ("storage_formats.change.earlier_snapshots", ["gc", "--keep", "1"]),
    ],
)
def test_ctrl_c_stops_every_change_before_its_commit(
    tmp_path, run, monkeypatch, function, words
):
    root = tmp_path / "index"
    write_random_index(root, IndexSpec(8, 4, (1, 16), 6))
    add_ann(root)
    delete_rows(root, [0])
    before = (root / "index.json").read_bytes()
    original = pkgutil.resolve_name(function)

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(function, interrupted)
    code, _, said = run(*words, root)
    assert code == 130, said
    assert (root / "index.json").read_bytes() == before
    assert said.splitlines()[-1].startswith("error: "), said


@pytest.mark.parametrize("words", [["compact", "--out=dense"], ["delete", "--erase"]])
def test_ctrl_c_stops_the_copying_of_rows_and_the_same_command_resumes(
    tmp_path, run, words, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "index"
    write_random_index(root, IndexSpec(80, 2, (1, 16), 6))
    delete_rows(root, range(0, 80, 2))
    changed = tmp_path / "dense" if words[0] == "compact" else root
    program = "import sys; from pipelines.cli import main; sys.exit(main())"
    with start(program, *words, root) as process:
        while not any(Layout(changed).receipts.glob("*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 130, said
    assert "0 shards are finished. To resume: edje-index " in said
    assert Manifest.load(root).snapshot.number == 1
    run.ok(*words, root)
    row_ids = range(40) if words[0] == "compact" else range(1, 80, 2)
    assert TokenStore.open(changed).row_ids().tolist() == [*row_ids]
    assert verify_index(changed) == []


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
    with start(THREE_SIGNALS) as process:
        assert process.communicate()[0] == ""
    assert process.returncode == 1


def test_ctrl_c_is_an_interruption_whatever_error_a_library_makes_of_it():
    with start(AN_INTERRUPT_THAT_BECOMES_ANOTHER_ERROR, "info", "index") as process:
        assert process.communicate() == ("", "error: interrupted\n")
    assert process.returncode == 130


def test_a_second_signal_ends_a_verification_whose_checks_hang(tmp_path):
    write_random_index(tmp_path / "index", IndexSpec(1, 1, (1, 16), 6))
    with start(A_CHECK_THAT_HANGS, "verify", tmp_path / "index") as process:
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
