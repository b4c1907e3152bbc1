"""Makes torchvision importable if its compiled operators do not load.

The operators do not load if torchvision is a CUDA build and torch is a CPU build. Then
open_clip and transformers cannot be imported either, because they import torchvision.
Call :func:`prepare_torchvision` before importing torchvision, open_clip, timm or
transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# When torchvision is imported, it registers functions for these operators.
OPERATORS = ("nms", "qnms")
# A torch.library.Library removes its definitions when it is garbage-collected, so it is
# kept here.
_libraries: list[Any] = []


@functools.cache
def prepare_torchvision() -> None:
    """Import torchvision. If the import fails, because the operators of torchvision are
    missing, declare these operators, so that the next import succeeds.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        # torchvision is not installed. A library that needs torchvision reports this.
        pass
    except RuntimeError:
        library = torch.library.Library(  # type: ignore[no-untyped-call]
            "torchvision", "FRAGMENT"
        )
        for name in OPERATORS:
            library.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )  # type: ignore[no-untyped-call]
        _libraries.append(library)
