"""The repair job: rebuilds damaged files of an index from its other files and from
the sources.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edje_index.bundles.info import matching_bundle, read_bundle_offset
from edje_index.errors import ModelError
from edje_index.indexing.faiss_build import AnnRequest
from pipelines.jobs.changing import Edit, apply, fetch_embeddings, new_ann
from pipelines.jobs.plan import settings_of
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
    progress_callback,
    stop_at_events,
)
from storage_formats.arrays import Ints
from storage_formats.atomic import json_bytes
from storage_formats.change import (
    Change,
    begin_change,
    write_array_shapes,
)
from storage_formats.codecs import Blocks
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c
from storage_formats.format.file_check import DAMAGED_FILE, FileEntry, Problem
from storage_formats.format.manifest import (
    CommittedIndex,
    Manifest,
    kept_snapshots,
    offset_files,
)
from storage_formats.format.offset import Offset, write_offset
from storage_formats.format.rows import INDEXED, read_index_rows
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.remote.urls import IndexLocation, local_path
from storage_formats.verify import files_here, verify_index
from storage_formats.writing.conversion import offset_from_tokens
from storage_formats.writing.repair import RepairedFile, ShardRepair

if TYPE_CHECKING:
    from edje_index.indexing.image_encoder import ImageEncoder
    from edje_index.inputs.refs import InputRef

_WORDING = {"changed-since-plan": "its content has changed"}
_COLUMNS = ("row_id", "uri", "uri_raw", "content_hash", "status")


@dataclass(frozen=True)
class RepairResult:
    """The result of a repair.

    Attributes:
        repaired: files that were repaired.
        left: problems that could not be repaired.

    Examples:
        >>> from pathlib import Path
        >>> from edje_index import repair_index
        >>> (file,) = Path("photos.edje/ann").glob("*.faiss")
        >>> file.unlink()
        >>> result = repair_index("photos.edje")
        >>> [file.source for file in result.repaired], result.left
        (['the embeddings'], ())
    """

    repaired: tuple[RepairedFile, ...]
    left: tuple[Problem, ...]


def repair_index(
    index: IndexLocation,
    *,
    model: IndexLocation | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> RepairResult:
    """Verify an index, and rebuild damaged files from its other files, as `edje-index
    repair` does.

    Tokens that cannot be rebuilt from other files are encoded again from the sources. A
    damaged file is replaced only if the rebuilt file has the committed checksum. The
    other arguments are those of `build_index`.

    Args:
        index: directory of the index.
        model: directory of the model bundle. None selects the bundle that built the
            index.

    Raises:
        UsageError: there is no index at `index`.
        CorruptIndexError: `index.json` is damaged.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        JobStopped: `should_stop()` returned True. Files that were repaired stay
            repaired.
        OSError: the index cannot be written.

    Examples:
        >>> from edje_index import repair_index
        >>> repair_index("photos.edje").repaired
        ()
    """
    on_event = stop_at_events(
        on_event, should_stop, "stopped; files that were repaired stay repaired"
    )
    repaired: list[RepairedFile] = []
    refusals: list[Problem] = []
    settled: set[str] = set()
    bundle = None if model is None else local_path(model)
    with begin_change(index, "repair") as change:
        root = change.layout.location
        problems = verify_index(root, progress_callback(on_event))
        opened = change.index
        layout = opened.layout
        damaged = {problem.path for problem in problems}
        differing = {each.path for each in problems if each.code in DAMAGED_FILE}
        metadata = map(layout.relative, zarr_documents(layout, opened.spec))
        repaired += [
            RepairedFile(path, "index.json") for path in metadata if path in damaged
        ]
        shutil.rmtree(layout.staging, ignore_errors=True)
        if repaired:
            write_array_shapes(change.layout, opened.spec)

        @functools.cache
        def open_encoder() -> ImageEncoder:
            with name_missing_extra("build"):
                from edje_index.indexing.image_encoder import ImageEncoder

                settings = settings_of(root, opened.manifest)
                path = matching_bundle(opened, bundle).path
                return ImageEncoder.open(
                    path,
                    device=settings.device,
                    threads=settings.threads,
                    dtype=settings.dtype,
                )

        for entry in offset_files(opened.spec):
            if entry.path in damaged:
                for origin, offset in _offset_origins(opened, bundle):
                    if crc32c(offset.tobytes()) == entry.crc32c:
                        write_offset(change.layout, offset)
                        repaired.append(RepairedFile(entry.path, origin))
                        break
                else:
                    refusals.append(_lost_offset(opened.manifest, entry))
        shards = {
            shard: entries
            for shard, entries in opened.shard_files().items()
            if damaged.intersection(entries)
        }
        for done, (shard, entries) in enumerate(shards.items()):
            on_event(Progress("repairing", done, len(shards)))
            encoder = ShardEncoder(opened, shard, open_encoder, on_event)
            repair = ShardRepair(opened, shard, entries, differing, encoder.encode)
            with files_here(opened, entries.values()):
                repaired += repair.run()
            left = damaged.intersection(entries) - repair.settled
            refusals += encoder.problems(
                path for path in left if path.startswith("tokens/")
            )
            settled |= repair.settled
        if not any(path.startswith("embeddings/") for path in damaged):
            repaired += _restore_ann(change, damaged, on_event)
    settled |= {file.path for file in repaired}
    others = [each for each in problems if each.path not in settled]
    return RepairResult(tuple(repaired), (*others, *refusals))


def _restore_ann(
    change: Change, damaged: set[str], on_event: OnEvent
) -> list[RepairedFile]:
    """Build the nearest-neighbour index of each snapshot with a damaged FAISS file
    again. Return the repaired files.
    """
    index = change.index
    manifests = [index.manifest]
    with contextlib.suppress(CorruptIndexError, UsageError):
        manifests = kept_snapshots(index)
    paths = set[str]()
    # The current snapshot comes last. Its commit removes the damaged files.
    for manifest in manifests:
        lost = damaged.intersection(file.path for file in manifest.ann_files)
        if not lost:
            continue
        paths |= lost
        request = AnnRequest.like(manifest)
        if manifest is index.manifest:
            apply(change, Edit(index.spec, ann=request), on_event, never)
            continue
        # Abandoning the change removes the damaged files at the end.
        change.abandon()
        fetch_embeddings(replace(index, manifest=manifest))
        ann = new_ann(change.layout, manifest.spec, request, on_event)
        change.layout.write(
            change.layout.snapshot(manifest.snapshot.number),
            json_bytes(replace(manifest, ann=ann).to_json()),
        )
    return [RepairedFile(path, "the embeddings") for path in sorted(paths)]


def _offset_origins(
    index: CommittedIndex, bundle: Path | None
) -> Iterator[tuple[str, Offset]]:
    """Yield (description of the origin, offset block): first that of the model bundle,
    then one computed from the tokens of each precision stored without offset.
    """
    with contextlib.suppress(ModelError):
        offset = read_bundle_offset(matching_bundle(index, bundle))
        if offset is not None:
            yield "the model bundle", offset
    for name, offset in offset_from_tokens(index):
        yield f"precision {name}", offset


def _lost_offset(manifest: Manifest, entry: FileEntry) -> Problem:
    lost = () if manifest.spec.offset is None else manifest.spec.offset.precisions
    kept = [name for name in manifest.spec.precisions if name not in lost]
    advice = "or build the index again"
    if kept:
        advice = (
            f"or drop them, remove the earlier snapshots, and convert {kept[0]} again"
        )
    return Problem(
        entry.path,
        "offset-lost",
        f"neither the model bundle nor stored tokens give the offset block, so the"
        f" tokens in {', '.join(lost)} cannot be decoded; restore the file from a"
        f" backup, {advice}",
    )


@dataclass
class ShardEncoder:
    """Encodes rows of a shard again from their sources, with the model, the settings
    and the batches with which they were built.
    """

    _index: CommittedIndex
    _shard: int
    _open_encoder: Callable[[], ImageEncoder]
    # A job that is asked to stop raises JobStopped at each of its events.
    _on_event: OnEvent
    # Positions in the shard of all rows that were asked for
    _needed: set[int] = field(default_factory=set)
    # Reasons why single rows cannot be encoded again, by position
    _refused: dict[int, str] = field(default_factory=dict)
    # Reason why no row of the shard can be encoded again
    _problem: str | None = None

    def encode(self, needed: Ints) -> Mapping[int, Blocks]:
        """Encode the rows at the positions `needed` in the shard again. The other rows
        of their batches are encoded too, because the bytes depend on the whole batch.

        Returns:
            The blocks of all encoded rows, by position in the shard. If a row cannot be
            encoded again, its block is missing, and `problems` gives the reason.
        """
        from edje_index.images.transient import TransientInputError
        from edje_index.indexing.shard_encoding import encode_inputs

        self._needed.update(needed.tolist())
        blocks: dict[int, Blocks] = {}
        try:
            settings = settings_of(self._index.root, self._index.manifest)
            size = settings.decoding.inputs_per_batch(settings.batch_size)
            inputs = self._inputs
            for start in np.unique(needed // size * size).tolist():
                batch = [at for at in range(start, start + size) if at in inputs]
                if not batch:
                    continue
                text = f"encoding rows of shard {self._shard} again from their sources"
                self._on_event(StatusMessage(text))
                rows, encoded = encode_inputs(
                    [inputs[at] for at in batch],
                    self._open_encoder(),
                    settings.decoding,
                    settings.batch_size,
                )
                for number, at in enumerate(batch):
                    reason = rows[number].reason
                    if reason is None:
                        blocks[at] = encoded[number]
                    else:
                        self._refused[at] = _WORDING.get(reason, reason)
        except JobStopped:
            raise
        except TransientInputError as error:
            self._problem = f"{error}. Then run the repair again"
        except EdjeError as error:
            self._problem = str(error)
        return blocks

    @functools.cached_property
    def _inputs(self) -> dict[int, InputRef]:
        """Inputs of the rows with a block, by position in the shard."""
        from edje_index.inputs.containers import split_uri
        from edje_index.inputs.refs import InputRef
        from pipelines.sources.base import file_input
        from pipelines.sources.kinds import packed_source

        row_ids = self._index.spec.shard_rows(self._shard)
        table = read_index_rows(self._index.undeleted(), row_ids, [*_COLUMNS])
        rows = [row for row in table.to_pylist() if row["status"] == INDEXED]
        clips = self._index.manifest.settings.get("frames") is not None
        refs = []
        # The image column of each Parquet file, by the path of the file. For an
        # archive, the value has no meaning.
        archives: dict[bytes, str] = {}
        for row in rows:
            parts = split_uri(row["uri"])
            if parts is None or os.path.lexists(row["uri"]):
                path = row["uri_raw"] or os.fsencode(row["uri"])
                refs.append(file_input(path, row["uri"]))
            else:
                archive, member = parts
                path = row["uri_raw"] or os.fsencode(archive)
                archives[path] = member.rpartition("/")[0]
        for path, column in archives.items():
            refs += packed_source(os.fsdecode(path), column, clips=clips).iter_inputs()
        located = {(ref.uri, ref.uri_raw): ref for ref in refs}
        inputs = {}
        first_row = self._index.spec.shard_rows(self._shard).start
        for row in rows:
            ref = located.get((row["uri"], row["uri_raw"])) or InputRef(
                row["uri"], b"", problem="missing"
            )
            inputs[row["row_id"] - first_row] = replace(
                ref, content_hash=row["content_hash"]
            )
        return inputs

    def problems(self, paths: Iterable[str]) -> Iterator[Problem]:
        """Yield the reasons why the token files `paths` of the shard could not be
        rebuilt from the sources.
        """
        first_row = self._index.spec.shard_rows(self._shard).start
        refused = sorted(self._needed & self._refused.keys())
        for path in sorted(paths) if self._needed else ():
            if self._problem is not None:
                yield Problem(
                    path,
                    "not-encoded-again",
                    f"its rows cannot be encoded again: {self._problem}",
                )
            for position in refused:
                row = first_row + position
                uri = self._inputs[position].uri
                yield Problem(
                    path,
                    "source-refused",
                    f"row {row} cannot be encoded again from {uri}:"
                    f" {self._refused[position]}",
                )
            if self._problem is None and not refused:
                yield Problem(
                    path,
                    "encoded-differently",
                    "its rows were encoded again from their sources, but with another"
                    " result; repair the index with the version of edje-index, the"
                    " packages and the processor that built it, or delete and append"
                    " these rows",
                )
