"""Receipts: the durable proof that a shard is committed (SPEC.md section 11)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from storage_formats.atomic import write_json_atomic
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import FileRecord


@dataclass(frozen=True)
class ShardReceipt:
    """What a committed shard holds.

    Attributes:
        shard: its number.
        plan: fingerprint of the plan it belongs to.
        rows, indexed, duplicates: counts of rows.
        failed: count of failed rows by reason.
        files: every file of the shard.
        seconds: time spent by stage (read, decode, wait, encode, write), summed over threads.
    """

    shard: int
    plan: str
    rows: int
    indexed: int
    duplicates: int
    failed: dict[str, int]
    files: tuple[FileRecord, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "files": [file.to_json() for file in self.files]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardReceipt:
        """Raises KeyError, TypeError or ValueError for anything that `to_json` did not make."""
        files = tuple(FileRecord.from_json(file) for file in value["files"])
        return cls(**{**value, "files": files})

    def write(self, layout: Layout) -> None:
        """Make the shard count."""
        write_json_atomic(layout.receipt(self.shard), self.to_json())


def read_receipt(layout: Layout, shard: int, plan: str) -> ShardReceipt | None:
    """The receipt of `shard`; None when there is none, it is of another plan, or a file of it is gone or short."""
    try:
        receipt = ShardReceipt.from_json(json.loads(layout.receipt(shard).read_bytes()))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    if receipt.plan != plan or receipt.shard != shard:
        return None
    try:
        lengths_hold = all((layout.root / file.path).stat().st_size == file.bytes for file in receipt.files)
    except OSError:
        return None
    return receipt if lengths_hold else None
