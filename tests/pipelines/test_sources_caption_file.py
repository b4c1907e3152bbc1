"""Caption files as sources: every image is an input, with its captions as metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edje_index.images.inputs import InputRef
from pipelines.sources import open_source
from storage_formats.errors import UsageError


def scan(tmp_path: Path, content: Any) -> list[InputRef]:
    for name in ("a.jpg", "val/b.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"photo")
    (tmp_path / "captions.json").write_text(json.dumps(content))
    return list(open_source(str(tmp_path / "captions.json")).iter_inputs())


def test_coco(tmp_path: Path) -> None:
    names = {7: "a.jpg", 8: "val/b.jpg", 9: "gone.jpg"}
    images = [{"id": number, "file_name": name} for number, name in names.items()]
    captions = [(8, "two"), (7, "one"), (9, "three"), (8, "2")]
    annotations = [{"image_id": number, "caption": text} for number, text in captions]
    refs = scan(tmp_path, {"images": images, "annotations": annotations})
    assert [ref.problem for ref in refs] == [None, None, "missing"]
    assert [ref.uri for ref in refs[:2]] == [f"{tmp_path}/a.jpg", f"{tmp_path}/val/b.jpg"]
    assert [ref.metadata for ref in refs] == [
        {"captions": ["one"], "image_id": "7"},
        {"captions": ["two", "2"], "image_id": "8"},
        {"captions": ["three"], "image_id": "9"},
    ]


def test_records_of_one_image_are_joined(tmp_path: Path) -> None:
    refs = scan(tmp_path, [{"image": "a.jpg", "caption": text} for text in ("one", "two")])
    assert [ref.metadata for ref in refs] == [{"captions": ["one", "two"]}]


def test_unusable_files_and_names(tmp_path: Path) -> None:
    (ref,) = scan(tmp_path, [{"image": "https://host/a b.jpg", "caption": "x"}])
    assert (ref.uri, ref.problem) == (f"{tmp_path}/captions.json#1", "bad-list-line")
    unusable: list[Any] = [{"a": 1}, [{"image": "a\0b.jpg", "caption": "x"}], [{"caption": "x"}]]
    for content in unusable:
        with pytest.raises(UsageError, match=r"captions\.json"):
            scan(tmp_path, content)
