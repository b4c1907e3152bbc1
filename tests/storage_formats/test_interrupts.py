"""An exception that a signal handler raises during a fetch leaves nothing behind
that writes, waits or breaks.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from storage_formats import TokenStore
from storage_formats.reading.queues import Queue
from tests.conftest import REPO, same_bits, write_random_index
from tests.storage_formats.reading_cases import ALL, SPEC, linux, needs_queues


@needs_queues
@pytest.mark.parametrize("method", ["put", "wait"])
def test_a_queue_is_emptied_and_dropped_after_an_exception(
    built, whole, monkeypatch, method
):
    """The exception comes after the kernel has started or finished reads, and
    before the queue's caller knows.
    """
    store = TokenStore.open(built[0], "bf16", "direct")
    real = getattr(Queue, method)
    close = Queue.close
    closed = []
    monkeypatch.setattr(Queue, "close", lambda self: (close(self), closed.append(self)))

    def interrupted(self, *arguments):
        real(self, *arguments)
        raise KeyboardInterrupt

    out = store.empty(SPEC.rows)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Queue, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.fetch(range(SPEC.rows), out=out)
        out[:] = 1
        assert same_bits(store.fetch(range(SPEC.rows)), whole["bf16"])
        assert (out == 1).all()
    assert len(closed) == 3


@linux
@pytest.mark.parametrize(
    ("engine", "precision", "count", "shots"),
    [("direct", "fp8", 20, 3)]
    + [
        pytest.param(engine, precision, 500, shots, marks=pytest.mark.slow)
        for engine in ALL
        for precision in SPEC.precisions
        for shots in (1, 3)
    ],
)
def test_interrupted_fetches(tmp_path, engine, precision, count, shots):
    """In a process of its own, which a crash or a hang does not harm."""
    if engine not in ALL:
        pytest.skip(f"no {engine} here")
    spec = replace(SPEC, rows=150, block_shape=(64, 384), precisions=(precision,))
    write_random_index(tmp_path, spec)
    arguments = [str(tmp_path), precision, engine, str(count), str(shots)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage_formats.interrupted_fetches", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=500,
    )
    # no exception was dropped
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == count
