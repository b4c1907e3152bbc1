"""Random crops of photos: each is most of the photo, upright, and has its captions."""

import json

import numpy as np
from PIL import Image

from models.crops import write_crops


def gradient(width, height):
    """Red grows to the right, green downwards, from 0 to 255."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(
        np.stack([across, down, np.zeros_like(down)], axis=2).astype(np.uint8)
    )


def test_crops_have_the_captions_of_their_photo_and_do_not_depend_on_its_path(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        gradient(40, 30).save(path)
    captions = tmp_path / "captions.jsonl"
    items = [{"path": str(path), "captions": ["a dog"]} for path in paths]
    captions.write_text("\n".join(map(json.dumps, items)))
    write_crops(captions, count=2, size=24, out=tmp_path / "out")
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "list.jsonl").read_text().splitlines()
    ]
    names = [str(paths[0]), "0-0.jpg", "0-1.jpg", str(paths[1]), "1-0.jpg", "1-1.jpg"]
    assert [line["path"] for line in lines] == names
    assert [line["image_id"] for line in lines] == ["0"] * 3 + ["1"] * 3
    assert all(line["captions"] == ["a dog"] for line in lines)
    crops = [(tmp_path / "out" / name).read_bytes() for name in names if "jpg" in name]
    assert crops[:2] == crops[2:]
    assert crops[0] != crops[1]
