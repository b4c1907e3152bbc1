"""Makes torchvision importable if its compiled operators do not load.

They do not load if torchvision is a CUDA build and torch is a CPU build. Then open_clip
and transformers cannot be imported either, because both import torchvision. Call
:func:`prepare_torchvision` before importing torchvision, open_clip, timm or
transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# torchvision registers functions for these when it is imported
OPERATORS = ("nms", "qnms")
# a torch.library.Library removes its definitions when it is garbage-collected
_libraries: list[Any] = []


@functools.cache
def prepare_torchvision() -> None:
    """Import torchvision. If its operators are missing, declare them first."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        # the library that needs torchvision reports this
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
