"""`index.json`, the manifest of an index (SPEC.md section 4)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from storage_formats.atomic import write_json_atomic
from storage_formats.codecs import codec
from storage_formats.errors import CorruptIndexError, IncompleteIndexError, UsageError, remedy
from storage_formats.format.checksum import json_checksum
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import FORMAT, FORMAT_VERSION, IndexSpec, Layout
from storage_formats.format.shard_table import FileEntry

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Counts:
    """Numbers of inputs: `inputs` = `indexed` + `duplicates` + the sum of `failed`, which counts by reason."""

    inputs: int
    indexed: int
    duplicates: int
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())

    def check(self) -> None:
        """Raise CorruptIndexError unless the numbers add up to `inputs`."""
        total = self.indexed + self.duplicates + self.failed_total
        if total != self.inputs:
            raise CorruptIndexError(
                f"the counts do not add up: {self.indexed} indexed + {self.duplicates} duplicates + "
                f"{self.failed_total} failed = {total}, but there are {self.inputs} inputs"
            )


@dataclass(frozen=True)
class Manifest:
    """The contents of `index.json`. SPEC.md section 4 describes the fields.

    `encoded_from` maps a precision to the precisions that its blocks were converted from, first to last. A precision
    without an entry was written by the model, or its origin is unknown.

    Example:
        >>> from storage_formats import Manifest
        >>> from storage_formats.example import example_index
        >>> manifest = Manifest.load(example_index())
        >>> manifest.spec.block_shape, manifest.counts.indexed, manifest.counts.failed
        ((4, 8), 9, {'truncated': 1})
    """

    spec: IndexSpec
    counts: Counts
    model: dict[str, Any]
    settings: dict[str, Any]
    plan: str
    shard_table: FileEntry
    ann: dict[str, Any]
    created_by: str
    format_version: str = FORMAT_VERSION
    encoded_from: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def load(cls, root: str | Path) -> Manifest:
        """Read the manifest of the index at `root`.

        Raises:
            UsageError: there is no index at `root`, or its format version is unknown to this version.
            IncompleteIndexError: the build of the index has not finished.
            CorruptIndexError: `index.json` is damaged.
        """
        layout = Layout(Path(root))
        try:
            value = json.loads(read_index_file(root, layout.manifest, max_bytes=_MAX_MANIFEST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise _absent(layout) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptIndexError(
                f"cannot read {layout.manifest}: {error}; {remedy(error, 'restore the file')}"
            ) from error
        return _parse(layout, value)

    def write(self, layout: Layout) -> None:
        """Write `index.json`. This commits the index: it exists from this call on."""
        spec = self.spec
        value = {
            "format": FORMAT,
            "format_version": self.format_version,
            "created_by": self.created_by,
            "rows": spec.rows,
            "shard_size": spec.shard_size,
            "shards": spec.shards,
            "block_shape": list(spec.block_shape),
            "embed_dim": spec.embed_dim,
            "precisions": [self._precision_to_json(name) for name in spec.precisions],
            "counts": asdict(self.counts),
            "model": self.model,
            "settings": self.settings,
            "plan": self.plan,
            "shard_table": self.shard_table.to_json(),
            "ann": self.ann,
        }
        write_json_atomic(layout.manifest, {**value, "crc32c": json_checksum(value)})

    def _precision_to_json(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = {"name": name, "record_bytes": codec(name, self.spec.block_shape).record_bytes}
        sources = self.encoded_from.get(name)
        return {**value, "encoded_from": list(sources)} if sources else value

    @property
    def ann_files(self) -> list[FileEntry]:
        """The files of the nearest-neighbour index."""
        return [FileEntry.from_json(value) for value in self.ann.get("files", [])]


@dataclass(frozen=True)
class CommittedIndex:
    """An index whose build has finished. Later stages take it instead of a path, and need not read the manifest again.

    Attributes:
        root: its directory, an absolute path.
        manifest: its manifest.
    """

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, root: str | Path) -> CommittedIndex:
        """Read the manifest of the index at `root`. Raises as `Manifest.load`."""
        return cls(Path(root).absolute(), Manifest.load(root))


def _absent(layout: Layout) -> Exception:
    if layout.plan.exists():
        return IncompleteIndexError(
            f"the build of {layout.root} has not finished; run the same build command again to resume it"
        )
    if layout.writer.exists():
        return IncompleteIndexError(
            f"{layout.root} is an unfinished index that IndexWriter began; if no process is writing it, write it "
            "again, or delete the directory"
        )
    if layout.root.exists():
        return UsageError(f"{layout.root} is not an EDJE index (it has no index.json)")
    return UsageError(f"there is no index at {layout.root}")


def _parse(layout: Layout, value: Any) -> Manifest:
    where = layout.manifest
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{where} is not the manifest of an EDJE index")
    format_version = str(value.get("format_version"))
    if format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise UsageError(
            f"{where} has format version {format_version}, but this version reads {FORMAT_VERSION}; upgrade edje-index"
        )
    if value.get("crc32c") != json_checksum(value):
        raise CorruptIndexError(f"{where} does not match its own checksum: it was damaged or edited; restore the file")
    try:
        manifest = _from_members(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(
            f"a member of {where} is missing or has the wrong type: {error!r}; restore the file"
        ) from error
    manifest.counts.check()
    if manifest.spec.shards > manifest.shard_table.bytes:  # each shard has several lines in the table
        raise CorruptIndexError(
            f"{where} claims {manifest.spec.shards} shards, more than its shard table of {manifest.shard_table.bytes} "
            "bytes can list; restore the file"
        )
    if manifest.counts.inputs != manifest.spec.rows or int(value.get("shards", -1)) != manifest.spec.shards:
        raise CorruptIndexError(
            f"{where} contradicts itself: {manifest.spec.rows} rows of {manifest.counts.inputs} inputs in "
            f"{value.get('shards')} shards of {manifest.spec.shard_size}; restore the file"
        )
    return manifest


def _from_members(value: dict[str, Any]) -> Manifest:
    m, d = value["block_shape"]
    spec = IndexSpec(
        rows=int(value["rows"]),
        shard_size=int(value["shard_size"]),
        block_shape=(int(m), int(d)),
        embed_dim=int(value["embed_dim"]),
        precisions=tuple(str(precision["name"]) for precision in value["precisions"]),
    )
    return Manifest(
        spec=spec,
        counts=_counts_from_json(value["counts"]),
        model=dict(value["model"]),
        settings=dict(value["settings"]),
        plan=str(value["plan"]),
        shard_table=FileEntry.from_json(value["shard_table"]),
        ann=_checked_ann(value["ann"]),
        created_by=str(value["created_by"]),
        format_version=str(value["format_version"]),
        encoded_from={
            str(precision["name"]): tuple(str(source) for source in precision["encoded_from"])
            for precision in value["precisions"]
            if "encoded_from" in precision
        },
    )


def _counts_from_json(value: dict[str, Any]) -> Counts:
    inputs, indexed, duplicates = (int(value[name]) for name in ("inputs", "indexed", "duplicates"))
    return Counts(inputs, indexed, duplicates, {str(reason): int(count) for reason, count in value["failed"].items()})


def _checked_ann(value: dict[str, Any]) -> dict[str, Any]:
    for file in value.get("files", []):
        FileEntry.from_json(file)
    return dict(value)


def created_by() -> str:
    """Package and version for the member `created_by` of a manifest."""
    try:
        return f"edje-index {version('edje-index')}"
    except PackageNotFoundError:  # running from a source tree that is not installed
        return "edje-index"
