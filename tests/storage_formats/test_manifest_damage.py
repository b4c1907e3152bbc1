"""An `index.json` with a valid checksum and senseless members is damage, in one
clear error.
"""

from __future__ import annotations

import json

import pytest

from storage_formats import CorruptIndexError, Manifest, verify_index
from storage_formats.format.checksum import json_checksum
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=5, shard_size=4, block_shape=(4, 16), embed_dim=6)


def change(root, **members):
    value = {**json.loads((root / "index.json").read_text()), **members}
    (root / "index.json").write_text(
        json.dumps({**value, "crc32c": json_checksum(value)})
    )


@pytest.mark.parametrize(
    "members",
    [
        {"counts": {"inputs": 5, "indexed": 5, "duplicates": 0, "failed": []}},
        {
            "counts": {
                "inputs": 5,
                "indexed": 5,
                "duplicates": 0,
                "failed": {"empty": None},
            }
        },
        {"counts": []},
        {"shard_table": {"path": "manifest/\0", "bytes": 1, "crc32c": "00000000"}},
        {
            "ann": {
                "kind": "flat",
                "files": [{"path": "ann/\0", "bytes": 1, "crc32c": "00000000"}],
            }
        },
        {"ann": {"kind": "flat", "files": 5}},
        {"ann": []},
        {"precisions": ["bf16"]},
        {"precisions": {}},
        {"shards": "four"},
        {"precisions": [{"name": "bf16", "encoded_from": 5}]},
    ],
)
def test_senseless_members_are_damage(tmp_path, members):
    write_random_index(tmp_path, SPEC)
    change(tmp_path, **members)
    with pytest.raises(CorruptIndexError, match="is missing or has the wrong type"):
        Manifest.load(tmp_path)
    assert [problem.code for problem in verify_index(tmp_path)] == ["manifest"]


def test_counts_that_do_not_add_up_name_the_file(tmp_path):
    write_random_index(tmp_path, SPEC)
    change(tmp_path, counts={"inputs": 5, "indexed": 5, "duplicates": 1, "failed": {}})
    with pytest.raises(
        CorruptIndexError, match=r"index\.json is damaged: .* = 6, not 5; restore"
    ):
        Manifest.load(tmp_path)
