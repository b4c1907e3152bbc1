"""Cost of a command and its descendants."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import REPO

# A child that takes memory and processor time in a grandchild.
_BUSY = "import time; x = bytearray(100 << 20); end = time.time() + 1.5\nwhile time.time() < end: pass"
_MEASURE = """
import json, sys
from dataclasses import asdict
from benchmarks.process_tree import measure
busy = [sys.executable, "-c", sys.argv[1]]
print(json.dumps(asdict(measure([sys.executable, "-c", f"import subprocess; subprocess.run({busy!r}); print('out')"]))))
"""


def test_descendants_are_accounted_for():
    done = subprocess.run([sys.executable, "-c", _MEASURE, _BUSY], cwd=REPO, capture_output=True, text=True, check=True)
    cost = json.loads(done.stdout)
    assert cost["stdout"] == "out\n"
    assert cost["wall"] >= 1.5
    assert 0.3 < cost["cpu"] < cost["wall"] + 1
    assert cost["peak_pss"] >= 100 << 20
    assert cost["peak_largest_rss"] >= 100 << 20
