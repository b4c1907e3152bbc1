"""Paths that a stranger wrote into an index or a bundle: those that could lead out of
its directory are refused by every reader, before a file is opened.
"""

import functools
import json
import operator

import pytest

from edje_index.bundles.info import read_bundle_info
from edje_index.errors import ModelError
from edje_index.scoring.weights import DirectionWeights
from storage_formats import CorruptIndexError, Manifest
from storage_formats.format.checksum import json_checksum
from storage_formats.format.json_values import read_json
from storage_formats.format.places import Directory
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import (
    FileEntry,
    read_shard_table,
    write_shard_table,
)
from tests.conftest import write_random_index
from tests.storage_formats.test_manifest_damage import EVERYTHING, SPEC, change

NAMES = [
    "/etc/passwd",
    "//etc/passwd",
    "..",
    "../outside",
    "rows/../../outside",
    "rows/..",
    "",
    ".",
    "./rows",
    "rows//0.parquet",
    "rows/0.parquet/",
    "rows/\0",
    "rows/\n",
    "..\\outside",
    "C:\\outside",
    "\ud800",
    "r" * 256,
]


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile") / "index"
    write_random_index(root, SPEC)
    return Directory(root)


def entries(value, *path):
    """The place of each entry of a file in `value`, which is JSON."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        if "path" in value:
            yield path
        for key, each in value.items():
            yield from entries(each, *path, key)


def test_every_entry_of_a_manifest_is_checked(layout):
    change(layout.root, **EVERYTHING)
    text = layout.manifest.read_text()
    places = list(entries(json.loads(text)))
    assert len(places) == 5
    for place in places:
        for name in NAMES:
            value = json.loads(text)
            functools.reduce(operator.getitem, place, value)["path"] = name
            value["crc32c"] = json_checksum(value)
            with pytest.raises(CorruptIndexError, match="is damaged"):
                Manifest.parse(json.dumps(value).encode(), "index.json")


def bundle_with(name):
    """The contents of a `bundle.json` that lists the file `name`."""
    members = {key: {} for key in ("vision", "adapter", "joint")}
    texts = ("trained", "notes", "fingerprint", "encoder_fingerprint")
    return {
        "format": "edje-model-bundle",
        "format_version": 2,
        **members,
        **dict.fromkeys(texts, ""),
        "score": DirectionWeights().to_json(),
        "files": {name: {"bytes": 1, "sha256": ""}},
    }


def test_shard_tables_receipts_and_bundles_are_checked(layout):
    for name in NAMES:
        entry = FileEntry(name, 1, 1)
        receipt = ShardReceipt(0, "plan", 4, 4, 0, {}, (entry,), {})
        with pytest.raises(ValueError, match=r"is not the path of a file|surrogates"):
            read_json(ShardReceipt, receipt.to_json())

        (layout.root / "bundle.json").write_text(json.dumps(bundle_with(name)))
        with pytest.raises(ModelError, match=r"not the path of a file|surrogates"):
            read_bundle_info(layout.root)

        # Arrow cannot store a lone surrogate.
        if name != "\ud800":
            table = write_shard_table(layout, [(0, entry)])
            with pytest.raises(CorruptIndexError, match="is not the path of a file"):
                read_shard_table(layout, table)
