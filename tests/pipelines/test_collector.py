"""Python's garbage collector beside large libraries."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from pipelines.collector import own_process, paused_collector

if {owned}:
    own_process()
with paused_collector():
    paused = not gc.isenabled()
    objects = [[] for _ in range(100_000)]
print(paused, gc.isenabled(), gc.get_freeze_count() >= 100_000)
"""


@pytest.mark.parametrize("owned", [True, False])
def test_what_was_imported_is_never_visited_in_a_process_of_our_own(owned):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(owned=owned)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", str(owned)]
