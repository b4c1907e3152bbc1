"""The commands `edje-index info` and `failures`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.cli.command import command
from pipelines.cli.output import print_json, print_line, print_result, wants_json
from pipelines.progress.wording import describe
from storage_formats.atomic import Json
from storage_formats.format.layout import Layout
from storage_formats.remote.urls import IndexLocation

# 'info' advises to compact an index if that saves at least this number of shards, or if
# more than this share of the rows is deleted.
_PART_FULL_SHARDS = 32
_DELETED_SHARE = 0.2

if TYPE_CHECKING:
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import CommittedIndex


@command()
def info(index: IndexLocation) -> None:
    """Show what INDEX or a model bundle contains, or how far a build has come.

    The output shows the numbers of inputs, the size, the precisions, the columns of the
    rows table, and the model that built INDEX. Columns from the sources are shown with
    their type and number of values, including values of deleted rows. For an unfinished
    index, the output shows the number of finished shards.

    The line 'search' describes the nearest-neighbour index, and says when 'edje-index
    ann build' would improve it.

    To search INDEX, a model bundle must have the encoder fingerprint shown here. The
    output for a bundle has the same fingerprint of its vision tower and its adapter,
    and the bundle fingerprint, which covers the whole bundle.

    \b
    Examples:
      edje-index info photos.edje
      edje-index info model --json
    """
    if isinstance(index, Path) and (index / "bundle.json").exists():
        from edje_index.bundles.info import read_bundle_info
        from pipelines.cli.bundles import describe_bundle

        print_result(describe_bundle(read_bundle_info(index)))
        return
    value = describe_index(index)
    print_result(value, describe(_shown(value)))


def describe_index(root: Path | str) -> Json:
    """Return a JSON object that describes a finished or unfinished index. Raises
    EdjeError if there is no index.
    """
    from collections import Counter
    from dataclasses import asdict
    from itertools import chain

    from edje_index.indexing.faiss_index import rebuild_reasons
    from pipelines.jobs.plan import Plan
    from storage_formats.format.directory import Directory
    from storage_formats.format.journal import unfinished_journal
    from storage_formats.format.layout import FORMAT_VERSION
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.rows import ROW_SCHEMA, type_name

    value: Json = {"index": str(root), "state": "begun", "unfinished": None}
    if isinstance(root, Path) and (journal := unfinished_journal(Directory(root))):
        finished = len(list(Layout(root).receipts.glob("*.json")))
        value["unfinished"] = {"kind": journal.kind, "finished_shards": finished}
        if not Layout(root).manifest.exists():
            if journal.kind == "build" and journal.plan:
                plan = Plan.parse(journal.plan)
                value |= _describe_spec(plan.spec)
                value |= {"model": plan.model, "plan": plan.fingerprint}
                value["finished_shards"] = finished
            return value
    index = CommittedIndex.open(root)
    manifest = index.manifest
    counts = manifest.counts
    bytes_by_folder: Counter[str] = Counter()
    by_shard = index.shard_files().values()
    of_shards = chain.from_iterable(files.values() for files in by_shard)
    for file in chain(of_shards, manifest.ann_files):
        bytes_by_folder[file.path.rpartition("/")[0]] += file.bytes
    # The number of values is None for the standard columns.
    columns = [
        *((field.name, type_name(field.type), None) for field in ROW_SCHEMA),
        *((each.name, each.type, each.values) for each in manifest.columns),
    ]
    return {
        **value,
        "state": "finished",
        "snapshot": manifest.snapshot.number,
        "deleted": manifest.snapshot.deleted_rows,
        "counts": {**asdict(counts), "failed_total": counts.failed_total},
        **_describe_spec(manifest.spec),
        "columns": [
            {"name": name, "type": kind, "values": values}
            for name, kind, values in columns
        ],
        "encoded_from": {
            name: list(sources) for name, sources in manifest.encoded_from.items()
        },
        "bytes": bytes_by_folder.total(),
        "bytes_by_folder": dict(sorted(bytes_by_folder.items())),
        "ann": manifest.ann,
        "ann_rebuild": rebuild_reasons(manifest),
        **_describe_upkeep(index),
        "model": manifest.model,
        "settings": manifest.settings,
        "plan": manifest.plan,
        "format_version": FORMAT_VERSION,
        "created_by": manifest.created_by,
    }


def _describe_upkeep(index: CommittedIndex) -> Json:
    """Return a JSON object about the maintenance of an index: the number of kept
    snapshots, and the reasons to compact the index.
    """
    from storage_formats.change import MOST_SNAPSHOTS
    from storage_formats.format.manifest import earlier_snapshots

    manifest = index.manifest
    spec = manifest.spec
    reasons = []
    # A segment holds the rows of one build or append, and only its last shard can be
    # part-full. Each item is the number of rows in that shard, or 0 if the
    # shard is full.
    ends = [segment.rows % spec.shard_size for segment in spec.used_segments]
    part_full = len(ends) - ends.count(0)
    # A compaction joins the rows of all part-full shards in as few shards as possible.
    saved = part_full - -(-sum(ends) // spec.shard_size)
    if saved >= _PART_FULL_SHARDS:
        reasons.append(
            f"{part_full:,} of {spec.used_shards:,} shards are not full, which makes"
            " changes and searches slower"
        )
    deleted = manifest.snapshot.deleted_rows
    if deleted > _DELETED_SHARE * spec.used_rows:
        reasons.append(f"{deleted:,} of {spec.used_rows:,} rows are deleted")
    return {
        "history": {
            "snapshots": 1 + len(earlier_snapshots(index.place, manifest)),
            "most": MOST_SNAPSHOTS,
        },
        "compact": reasons,
    }


def _describe_spec(spec: IndexSpec) -> Json:
    return {
        "rows": spec.rows,
        "unused_ids": spec.rows - spec.used_rows,
        "shards": spec.used_shards,
        "shard_size": spec.shard_size,
        "block_shape": list(spec.block_shape),
        "embed_dim": spec.embed_dim,
        "precisions": list(spec.precisions),
    }


def _shown(value: Json) -> Json:
    """Return what `info` shows of a description of an index, without --json."""
    hidden = ("settings", "plan", "ann_rebuild", "compact", "columns", "created_by")
    shown = {name: member for name, member in value.items() if name not in hidden}
    if change := value["unfinished"]:
        discard = "delete the directory" if value["state"] == "begun" else "'gc'"
        shown["unfinished"] = (
            f"{change['kind']}, {change['finished_shards']:,} shards finished; run"
            f" '{change['kind']}' again to finish it, or {discard} to discard it"
        )
    if value["state"] == "begun":
        return shown
    columns = value["columns"]
    return shown | {
        "ann": {name: each for name, each in value["ann"].items() if name != "files"},
        "columns": [each["name"] for each in columns if each["values"] is None],
        "source columns": [each for each in columns if each["values"] is not None],
        "encoded on": value["settings"].get("encoded_on"),
        "run 'ann build'": value["ann_rebuild"],
        "run 'compact'": value["compact"],
    }


@command()
def failures(index: IndexLocation) -> None:
    """List the inputs of INDEX that could not be indexed.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    The command prints one line per failed row: row id, reason, URI and details.
    'edje-index info' shows the number of failed rows by reason.

    \b
    Examples:
      edje-index failures photos.edje
      edje-index failures photos.edje --json | jq -r '.failures[].uri'
    """
    rows = failed_rows(index)
    if wants_json():
        print_json({"index": str(index), "failures": list(rows)})
    for row in rows:
        parts = (row["row_id"], row["reason"], row["uri"], row["detail"])
        print_line("  ".join(map(str, parts)))


def failed_rows(index: IndexLocation) -> Iterator[Json]:
    """Yield the row id, reason, URI and detail of each failed row. If a first build is
    unfinished, these are the failed rows of its finished shards.
    """
    from storage_formats.format.directory import Directory
    from storage_formats.format.journal import unfinished_journal
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.rows import FAILED, iter_rows, read_staged_rows
    from storage_formats.remote.urls import is_url

    layout = Directory(Path(index))
    columns = ["row_id", "reason", "uri", "detail", "status"]
    if is_url(index) or layout.manifest.exists() or unfinished_journal(layout) is None:
        tables = iter_rows(CommittedIndex.open(index), columns)
    else:
        shards = sorted(int(path.stem) for path in layout.receipts.glob("*.json"))
        tables = (read_staged_rows(layout, shard, columns) for shard in shards)
    for table in tables:
        for row in table.to_pylist():
            if row.pop("status") == FAILED:
                yield row
