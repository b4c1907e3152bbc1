"""A loop with the minimum work of an index build: it decodes and preprocesses images, and runs the model.

Usage: `python -m benchmarks.bare_loop MODEL IMAGE_LIST --threads N --batch-size N --dtype NAME`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from PIL import Image

from edje_index.indexing.image_encoder import ImageEncoder


def load(encoder: ImageEncoder, paths: list[str]) -> torch.Tensor:
    """Return decoded and preprocessed images, float32 [b, 3, h, w]."""
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(encoder.preprocess(image.convert("RGB")))
    return torch.stack(images)


def main(arguments: list[str]) -> None:
    """Encode every image in the list. Print the number of images, and the seconds of both stages, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("image_list", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args(arguments)
    encoder = ImageEncoder.open(options.model, device="cpu", threads=options.threads, dtype=options.dtype)
    paths = options.image_list.read_text().splitlines()
    count, decode_seconds, model_seconds = 0, 0.0, 0.0
    for start in range(0, len(paths), options.batch_size):
        started = time.perf_counter()
        pixels = load(encoder, paths[start : start + options.batch_size])
        loaded = time.perf_counter()
        count += len(encoder.encode(pixels)[0])
        decode_seconds += loaded - started
        model_seconds += time.perf_counter() - loaded
    print(json.dumps({"images": count, "stage_seconds": {"decode": decode_seconds, "encode": model_seconds}}))


if __name__ == "__main__":
    main(sys.argv[1:])
