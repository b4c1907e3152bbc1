"""The command `edje-index info`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.options import json_option, location
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import counted, human_bytes
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest


@click.command()
@click.argument("index", type=location)
@json_option
def info(index: Path | str, as_json: bool) -> None:
    """Show what INDEX contains, or how far its build has come.

    The output shows the numbers of inputs, the size, the precisions, the columns of the
    rows table, and the model that built INDEX. Columns from the sources are shown with
    their type and number of values, including values of deleted rows. For an unfinished
    index, the output shows the number of finished shards.

    The line 'search' describes the nearest-neighbour index, and says when 'edje-index
    ann build' would improve it.

    To search INDEX, a model bundle must have the encoder fingerprint shown here.
    'edje-index model show' prints the encoder fingerprint of a bundle.

    \b
    Examples:
      edje-index info photos.edje
      edje-index info photos.edje --json
    """
    value = describe_index(index)
    if as_json:
        print_json(value)
    else:
        for name, text in _lines(value):
            print_line(f"{name:<14}{text}")


def describe_index(root: Path | str) -> dict[str, Any]:
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
    files = [*(file for _, file in index.shard_files()), *manifest.ann_files]
    spec = manifest.spec
    counts = manifest.counts
    bytes_by_folder: Counter[str] = Counter()
    for file in files:
        bytes_by_folder[file.path.rpartition("/")[0]] += file.bytes
    return {
        "index": str(root),
        "state": "finished",
        "unfinished": _unfinished(root) if isinstance(root, Path) else None,
        "snapshot": manifest.snapshot.number,
        "deleted": manifest.snapshot.deleted_rows,
        "rows": spec.rows,
        "counts": {**asdict(counts), "failed_total": counts.failed_total},
        "shards": spec.used_shards,
        "shard_size": spec.shard_size,
        "block_shape": list(spec.block_shape),
        "embed_dim": spec.embed_dim,
        "precisions": list(spec.precisions),
        "columns": _columns(manifest),
        "encoded_from": {
            name: list(sources) for name, sources in manifest.encoded_from.items()
        },
        "bytes": bytes_by_folder.total(),
        "bytes_by_folder": dict(sorted(bytes_by_folder.items())),
        "ann": manifest.ann,
        "ann_rebuild": rebuild_reasons(manifest),
        "model": manifest.model,
        "settings": manifest.settings,
        "plan": manifest.plan,
        "format_version": manifest.format_version,
        "created_by": manifest.created_by,
    }


def _describe_begun(root: Path) -> dict[str, Any] | None:
    """Return a JSON object that describes the unfinished index at `root`; None if
    there is no unfinished index.
    """
    from pipelines.jobs.plan import Plan
    from storage_formats.change import is_unfinished

    if Layout(root).manifest.exists() or (journal := is_unfinished(root)) is None:
        return None
    value: dict[str, Any] = {
        "index": str(root),
        "state": "begun",
        "unfinished": _unfinished(root),
    }
    if journal.kind == "build" and journal.plan:
        plan = Plan.from_json(journal.plan)
        value |= {
            "finished_shards": value["unfinished"]["finished_shards"],
            "rows": plan.spec.rows,
            "shards": plan.spec.shards,
            "shard_size": plan.spec.shard_size,
            "block_shape": list(plan.spec.block_shape),
            "embed_dim": plan.spec.embed_dim,
            "precisions": list(plan.spec.precisions),
            "model": plan.model,
            "plan": plan.fingerprint,
        }
    return value


def _unfinished(root: Path) -> dict[str, Any] | None:
    """Return the kind and the number of finished shards of an unfinished change;
    None if there is none.
    """
    from storage_formats.change import is_unfinished

    journal = is_unfinished(root)
    if journal is None:
        return None
    return {
        "kind": journal.kind,
        "finished_shards": sum(
            1 for _ in Layout(root).receipt(0).parent.glob("*.json")
        ),
    }


def _columns(manifest: Manifest) -> list[dict[str, Any]]:
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


def _lines(value: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the most important entries of `value` as (name, text) pairs."""
    lines = [("index", value["index"]), ("state", value["state"])]
    if change := value["unfinished"]:
        discard = "delete the directory" if value["state"] == "begun" else "'gc'"
        again = f"run '{change['kind']}' again to finish it, or {discard} to discard it"
        lines.append(
            (
                "unfinished",
                (
                    f"{change['kind']},"
                    f" {counted(change['finished_shards'], 'finished shard')}; {again}"
                ),
            )
        )
    if "block_shape" not in value:
        return lines
    m, d = value["block_shape"]
    if value["state"] == "begun":
        lines.append(
            ("shards", f"{value['finished_shards']:,} of {value['shards']:,} finished")
        )
    else:
        counts = value["counts"]
        ann = value["ann"]
        columns = value["columns"]
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
        failed = "".join(
            f", {reason} {count:,}" for reason, count in counts["failed"].items()
        )
        sizes = ", ".join(
            f"{name} {human_bytes(size)}"
            for name, size in value["bytes_by_folder"].items()
        )
        lines += [
            ("inputs", f"{counts['inputs']:,}"),
            ("indexed", f"{counts['indexed']:,}"),
            ("duplicates", f"{counts['duplicates']:,}"),
            ("failed", f"{counts['failed_total']:,}{failed}"),
            *([("deleted", f"{value['deleted']:,}")] if value["deleted"] else []),
            ("shards", f"{value['shards']:,} of {value['shard_size']:,} rows each"),
            ("size", f"{human_bytes(value['bytes'])} ({sizes})"),
            ("search", ann_line),
            *(
                ("", f"run 'edje-index ann build': {reason}")
                for reason in value["ann_rebuild"]
            ),
            (
                "columns",
                ", ".join(each["name"] for each in columns if each["values"] is None),
            ),
            *(
                (
                    "",
                    (
                        f"{each['name']} ({each['type']}),"
                        f" {counted(each['values'], 'value')}"
                    ),
                )
                for each in columns
                # from the sources
                if each["values"] is not None
            ),
        ]
    model = value["model"]
    untrained = "" if model.get("trained", True) else ", untrained"
    return [
        *lines,
        (
            "tokens",
            (
                f"{m} x {d} per image,"
                " "
                + ", ".join(
                    _precision_line(value, name) for name in value["precisions"]
                )
            ),
        ),
        ("embeddings", f"{value['embed_dim']} dimensions, float32"),
        (
            "model",
            f"{model.get('vision') or model.get('encoder', 'unknown')}{untrained}",
        ),
        ("", f"encoder fingerprint {model['fingerprint']}"),
        ("plan", value["plan"]),
    ]


def _precision_line(value: dict[str, Any], name: str) -> str:
    """Return "NAME", or "NAME (from SOURCE)" if the tokens were converted from a
    precision other than bf16.
    """
    *_, source = value.get("encoded_from", {}).get(name) or ["bf16"]
    return name if source == "bf16" else f"{name} (from {source})"
