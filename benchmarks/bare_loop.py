"""A loop with the minimum work of an index build: it decodes and preprocesses images, and runs the model.

Usage: `python -m benchmarks.bare_loop MODEL IMAGE_LIST --threads N --batch-size N`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image

from edje_index.indexing.image_encoder import ImageEncoder


def batches(encoder: ImageEncoder, paths: list[str], batch_size: int) -> Iterator[torch.Tensor]:
    """Yield batches of decoded and preprocessed images, float32 [b, 3, h, w], where b is at most `batch_size`."""
    for start in range(0, len(paths), batch_size):
        images = []
        for path in paths[start : start + batch_size]:
            with Image.open(path) as image:
                images.append(encoder.preprocess(image.convert("RGB")))
        yield torch.stack(images)


def main(arguments: list[str]) -> None:
    """Encode every image in the list, and print the number of images as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("image_list", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    options = parser.parse_args(arguments)
    encoder = ImageEncoder.open(options.model, device="cpu", threads=options.threads)
    count = 0
    for pixels in batches(encoder, options.image_list.read_text().splitlines(), options.batch_size):
        tokens, _ = encoder.encode(pixels)
        count += len(tokens)
    print(json.dumps({"images": count}))


if __name__ == "__main__":
    main(sys.argv[1:])
