"""Receipts, the files that record committed shards during a build (SPEC.md section
11).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storage_formats.atomic import Json
from storage_formats.format.checksum import json_checksum
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.shard_table import FileEntry


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 in hexadecimal of `identity`, a JSON object with everything
    that determines the bytes of a task's files. Equal objects have equal fingerprints.
    """
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ShardReceipt:
    """The counts and files of a committed shard.

    Attributes:
        plan: fingerprint of the work that wrote the shard.
        seconds: time spent in each stage (read, decode, wait, encode, write), summed
            over threads.
        truncated: number of indexed rows whose images are truncated. The column
            `detail` of these rows has a text.
        encoded_on: the GPU, the version of torch and the images per forward pass that
            the bytes depend on; None for a CPU.
    """

    shard: int
    plan: str
    rows: int
    indexed: int
    duplicates: int
    failed: dict[str, int]
    files: tuple[FileEntry, ...]
    seconds: dict[str, float]
    truncated: int = 0
    encoded_on: str | None = None

    def to_json(self) -> Json:
        """Return the receipt as a JSON object. The member `crc32c` is the checksum
        of the other members.
        """
        value = {**self.__dict__, "files": [file.to_json() for file in self.files]}
        if self.encoded_on is None:
            del value["encoded_on"]
        return {**value, "crc32c": json_checksum(value)}

    @classmethod
    def from_json(cls, value: Json) -> ShardReceipt:
        """Return the receipt described by `value`, a result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a member is missing or not valid.
        """
        if value["crc32c"] != json_checksum(value):
            raise ValueError("the receipt does not match its checksum")
        members = {name: member for name, member in value.items() if name != "crc32c"}
        files = tuple(FileEntry.from_json(file) for file in value["files"])
        return cls(**{**members, "files": files})


def read_receipts(
    layout: Layout, shards: Iterable[int], fingerprint: str
) -> dict[int, ShardReceipt]:
    """Return the valid receipts of `shards`, keyed by shard number. See
    `read_receipt`.
    """
    receipts = ((shard, read_receipt(layout, shard, fingerprint)) for shard in shards)
    return {shard: receipt for shard, receipt in receipts if receipt is not None}


def read_receipt(layout: Layout, shard: int, fingerprint: str) -> ShardReceipt | None:
    """Read the receipt of a shard. Return None if there is no valid receipt for the
    work with this fingerprint.

    A receipt is also invalid if a file in the receipt is missing or has a wrong length.
    """
    try:
        receipt = ShardReceipt.from_json(
            json.loads(read_index_file(layout.root, layout.receipt(shard)))
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if receipt.plan != fingerprint or receipt.shard != shard:
        return None
    try:
        lengths_match = all(
            (layout.root / file.path).stat().st_size == file.bytes
            for file in receipt.files
        )
    except OSError:
        return None
    return receipt if lengths_match else None
