"""Makes torchvision importable if its compiled operators do not load.

They do not load if torchvision is a CUDA build and torch is a CPU build. Then open_clip and transformers cannot be
imported either, because both import torchvision. Call :func:`prepare_torchvision` before importing torchvision,
open_clip, timm or transformers.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from pathlib import Path
from typing import Any

FAKE_REGISTERED_OPS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_libraries: list[Any] = []  # a torch.library.Library removes its definitions when it is garbage-collected


@functools.cache
def prepare_torchvision() -> None:
    """Declare the operators ``nms`` and ``qnms`` if torchvision cannot load them."""
    spec = None if "torchvision" in sys.modules else importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or operators_load(Path(spec.origin).parent):
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in FAKE_REGISTERED_OPS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SCHEMA)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def operators_load(package: Path) -> bool:
    """Load the compiled operators from torchvision's package directory. Return False if loading fails."""
    import torch

    finder = FileFinder(str(package), (ExtensionFileLoader, EXTENSION_SUFFIXES))
    spec = finder.find_spec("_C")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
