"""Counts the operations of an image encoder, and measures how many of them the processor executes per second.

Usage: `python -m benchmarks.flop_limit MODEL --threads N --dtype NAME`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.linear import Linear

_SIDE = 2048  # rows and columns of the measured product
_SECONDS = 1.0


def flop_per_image(encoder: ImageEncoder) -> int:
    """Return the floating-point operations of matrix products, convolutions and attention per image.

    A multiplication and the following addition are two operations.
    """
    pixels = torch.zeros(1, 3, *encoder.vision.image_size)
    formulas = {torch.ops.mkldnn._linear_pointwise: _linear_operations}
    # torch counts the products of attention only if they are separate operations.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        encoder.encode(pixels)
    operations: int = counter.get_total_flops()
    return operations


def _linear_operations(x_shape: Sequence[int], *_: object, out_shape: Sequence[int], **__: object) -> int:
    return 2 * math.prod(x_shape) * out_shape[-1]


def flop_limit(dtype: torch.dtype) -> float:
    """Return the most floating-point operations per second that a large matrix product reaches."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIDE, _SIDE, generator=generator).to(dtype) for _ in range(2))
    packed = Linear(right, torch.zeros(_SIDE, dtype=dtype))  # in float32 another kernel, on some processors faster
    with torch.inference_mode():
        fastest = min(_fastest(lambda: functional.linear(left, right)), _fastest(lambda: packed(left)))
    return 2 * _SIDE**3 / fastest


def _fastest(product: Callable[[], object]) -> float:
    """Return the seconds of the fastest call of `product` within a second."""
    product()
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        started = time.perf_counter()
        product()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def main(arguments: list[str]) -> None:
    """Print the operations per image and the operations per second as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args(arguments)
    encoder = ImageEncoder.open(options.model, device="cpu", threads=options.threads, dtype=options.dtype)
    print(json.dumps({"flop_per_image": flop_per_image(encoder), "flop_per_second": flop_limit(encoder.dtype)}))


if __name__ == "__main__":
    main(sys.argv[1:])
