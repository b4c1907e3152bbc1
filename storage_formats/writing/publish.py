"""The commit of an index after the last shard is written (SPEC.md section 11)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import EXTENDED_VERSION, FORMAT_VERSION, IndexSpec, Layout
from storage_formats.format.manifest import Counts, Manifest, created_by
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import write_shard_table
from storage_formats.format.source_columns import SourceColumn


@dataclass(frozen=True)
class Provenance:
    """The origin of an index. `index.json` stores these values unchanged.

    Attributes:
        model: description of the model. The required member `fingerprint` is a hash of everything that determines the
            stored bytes.
        settings: settings of the build.
        plan: fingerprint of the build plan.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    plan: str


def total_counts(receipts: Sequence[ShardReceipt]) -> Counts:
    """Return the total counts of all receipts.

    Raises:
        CorruptIndexError: inputs differ from indexed + duplicates + failed.
    """
    failed: dict[str, int] = {}
    for receipt in receipts:
        for reason, count in receipt.failed.items():
            failed[reason] = failed.get(reason, 0) + count
    counts = Counts(
        inputs=sum(receipt.rows for receipt in receipts),
        indexed=sum(receipt.indexed for receipt in receipts),
        duplicates=sum(receipt.duplicates for receipt in receipts),
        failed=dict(sorted(failed.items())),
    )
    if problem := counts.problem():
        raise CorruptIndexError(
            f"the receipts in build/receipts are damaged: {problem}; remove this directory, and run the command again"
        )
    return counts


def add_counts(left: Counts, right: Counts) -> Counts:
    """Return the sum of two counts."""
    reasons = sorted({*left.failed, *right.failed})
    failed = {reason: left.failed.get(reason, 0) + right.failed.get(reason, 0) for reason in reasons}
    return Counts(left.inputs + right.inputs, left.indexed + right.indexed, left.duplicates + right.duplicates, failed)


def check_receipts(receipts: Sequence[ShardReceipt], shards: Sequence[int]) -> None:
    """Raise CorruptIndexError unless there is exactly one receipt for each of `shards`."""
    receipt_shards = sorted(receipt.shard for receipt in receipts)
    if receipt_shards != list(shards):
        raise CorruptIndexError(
            f"{len(shards)} shards need one receipt each, but there are receipts for {len(set(receipt_shards))} shards"
            "; run the same command again to write the missing shards"
        )


def finish_index(
    root: str | Path,
    spec: IndexSpec,
    receipts: Sequence[ShardReceipt],
    provenance: Provenance,
    ann: dict[str, Any],
    columns: Sequence[SourceColumn] = (),
) -> Manifest:
    """Commit the index: write the shard table and `index.json`, and remove `build/`. Return the manifest.

    Args:
        root: directory of the index.
        spec: shape of the index.
        receipts: one receipt per shard, in any order.
        provenance: origin of the index.
        ann: value of `ann` in `index.json`, which describes the nearest-neighbour index (SPEC.md section 10).
        columns: source columns of the rows table.

    Raises:
        CorruptIndexError: a shard has no receipt, or the counts of the receipts do not add up.
    """
    layout = Layout(Path(root))
    check_receipts(receipts, range(spec.shards))
    counts = total_counts(receipts)
    table = write_shard_table(layout, ((receipt.shard, file) for receipt in receipts for file in receipt.files))
    manifest = Manifest(
        spec=spec,
        counts=counts,
        model=provenance.model,
        settings=provenance.settings,
        plan=provenance.plan,
        shard_table=table,
        ann=ann,
        created_by=created_by(),
        format_version=EXTENDED_VERSION if columns else FORMAT_VERSION,
        columns=tuple(columns),
    )
    manifest.write(layout)
    remove_build(layout)
    return manifest


def remove_build(layout: Layout) -> None:
    """Remove `build/`, except the lock file and an unfinished erasure."""
    # `plan.json` is removed last. If files stay behind, it shows that they come from a build (`has_build_leftovers`).
    if not layout.build.is_dir():
        return
    kept = {layout.lock, layout.plan, layout.erasure}
    for path in set(layout.build.iterdir()) - kept:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        if set(layout.build.iterdir()) <= kept:
            layout.plan.unlink(missing_ok=True)
        layout.build.rmdir()  # fails if it holds a lock


def has_build_leftovers(layout: Layout) -> bool:
    """Return True if `build/` of a finished index contains leftovers of the build, not of a conversion."""
    if not layout.build.is_dir():
        return False
    return layout.plan.exists() or {path.name for path in layout.build.iterdir()} <= {layout.lock.name}
