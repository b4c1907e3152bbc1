"""The workaround for a torchvision whose operators do not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import pytest

from edje_index.models._torchvision_compat import OPERATORS, prepare_torchvision
prepare_torchvision()
import torch, torchvision, transformers, open_clip
print(all(hasattr(torch.ops.torchvision, name) for name in OPERATORS))
"""


@pytest.mark.slow
def test_everything_that_needs_torchvision_can_be_imported() -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
