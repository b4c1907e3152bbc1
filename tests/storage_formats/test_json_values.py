"""JSON becomes dataclasses, and a value of a wrong type is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

from storage_formats.format.file_check import FileEntry
from storage_formats.format.json_values import read_json, write_json


class Recall(TypedDict, total=False):
    value: float


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, int]
    failed: dict[str, int]
    file: FileEntry | None = None
    recall: Recall | None = None
    others: Any = None


GOOD = {"name": "a", "sizes": [1, 2], "failed": {"empty": 3}}


def test_members_are_read_and_unknown_ones_left_out():
    file = {"path": "rows/0.parquet", "bytes": 5, "crc32c": "0000000a"}
    # a member that stays a dictionary keeps unknown members
    known = {**GOOD, "file": file, "recall": {"value": 1, "unknown": "kept"}}
    part = Part(
        "a", (1, 2), {"empty": 3}, FileEntry("rows/0.parquet", 5, 10), known["recall"]
    )
    assert read_json(Part, {**known, "unknown": 1}) == part
    assert write_json(part) == known
    assert read_json(tuple[Part, ...], [known, known]) == (part, part)
    assert write_json(read_json(Part, GOOD)) == GOOD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 5}, "it.name must be of type str, got 5"),
        ({"sizes": [1, "2"]}, "it.sizes must be of type int, got '2'"),
        ({"sizes": {}}, "it.sizes must be of type tuple"),
        ({"failed": {"empty": None}}, "it.failed must be of type int, got None"),
        ({"recall": {"value": "1"}}, "it.recall.value must be of type float"),
        ({"recall": []}, "it.recall must be of type dict"),
        ({"file": {"path": "rows/0.parquet"}}, "bytes"),
    ],
)
def test_a_wrong_type_is_named(change, message):
    with pytest.raises((TypeError, KeyError), match=message):
        read_json(Part, {**GOOD, **change})


def test_a_missing_member_is_named():
    with pytest.raises(TypeError, match="'failed'"):
        read_json(Part, {"name": "a", "sizes": [1, 2]})
