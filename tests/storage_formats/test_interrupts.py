"""An exception that a signal handler raises during a fetch leaves nothing behind that writes, waits or breaks."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from storage_formats import TokenStore
from storage_formats.format.layout import IndexSpec
from storage_formats.reading import engines
from storage_formats.reading.destination import Destination
from storage_formats.reading.queues import Queue, QueuePool
from storage_formats.threads import run_chunks, settle
from tests.conftest import REPO, same_bits, write_random_index
from tests.storage_formats.reading_cases import ALL, SPEC, linux, needs_queues

LARGE = IndexSpec(rows=200, shard_size=64, block_shape=(64, 384), embed_dim=4, precisions=("bf16", "fp8", "nvfp4"))


class Interruption(BaseException):
    """What a signal handler raises."""


@contextlib.contextmanager
def raised_after(seconds: float):
    """Have a signal handler raise `Interruption` in this thread, once."""

    def ring(*_: object) -> None:
        raise Interruption

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@linux
def test_no_helper_works_after_an_exception():
    caller, written = threading.get_ident(), []

    def work(start: int, stop: int) -> None:
        while threading.get_ident() == caller and not written:
            time.sleep(0.01)
        if threading.get_ident() != caller:
            written.append("begins")
            time.sleep(0.3)
            written.append("ends")

    with raised_after(0.1), pytest.raises(Interruption):
        run_chunks(work, 2, 1 << 30, threads=2)
    assert written == ["begins", "ends"]


def test_settling_goes_on_after_an_exception_and_raises_it_at_the_end():
    calls: list[str] = []

    def settles_at_third_attempt() -> None:
        calls.append("attempt")
        if len(calls) < 3:
            raise Interruption

    pending = [lambda: calls.append("other"), settles_at_third_attempt]
    with pytest.raises(Interruption):
        settle(pending)
    assert calls == ["attempt"] * 3 + ["other"]
    assert not pending


@needs_queues
@pytest.mark.parametrize("method", ["put", "wait"])
def test_a_queue_is_emptied_and_dropped_after_an_exception(built, whole, monkeypatch, method):
    """The exception comes after the kernel has started or finished reads, and before the queue's caller knows."""
    store, real = TokenStore.open(built[0], "bf16", "direct"), getattr(Queue, method)
    closed = []
    monkeypatch.setattr(Queue, "close", lambda self, close=Queue.close: (close(self), closed.append(self)))

    def interrupted(self, *arguments):
        real(self, *arguments)
        raise Interruption

    out = store.empty(SPEC.rows)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Queue, method, interrupted)
            with pytest.raises(Interruption):
                store.fetch(range(SPEC.rows), out=out)
        out[:] = 1
        assert same_bits(store.fetch(range(SPEC.rows)), whole["bf16"])
        assert (out == 1).all()
    assert len(closed) == 3


@needs_queues
def test_an_error_returns_no_queue_with_reads_in_flight(built, whole, monkeypatch):
    """The decoder fails on the first piece while other pieces are read into memory that is freed afterwards."""
    store = TokenStore.open(built[0], "fp8", "direct")
    returned = []
    give_back = QueuePool.give_back
    monkeypatch.setattr(
        QueuePool, "give_back", lambda self, item: (returned.append(item.in_flight), give_back(self, item))
    )
    with monkeypatch.context() as patch:
        patch.setattr(Destination, "take", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            store.fetch(range(SPEC.rows))
    assert not returned
    assert same_bits(store.fetch([5]), whole["fp8"][[5]])
    assert returned == [0]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    root = tmp_path_factory.mktemp("large")
    write_random_index(root, LARGE)
    return root


def interrupt(root, precision, engine, count, shots, seconds):
    """Interrupt `count` fetches in a process of its own, which a crash or a hang does not harm."""
    arguments = [str(root), precision, engine, str(count), str(shots), "0"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage_formats.interrupted_fetches", *arguments],
        cwd=REPO, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == count


@linux
@pytest.mark.parametrize(
    "engine", ["direct", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mapped", "portable"))]
)
def test_interrupted_fetches(large, engine):
    if engine not in engines():
        pytest.skip(f"no {engine} here")
    interrupt(large, "fp8", engine, count=20, shots=3, seconds=60)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("precision", LARGE.precisions)
@pytest.mark.parametrize("engine", ALL)
def test_a_thousand_interrupted_fetches(large, precision, engine):
    for shots in (1, 3):
        interrupt(large, precision, engine, count=500, shots=shots, seconds=500)
