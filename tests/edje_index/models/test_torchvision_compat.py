"""The workaround for a torchvision whose operators do not load."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edje_index.models._torchvision_compat import FAKE_REGISTERED_OPS, operators_load

SCRIPT = """
import pytest

from edje_index.models._torchvision_compat import prepare_torchvision
prepare_torchvision()
import torch, torchvision, transformers, open_clip
print(all(hasattr(torch.ops.torchvision, name) for name in {names}))
"""


@pytest.mark.slow
def test_everything_that_needs_torchvision_can_be_imported() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(names=FAKE_REGISTERED_OPS)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "True"


def test_tells_a_sound_library_from_a_broken_and_a_missing_one(tmp_path: Path) -> None:
    missing, broken, sound = (tmp_path / name for name in ("missing", "broken", "sound"))
    for folder in (missing, broken, sound):
        folder.mkdir()
    (broken / "_C.so").write_bytes(b"not a library")
    spec = importlib.util.find_spec("_ctypes")
    assert spec is not None
    assert spec.origin is not None
    shutil.copy(spec.origin, sound / "_C.so")
    assert [operators_load(folder) for folder in (missing, broken, sound)] == [False, False, True]
