"""Changes of the files of a finished index that leave its rows as they are: add and
remove precisions of the tokens, and build the nearest-neighbour index.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edje_index.indexing.faiss_build import AnnRequest
from pipelines.engines.base import open_engine
from pipelines.jobs.changing import Edit, ShardWork, apply, begin
from pipelines.jobs.plan import check_disk
from pipelines.progress.events import OnEvent, ShouldStop, ignore, never
from pipelines.progress.wording import counted
from storage_formats.arguments import as_list
from storage_formats.codecs import codec, precisions
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec, OffsetBlock
from storage_formats.format.manifest import CommittedIndex, Manifest, kept_snapshots
from storage_formats.format.receipts import fingerprint
from storage_formats.remote.urls import IndexLocation
from storage_formats.threads import usable_cpus
from storage_formats.writing.conversion import (
    ConversionTask,
    choose_offset,
    convert_shard,
)

_DEFAULT = AnnRequest()


@dataclass(frozen=True)
class QuantizeResult:
    """The result of a conversion.

    Attributes:
        source: precision that was converted; None if nothing was converted.
        added: precisions that were added.
        dropped: precisions that were removed.
        precisions: precisions that the index stores after the conversion.
        rows: number of rows of the index.
        shards: number of shards of the index.
        bytes_per_image: length of a record in bytes, by precision.
        seconds: wall time of this run.

    Examples:
        >>> from edje_index import quantize_index
        >>> result = quantize_index("photos.edje", ["int8"])
        >>> result.source, result.added, result.dropped
        ('bf16', ('int8',), ())
    """

    source: str | None
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    precisions: tuple[str, ...]
    rows: int
    shards: int
    bytes_per_image: dict[str, int]
    seconds: float


def quantize_index(
    index: IndexLocation,
    to: Sequence[str] = (),
    *,
    drop: Sequence[str] = (),
    source: str | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> QuantizeResult:
    """Add and remove precisions of the stored tokens, as `edje-index quantize` does.

    Call the function again with the same arguments to resume a stopped conversion.
    The other arguments are those of `build_index`.

    Args:
        index: directory of the index. The index can be read during the conversion.
        to: precision to add; repeatable. Precisions that the index already stores are
            skipped.
        drop: precision to remove, after all precisions of `to` have been added;
            repeatable. A rollback cannot restore its tokens, unless an earlier snapshot
            has them.
        source: precision to convert from. Without it, a precision of `to` must not have
            a higher fidelity than the stored tokens. None selects the precision of the
            highest fidelity that is stored.

    Raises:
        UsageError: there is no index at `index`, a precision is unknown, or the disk is
            too small.
        CorruptIndexError: the index is damaged.
        JobStopped: the conversion stopped early. Finished shards are kept.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.

    Examples:
        >>> from edje_index import quantize_index
        >>> result = quantize_index("photos.edje", ["fp8", "nvfp4"])
        >>> result.precisions, result.bytes_per_image["nvfp4"]
        (('bf16', 'fp8', 'nvfp4'), 36)
    """
    started = time.monotonic()
    to = as_list(to, "to", "precisions")
    drop = as_list(drop, "drop", "precisions")
    if not (to or drop):
        raise UsageError(
            "nothing to do: name a precision to add or to drop", parameter="to"
        )
    request = {"to": sorted(to), "drop": sorted(drop), "source": source}
    with begin(index, "quantize", request) as change:
        opened = change.index
        manifest = opened.manifest
        spec = manifest.spec
        to = [codec(name).name for name in to]
        drop = [codec(name).name for name in drop]
        source = source and codec(source).name
        if both := sorted({*to} & {*drop}):
            raise UsageError(
                f"{', '.join(both)} cannot be both added and dropped; name each"
                " precision once",
                parameter="drop",
            )
        added = tuple(name for name in dict.fromkeys(to) if name not in spec.precisions)
        after = tuple(name for name in (*spec.precisions, *added) if name not in drop)
        if not after:
            raise UsageError(
                f"dropping {', '.join(drop)} would leave {opened.root} without tokens;"
                " keep at least one precision",
                parameter="drop",
            )
        edit = Edit(with_precisions(spec, after))
        read = None
        if added:
            read = precision_to_read(opened.root, manifest, source)
            chain = (*manifest.encoded_from.get(read, ()), read)
            lossy = max(chain, key=_rank)
            for name in added:
                if source is None and _rank(name) < _rank(lossy):
                    raise UsageError(
                        f"'{name}' would be larger but not more accurate, because all"
                        f" tokens in {opened.root} have the errors of '{lossy}'. Build"
                        f" the index again with '{name}', or set the source to"
                        f" '{read}' to convert anyway",
                        parameter="source",
                    )
            _refuse_other_files(opened, added, chain)
            offset, block = choose_offset(opened, read, added)
            target = with_precisions(spec, after, block)
            identity = {
                "kind": "quantize",
                "spec": asdict(spec),
                "offset": None if target.offset is None else asdict(target.offset),
                "source": read,
                "targets": sorted(added),
                "tables": [table.to_json() for table in manifest.shard_tables],
            }
            plan = fingerprint(identity)
            shards = list(spec.shard_numbers())
            left = {*shards} - {*change.receipts(shards, plan)}
            if rows := sum(len(spec.shard_rows(shard)) for shard in left):
                written = replace(spec, rows=rows, segments=(), precisions=added)
                what = f"converting {counted(len(left), 'shard')} to {', '.join(added)}"
                check_disk(
                    change.layout, written, what, only_tokens=True, parameter="to"
                )
            work = ShardWork(
                "converting",
                shards,
                spec.used_rows,
                plan,
                make_task=lambda shard: ConversionTask(
                    str(opened.location), shard, target, chain[-1], added, plan
                ),
                make_worker=lambda: convert_shard,
                engine=open_engine("inline", usable_cpus()),
            )
            edit = Edit(
                target,
                work=work,
                offset=offset,
                encoded_from=dict.fromkeys(added, chain),
            )
        apply(change, edit, on_event, should_stop)
    return QuantizeResult(
        source=read,
        added=added,
        dropped=tuple(name for name in spec.precisions if name not in after),
        precisions=after,
        rows=spec.used_rows,
        shards=spec.used_shards,
        bytes_per_image={
            name: codec(name, spec.block_shape).record_bytes for name in after
        },
        seconds=time.monotonic() - started,
    )


def _refuse_other_files(
    index: CommittedIndex, names: Iterable[str], chain: tuple[str, ...]
) -> None:
    """Raise UsageError if a kept snapshot may have other tokens in one of the
    precisions `names` than the new files. The new files would overwrite the files of
    the snapshot.

    Args:
        names: precisions to add.
        chain: precisions through which the tokens are converted, ending with the
            precision to read.
    """
    for snapshot in kept_snapshots(index):
        for name in {*names} & {*snapshot.spec.precisions}:
            # The tokens are surely the same only if both the new chain and the chain
            # that the snapshot records are ("bf16",). If another chain is recorded,
            # some shards, such as appended ones, may have been converted differently.
            if chain != ("bf16",) or snapshot.encoded_from.get(name, ()) != chain:
                raise UsageError(
                    f"snapshot {snapshot.snapshot.number} of {index.root} may have"
                    f" other tokens in '{name}', whose files a conversion from"
                    f" '{chain[-1]}' would replace; roll back to it, or remove the"
                    " earlier snapshots",
                    remedy="snapshots",
                )


def with_precisions(
    spec: IndexSpec,
    names: tuple[str, ...],
    offset: OffsetBlock | None = None,
) -> IndexSpec:
    """Return `spec` with the precisions `names`. If `offset` is given, it replaces the
    offset block of `spec`.
    """
    offset = spec.offset if offset is None else offset
    if offset is not None:
        with_offset = tuple(name for name in names if name in offset.precisions)
        offset = replace(offset, precisions=with_offset) if with_offset else None
    return replace(spec, precisions=names, offset=offset)


def precision_to_read(
    root: Path,
    manifest: Manifest,
    requested: str | None,
) -> str:
    """Return the precision to convert from: `requested`, or if that is None, the most
    accurate precision stored.

    A precision is as accurate as the least accurate precision in its chain of
    conversions. If several are equally accurate, the one with the fewest conversions
    wins.

    Raises:
        UsageError: the index at `root` does not store `requested`.
    """
    stored = manifest.spec.precisions
    if requested is None:

        def cost(name: str) -> tuple[int, int]:
            chain = (name, *manifest.encoded_from.get(name, ()))
            return max(map(_rank, chain)), len(chain)

        return min(stored, key=cost)
    if requested not in stored:
        raise UsageError(
            f"{root} does not have precision '{requested}'; convert from one of"
            f" {', '.join(stored)}",
            parameter="source",
        )
    return requested


def _rank(name: str) -> int:
    """Return the rank of a precision by accuracy. 0 is the most accurate precision.
    Unknown precisions come last.
    """
    names = precisions()
    return names.index(name) if name in names else len(names)


def add_ann(
    root: IndexLocation,
    request: AnnRequest = _DEFAULT,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> Manifest:
    """Build the nearest-neighbour index of the finished index at `root`, and commit the
    result. Return the new manifest.

    Args:
        root: directory or URL of the index.
        request: kind and recall of the nearest-neighbour index. The default is the kind
            that suits the number of rows.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Examples:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
        UsageError: `request` is invalid.
        JobStopped: `should_stop()` returned True. The index has not changed.
        MissingExtraError: FAISS is not installed.
    """
    with name_missing_extra("search"), begin(root, "ann build") as change:
        edit = Edit(change.index.spec, ann=request)
        return apply(change, edit, on_event, should_stop).manifest
