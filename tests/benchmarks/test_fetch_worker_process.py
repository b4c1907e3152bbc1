"""The parent's end of a worker."""

import subprocess
import sys

from tests.conftest import REPO

# The signal that is hardest to time: right after the thread that limits the wait was started.
_INTERRUPTED = """
import signal, threading
from benchmarks.fetch.worker_process import WorkerProcess
begin = threading.Thread.start
def start(thread):
    begin(thread)
    signal.raise_signal(signal.SIGINT)
threading.Timer.start = start
with WorkerProcess({}) as worker:
    worker.wait()
"""


def test_an_interrupted_wait_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
