"""Random crops of photos, which make up for missing training photos."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from edje_index.captions.reading import read_captions
from edje_index.images.decode import content_hash, decode_rgb
from edje_index.models.filesystem import new_folder

# Ranges of a random crop: its area as a fraction of the area of the photo, and its
# width divided by its height.
_AREA = (0.35, 1.0)
_ASPECT = (3 / 4, 4 / 3)


def write_crops(
    captions: Path,
    *,
    images: Path | None = None,
    count: int = 4,
    size: int = 224,
    out: Path,
) -> None:
    """Write random crops of the photos of CAPTIONS. OUT/list.jsonl lists the photos and
    the crops with their captions, as a source of 'edje-index build'.

    A photo and its crops have the same `image_id`.

    Args:
        images: base directory of relative image paths.
        count: crops per photo.
        size: width and height of a crop, in pixels.
        out: new directory.
    """
    lines = []
    with new_folder(out) as folder:
        for number, item in enumerate(read_captions(captions, images)):
            data = Path(item.path).read_bytes()
            photo = decode_rgb(data)
            # The random numbers depend on the content of the file instead of its path,
            # so that a photo that is moved keeps its crops.
            seed = int(content_hash(data)[:32], 16)
            names = [f"{number}-{crop}.jpg" for crop in range(count)]
            for crop, name in enumerate(names):
                rng = np.random.default_rng([seed, crop])
                random_crop(photo, size, rng).save(folder / name, quality=95)
            values = {"captions": item.captions, "image_id": str(number)}
            lines += [{"path": name, **values} for name in (item.path, *names)]
        (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))


def random_crop(photo: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """Return a random crop of `photo`, resized to `size` x `size` pixels, and mirrored
    with probability 1/2.

    The method is that of Szegedy et al. (2015). The crop has 35 % to 100 % of the area
    of the photo (8 % to 100 % in the paper), and its width is 3/4 to 4/3 of its height.
    A crop that would exceed the width or the height of the photo is cut.
    """
    area = rng.uniform(*_AREA)
    aspect = np.exp(rng.uniform(*np.log(_ASPECT)))
    pixels = photo.width * photo.height * area
    width = min(photo.width, (pixels * aspect) ** 0.5)
    height = min(photo.height, (pixels / aspect) ** 0.5)
    left = rng.uniform(0, photo.width - width)
    top = rng.uniform(0, photo.height - height)
    crop = photo.resize(
        (size, size),
        Image.Resampling.BICUBIC,
        box=(left, top, left + width, top + height),
    )
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return crop
