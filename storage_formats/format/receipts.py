"""Receipts. During a change, one file per finished shard records the counts and the
files of this shard (SPEC.md section 11).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage_formats.atomic import Json
from storage_formats.format.checksum import json_checksum, with_checksum
from storage_formats.format.file_check import FileEntry
from storage_formats.format.json_values import read_json, write_json
from storage_formats.format.layout import FORMAT_VERSION
from storage_formats.format.places import Place
from storage_formats.threads import ordered_map

_READS_AT_ONCE = 8


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `identity` in hexadecimal. Equal objects have equal
    fingerprints.

    Args:
        identity: JSON object with everything that determines the bytes of the files
            that a task writes.
    """
    # Receipts of another version of the format are not used.
    versioned = {"format_version": FORMAT_VERSION, **identity}
    text = json.dumps(versioned, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ShardReceipt:
    """The counts and files of a finished shard.

    Attributes:
        shard: number of the shard.
        plan: fingerprint of the plan by which the shard was written.
        rows: number of rows of the shard.
        indexed: number of indexed rows.
        duplicates: number of rows that are duplicates.
        failed: number of failed rows for each reason.
        files: entries of the committed files of the shard.
        seconds: time in seconds spent in each stage ("read", "decode", "wait",
            "encode", "write"), summed over the processes and threads that read and
            decode. "helpers" is the time that these had.
        truncated: number of indexed rows whose images are truncated. The column
            `detail` of these rows describes what is missing.
        encoded_on: text with the name of the GPU, the version of torch and the number
            of images per forward pass. The bytes of the files depend on them. None if
            the shard was encoded on a CPU.
        values: number of rows with a value, for each column of the rows table.
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
    values: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the receipt as a JSON object. Its member `crc32c` is the
        `json_checksum` of the other members.
        """
        return with_checksum(write_json(self))


def fetch_written_embeddings(place: Place, receipts: Iterable[ShardReceipt]) -> None:
    """Make the embeddings of finished shards readable on this machine."""
    place.fetch(
        file
        for receipt in receipts
        for file in receipt.files
        if file.path.startswith("embeddings/")
    )


def read_receipts(
    place: Place, shards: Iterable[int], fingerprint: str
) -> dict[int, ShardReceipt]:
    """Return the valid receipts of `shards` at `place`, keyed by shard number. A shard
    without a valid receipt must be written again.

    A receipt is valid if it matches its checksum, its `plan` is `fingerprint`, and all
    files that it lists exist and have the listed lengths.
    """
    existing = {*place.names(place.receipts)}
    wanted = [shard for shard in shards if place.receipt(shard) in existing]
    read = ordered_map(
        place.read, map(place.receipt, wanted), _READS_AT_ONCE, 2 * _READS_AT_ONCE
    )
    receipts: dict[int, ShardReceipt] = {}
    for shard, data in zip(wanted, read, strict=True):
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            value = json.loads(data or b"")
            receipt: ShardReceipt = read_json(ShardReceipt, value)
            written = (value["crc32c"], receipt.plan, receipt.shard)
            if written == (json_checksum(value), fingerprint, shard):
                receipts[shard] = receipt
    lengths = place.lengths(
        file for receipt in receipts.values() for file in receipt.files
    )
    return {
        shard: receipt
        for shard, receipt in receipts.items()
        if all(lengths.get(file.path) == file.bytes for file in receipt.files)
    }
