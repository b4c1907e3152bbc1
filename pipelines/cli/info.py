"""The commands `edje-index info` and `failures`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.cli.command import command
from pipelines.cli.output import print_json, print_line, print_result, wants_json
from pipelines.progress.wording import by_reason, counted, human_bytes
from storage_formats.atomic import Json
from storage_formats.format.layout import Layout
from storage_formats.remote.urls import IndexLocation

# 'info' advises to compact an index if that saves at least this number of shards, or if
# more than this share of the rows is deleted.
_PART_FULL_SHARDS = 32
_DELETED_SHARE = 0.2

if TYPE_CHECKING:
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import CommittedIndex, Manifest


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
        from pipelines.cli.bundles import show_bundle

        show_bundle(index)
        return
    value = describe_index(index)
    print_result(value, *(f"{name:<14}{text}" for name, text in _lines(value)))


def describe_index(root: Path | str) -> Json:
    """Return a JSON object that describes a finished or unfinished index. Raises
    EdjeError if there is no index.
    """
    if isinstance(root, Path) and (begun := _describe_begun(root)):
        return begun
    from collections import Counter
    from dataclasses import asdict

    from edje_index.indexing.ann_kind import rebuild_reasons
    from storage_formats.format.remote import open_index

    index = open_index(root)
    manifest = index.manifest
    counts = manifest.counts
    bytes_by_folder: Counter[str] = Counter()
    for file in (*(file for _, file in index.shard_files()), *manifest.ann_files):
        bytes_by_folder[file.path.rpartition("/")[0]] += file.bytes
    return {
        "index": str(root),
        "state": "finished",
        "unfinished": _unfinished(root) if isinstance(root, Path) else None,
        "snapshot": manifest.snapshot.number,
        "deleted": manifest.snapshot.deleted_rows,
        "counts": {**asdict(counts), "failed_total": counts.failed_total},
        **_describe_spec(manifest.spec),
        "columns": _columns(manifest),
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
        "format_version": manifest.format_version,
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
    paths = (
        index.layout.snapshots.glob("*")
        if index.remote is None
        else map(Path, index.remote.list_sizes("snapshots"))
    )
    return {
        "history": {
            "snapshots": 1 + len(earlier_snapshots(paths, manifest)),
            "most": MOST_SNAPSHOTS,
        },
        "compact": reasons,
    }


def _describe_spec(spec: IndexSpec) -> Json:
    return {
        "rows": spec.rows,
        "shards": spec.used_shards,
        "shard_size": spec.shard_size,
        "block_shape": list(spec.block_shape),
        "embed_dim": spec.embed_dim,
        "precisions": list(spec.precisions),
    }


def _describe_begun(root: Path) -> Json | None:
    """Return a JSON object that describes the unfinished index at `root`. Return None
    if the index is finished, or if there is no index.
    """
    from pipelines.jobs.plan import Plan
    from storage_formats.format.journal import unfinished_journal

    if Layout(root).manifest.exists() or (journal := unfinished_journal(root)) is None:
        return None
    unfinished = _unfinished(root)
    value: Json = {
        "index": str(root),
        "state": "begun",
        "unfinished": unfinished,
    }
    if unfinished and journal.kind == "build" and journal.plan:
        plan = Plan.parse(journal.plan)
        value |= _describe_spec(plan.spec)
        value |= {
            "finished_shards": unfinished["finished_shards"],
            "model": plan.model,
            "plan": plan.fingerprint,
        }
    return value


def _unfinished(root: Path) -> Json | None:
    """Return the kind of the unfinished change of an index, and the number of shards
    that it has finished. Return None if no change is unfinished.
    """
    from storage_formats.format.journal import unfinished_journal

    journal = unfinished_journal(root)
    if journal is None:
        return None
    receipts = Layout(root).receipts.glob("*.json")
    return {"kind": journal.kind, "finished_shards": len(list(receipts))}


def _columns(manifest: Manifest) -> list[Json]:
    """Return the name, the type and the number of values of each column of the rows
    table.

    The number of values is None for the standard columns.
    """
    from storage_formats.format.rows import ROW_SCHEMA, type_name

    standard = [
        {"name": field.name, "type": type_name(field.type), "values": None}
        for field in ROW_SCHEMA
    ]
    return standard + [
        {"name": each.name, "type": each.type, "values": each.values}
        for each in manifest.columns
    ]


def _lines(value: Json) -> Iterator[tuple[str, str]]:
    """Yield the most important entries of `value` as (name, text) pairs."""
    is_begun = value["state"] == "begun"
    yield "index", value["index"]
    yield "state", value["state"]
    if change := value["unfinished"]:
        discard = "delete the directory" if is_begun else "'gc'"
        shards = counted(change["finished_shards"], "finished shard")
        yield (
            "unfinished",
            f"{change['kind']}, {shards}; run '{change['kind']}' again to finish it, or"
            f" {discard} to discard it",
        )
    if "block_shape" not in value:
        return
    if is_begun:
        finished = f"{value['finished_shards']:,} of {value['shards']:,} finished"
        yield "shards", finished
    else:
        yield from _content_lines(value)
    m, d = value["block_shape"]
    precisions = []
    for name in value["precisions"]:
        *_, source = value.get("encoded_from", {}).get(name) or ["bf16"]
        precisions.append(name if source == "bf16" else f"{name} (from {source})")
    yield "tokens", f"{m} x {d} per image, {', '.join(precisions)}"
    yield "embeddings", f"{value['embed_dim']} dimensions, float32"
    model = value["model"]
    untrained = "" if model.get("trained", True) else ", untrained"
    name = model.get("vision") or model.get("encoder", "unknown")
    yield "model", f"{name}{untrained}"
    yield "", f"encoder fingerprint {model['fingerprint']}"


def _content_lines(value: Json) -> Iterator[tuple[str, str]]:
    """Yield the entries that `_lines` shows only for a finished index, as (name, text)
    pairs.
    """
    counts = value["counts"]
    for name in ("inputs", "indexed", "duplicates"):
        yield name, f"{counts[name]:,}"
    total = f"{counts['failed_total']:,}"
    yield "failed", ", ".join(filter(None, [total, by_reason(counts["failed"])]))
    if value["deleted"]:
        yield "deleted", f"{value['deleted']:,}"
    yield "shards", f"{value['shards']:,} of {value['shard_size']:,} rows each"
    sizes = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in value["bytes_by_folder"].items()
    )
    yield "size", f"{human_bytes(value['bytes'])} ({sizes})"
    for processor in value["settings"].get("encoded_on", ()):
        yield "encoded on", processor
    ann = value["ann"]
    kind = " ".join(filter(None, [str(ann.get("kind")), ann.get("factory")]))
    ann_line = (
        f"{kind}, {counted(ann.get('vectors', 0), 'vector')} in"
        f" {counted(len(ann.get('files', [])), 'file')}"
    )
    if recall := ann.get("recall"):
        ann_line += (
            f", recall@{recall['k']} {recall['value']:.3f} with {ann.get('probes')}"
            " lists per query"
        )
    yield "search", ann_line
    for reason in value["ann_rebuild"]:
        yield "", f"run 'edje-index ann build': {reason}"
    for reason in value["compact"]:
        yield "", f"run 'edje-index compact INDEX --out NEW': {reason}"
    history = value["history"]
    yield "history", f"{history['snapshots']} of at most {history['most']} snapshots"
    columns = value["columns"]
    standard = [each["name"] for each in columns if each["values"] is None]
    yield "columns", ", ".join(standard)
    # A column from the sources has a line of its own.
    for each in columns:
        if each["values"] is not None:
            values = counted(each["values"], "value")
            yield "", f"{each['name']} ({each['type']}), {values}"


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
    from storage_formats.format.journal import unfinished_journal
    from storage_formats.format.remote import open_index
    from storage_formats.format.rows import FAILED, iter_rows, read_staged_rows
    from storage_formats.remote.urls import is_url

    layout = Layout(Path(index))
    columns = ["row_id", "reason", "uri", "detail", "status"]
    if is_url(index) or layout.manifest.exists() or unfinished_journal(index) is None:
        tables = iter_rows(open_index(index), columns)
    else:
        shards = sorted(int(path.stem) for path in layout.receipts.glob("*.json"))
        tables = (read_staged_rows(layout, shard, columns) for shard in shards)
    for table in tables:
        for row in table.to_pylist():
            if row.pop("status") == FAILED:
                yield row
