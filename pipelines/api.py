"""Functions that do what the `edje-index` commands do, for use from Python."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from storage_formats.extras import name_missing_extra
from storage_formats.format.object_store import local_path

if TYPE_CHECKING:
    from pipelines.jobs.append import AppendResult
    from pipelines.jobs.build_result import BuildResult
    from pipelines.jobs.compact import CompactResult
    from pipelines.jobs.copy import CopyResult
    from pipelines.jobs.merge import MergeResult
    from pipelines.jobs.quantize import QuantizeResult
    from pipelines.jobs.repair import RepairResult
    from pipelines.jobs.retry_failed import RetryResult
    from pipelines.jobs.snapshots import DeleteResult
    from pipelines.jobs.training.run import TrainResult
    from pipelines.jobs.update import UpdateResult
    from pipelines.progress.events import Event, OnEvent, ShouldStop


class BuildOptions(TypedDict, total=False):
    """Optional settings of `build_index`. `pipelines.planning.config.BuildConfig` describes each setting."""

    engine: Literal["ray", "inline"]
    workers: int | None
    threads: int | None
    shard_size: int
    batch_size: int
    device: str
    dtype: str | None
    precisions: Sequence[str]
    dedupe: bool
    column: str | None
    max_pixels: int | None
    truncated: Literal["fail", "load"]
    frames: int | None
    max_failed: float | None
    address: str | None
    memory: int | None


class RetryOptions(TypedDict, total=False):
    """Optional settings of `retry_failed`. `pipelines.planning.config.AppendConfig` describes each setting."""

    model: str | Path | None
    engine: Literal["ray", "inline"]
    workers: int | None
    address: str | None
    memory: int | None


class AppendOptions(RetryOptions, total=False):
    """Optional settings of `append_index`. `pipelines.planning.config.AppendConfig` describes each setting."""

    column: str | None
    max_failed: float | None


class UpdateOptions(AppendOptions, total=False):
    """Optional settings of `update_index`. `pipelines.planning.config.UpdateConfig` describes each setting."""

    max_vanished: float


def _ignore(event: Event) -> None:
    """Do nothing. This is the default value of `on_event`."""


def _never() -> bool:
    return False


@name_missing_extra("build")
def build_index(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    model: str | Path,
    *,
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
    **options: Unpack[BuildOptions],
) -> BuildResult:
    """Build an index of images, as `edje-index build` does.

    Call the function again with the same arguments to resume a stopped build.

    Args:
        sources: one or several directories, tar archives, lists of paths or image files. The rows of the index have
            the order of the sources.
        out: directory of the index.
        model: directory of the model bundle.
        on_event: called with each progress event. `pipelines.progress.display.progress_display` is a context manager
            that gives a function that prints the events.
        should_stop: called often; the build stops once `should_stop()` returns True.
        options: further settings of the build; see `BuildOptions`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the build stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, no input could be indexed, or a larger share of the inputs
            failed than `max_failed` allows.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import build_index
        >>> result = build_index("photos", "new.edje", "model", engine="inline", precisions=["fp8"])
        >>> result.inputs, result.indexed, result.failed
        (6, 6, 0)
    """
    from pipelines.jobs.build import run_build
    from pipelines.planning.config import BuildConfig

    names = [sources] if isinstance(sources, str | Path) else sources
    settings = {**options, "precisions": tuple(options.get("precisions", BuildConfig.precisions))}
    config = BuildConfig(tuple(map(str, names)), local_path(out), local_path(model), **settings)  # type: ignore[arg-type]
    return run_build(config, on_event, should_stop)


@name_missing_extra("build")
def quantize_index(
    index: str | Path,
    to: Sequence[str] = (),
    *,
    drop: Sequence[str] = (),
    source: str | None = None,
    workers: int | None = None,
    on_event: OnEvent = _ignore,
) -> QuantizeResult:
    """Add and remove precisions of the stored tokens, as `edje-index quantize` does.

    Call the function again with the same arguments to resume a stopped conversion.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            The index can be read during the conversion.
        to: precisions to add. Precisions that the index already stores are skipped.
        drop: precisions to remove, after all precisions in `to` have been added.
        source: precision to convert from; None takes the highest-fidelity precision stored.
        workers: number of Ray workers; None converts in this process.
        on_event: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`, a precision is unknown, or the disk is too small.
        JobStopped: a shard could not be converted. Finished shards are kept.
        MissingExtraError: `workers` is given and Ray is not installed.

    Example:
        >>> from pipelines import quantize_index
        >>> result = quantize_index("photos.edje", ["fp8", "nvfp4"])
        >>> result.precisions, result.bytes_per_image["nvfp4"]
        (('bf16', 'fp8', 'nvfp4'), 36)
    """
    from pipelines.engines.base import open_engine
    from pipelines.jobs.quantize import QuantizeConfig, quantize_at

    engine = open_engine("inline" if workers is None else "ray", workers)
    make_config = functools.partial(QuantizeConfig, to=tuple(to), drop=tuple(drop), source=source)
    return quantize_at(index, make_config, engine, on_event)


@name_missing_extra("build")
def append_index(
    index: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    on_event: OnEvent = _ignore,
    **options: Unpack[AppendOptions],
) -> AppendResult:
    """Add new images to an index, as `edje-index append` does.

    Images that the index already contains are skipped. Call the function again with the same arguments to resume a
    stopped append.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            Its rows keep their ids.
        sources: directories, tar archives, lists of paths or image files, as in `build_index`.
        on_event: as in `build_index`.
        options: further settings of the append; see `AppendOptions`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the append stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, no new image could be indexed, or too many images failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.indexed, result.duplicates
        (0, 6)
    """
    from pipelines.jobs.append import run_append
    from pipelines.planning.config import AppendConfig
    from storage_formats.writing.working_copy import working_copy

    names = [sources] if isinstance(sources, str | Path) else sources
    with working_copy(index) as copy:
        return run_append(AppendConfig(copy.root, tuple(map(str, names)), **_with_local_model(options)), on_event)


@name_missing_extra("build")
def update_index(
    index: str | Path,
    sources: str | Path | Sequence[str | Path] = (),
    *,
    dry_run: bool = False,
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
    **options: Unpack[UpdateOptions],
) -> UpdateResult:
    """Add, replace and delete rows so that an index matches its sources, as `edje-index update` does.

    New and changed files get new rows. The old rows of changed files and the rows of missing files are deleted.
    Unchanged files are not encoded again. Call the function again with the same arguments to resume a stopped update.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            Unchanged rows keep their ids.
        sources: all sources of the index, as in `build_index`. If empty, the sources recorded in the index are used.
        dry_run: return the changes without applying them.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        options: further settings of the update; see `UpdateOptions`.

    Raises:
        UsageError, ModelError: the request is invalid, or `sources` is empty and the index does not record its sources.
        JobStopped: the update stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, a source cannot be read, or too many files are missing or
            failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import update_index
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.failed, result.vanished
        (6, 0, 0)
    """
    from pipelines.jobs.update import run_update
    from pipelines.planning.config import UpdateConfig
    from storage_formats.writing.working_copy import working_copy

    names = [sources] if isinstance(sources, str | Path) else sources
    with working_copy(index, read_only=dry_run) as copy:
        config = UpdateConfig(copy.root, tuple(map(str, names)), dry_run=dry_run, **_with_local_model(options))
        return run_update(config, on_event, should_stop)


def _with_local_model(options: RetryOptions) -> dict[str, Any]:
    """Return `options` with the path of the model bundle, or None for the bundle that built the index."""
    bundle = options.get("model")
    return {**options, "model": None if bundle is None else local_path(bundle)}


def delete_rows(
    index: str | Path,
    rows: Sequence[int] = (),
    *,
    uri: str | None = None,
    where: str | None = None,
    erase: bool = False,
    dry_run: bool = False,
) -> DeleteResult:
    """Delete rows of an index, as `edje-index delete` does. The other rows keep their ids.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
        rows: ids of the rows to delete.
        uri: shell pattern such as "*.jpg". Rows with a matching uri are deleted too.
        where: filter such as "licence is null", see `edje_index.search.where`. Rows that pass the filter are deleted
            too.
        erase: also overwrite the data of the selected rows and of their duplicates, and remove all earlier snapshots.
            Selected rows that are already deleted are erased too. Call the function again to finish an interrupted
            erasure.
        dry_run: return the result without changing the index.

    Raises:
        UsageError: there is no index at `index`, `where` is invalid, or no rows are selected because `rows`, `uri` and
            `where` are all missing.
        RowIdError: a row id does not exist.
        EdjeError: another process is changing the index.

    Example:
        >>> from pipelines import delete_rows
        >>> result = delete_rows("photos.edje", rows=[1, 3])
        >>> result.deleted, result.left, result.snapshot
        ((1, 3), 4, 1)
    """
    from pipelines.jobs.erase import run_erase
    from pipelines.jobs.snapshots import run_delete

    return (run_erase if erase else run_delete)(index, rows, uri, where=where, dry_run=dry_run)


@name_missing_extra("search")
def compact_index(index: str | Path, *, on_event: OnEvent = _ignore, should_stop: ShouldStop = _never) -> CompactResult:
    """Rewrite an index without its deleted rows, as `edje-index compact` does. The model is not needed.

    The remaining rows get new ids. `storage_formats.TokenStore.translate` maps old row ids to new row ids. If no row is
    deleted, the index does not change. Call the function again to resume a stopped compaction.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            The index can be read during the compaction.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`, all rows are deleted, or the disk is too small.
        JobStopped: the compaction stopped early, or a row is damaged. Finished shards are kept.
        EdjeError: another process is changing the index, or an append has not finished.
        MissingExtraError: FAISS is not installed, but the index has a nearest-neighbour index.

    Example:
        >>> from pipelines import compact_index, delete_rows
        >>> from storage_formats import TokenStore
        >>> _ = delete_rows("pages.edje", rows=[0, 1, 2])
        >>> compact_index("pages.edje").rows
        27
        >>> TokenStore.open("pages.edje").translate([2, 3])
        array([  -1, 1024])
    """
    from pipelines.jobs.compact import run_compact

    return run_compact(index, on_event, should_stop)


@name_missing_extra("search")
def merge_indexes(
    indexes: Sequence[str | Path],
    out: str | Path,
    *,
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
) -> MergeResult:
    """Copy several indexes of one model into a new index, as `edje-index merge` does. The model is not needed.

    If several indexes contain the same image, only the row from the first index is kept; the other rows are marked as
    deleted in the new index. The given indexes do not change. Call the function again with the same arguments to resume
    a stopped merge.

    Args:
        indexes: directories of the indexes. All indexes must have the same model, block shape, shard size and
            precisions.
        out: directory of the new index. The directory appears once the index is complete.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: `out` exists, an index does not exist, or the indexes differ in model, block shape, shard size or
            precisions.
        JobStopped: the merge stopped early, or a file is damaged. Finished shards are kept.
        EdjeError: another process is writing to `out`.
        MissingExtraError: FAISS is not installed, but an index has a nearest-neighbour index.

    Example:
        >>> import shutil
        >>> from pipelines import merge_indexes
        >>> _ = shutil.copytree("photos.edje", "copy.edje")
        >>> result = merge_indexes(["photos.edje", "copy.edje"], "all.edje")
        >>> [each.offset for each in result.inputs]
        [0, 1024]
    """
    from pipelines.jobs.merge import run_merge

    return run_merge([local_path(index) for index in indexes], local_path(out), on_event, should_stop)


def copy_index(
    index: str | Path,
    out: str | Path,
    *,
    snapshot: int | None = None,
    replace: bool = False,
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
) -> CopyResult:
    """Copy one snapshot of an index, as `edje-index copy` does. The checksum of every copied file is checked.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://`, `az://`, `https://`).
        out: new directory, or a URL to write to (`s3://`, `gs://` or `az://`). If a URL holds an earlier snapshot of
            the same index, only the missing files are copied.
        snapshot: number of the snapshot; None copies the current snapshot.
        replace: True to remove the index at the URL `out` before the copy.
        on_event: as in `build_index`.
        should_stop: as in `build_index`. The same call resumes a stopped copy.

    Raises:
        UsageError: there is no such index or snapshot, the directory `out` exists, the URL `out` holds another
            index, or `replace` is given for a directory.
        CorruptIndexError: a file of `index` is missing or damaged.
        JobStopped: the copy stopped early.
        EdjeError: another copy to `out` is running, or an object store does not respond.
        MissingExtraError: `index` or `out` is a URL, and obstore is not installed.

    Example:
        >>> from pipelines import copy_index
        >>> from storage_formats import TokenStore
        >>> _ = copy_index("photos.edje", "backup.edje")
        >>> len(TokenStore.open("backup.edje"))
        6
    """
    from pipelines.jobs.copy import run_copy

    return run_copy(index, out, on_event, should_stop, snapshot=snapshot, replace=replace)


@name_missing_extra("search")
def repair_index(
    index: str | Path, *, dry_run: bool = False, model: str | Path | None = None, on_event: OnEvent = _ignore
) -> RepairResult:
    """Rebuild damaged files of an index from its other files, as `edje-index repair` does.

    Tokens that no other precision determines are encoded again from the images, with the model. Repaired tokens are
    stored only if they have the original checksums.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
        dry_run: return what would be repaired without changing the index.
        model: directory of the model bundle; None takes the bundle that built the index.
        on_event: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`.
        CorruptIndexError: `index.json` is damaged.
        EdjeError: another process is changing the index, or an append, update or retry has not finished.
        MissingExtraError: FAISS is not installed, but the nearest-neighbour index is damaged.

    Example:
        >>> from pathlib import Path
        >>> from pipelines import repair_index
        >>> Path("photos.edje/checksums/bf16/00000000.crc32c").unlink()
        >>> [(file.path, file.source) for file in repair_index("photos.edje").repaired]
        [('checksums/bf16/00000000.crc32c', 'the tokens')]
    """
    from pipelines.jobs.repair import run_repair

    bundle = None if model is None else local_path(model)
    return run_repair(index, on_event, dry_run=dry_run, model=bundle)


@name_missing_extra("build")
def retry_failed(index: str | Path, *, on_event: OnEvent = _ignore, **options: Unpack[RetryOptions]) -> RetryResult:
    """Try to index the failed inputs of an index again, as `edje-index retry-failed` does.

    Call the function again with the same arguments to resume a stopped retry.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
        on_event: as in `build_index`.
        options: further settings of the retry; see `RetryOptions`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the retry stopped early. Finished shards are kept.
        EdjeError: another process is changing the index.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import retry_failed
        >>> retry_failed("photos.edje", engine="inline").indexed
        0
    """
    from pipelines.jobs.retry_failed import run_retry_failed
    from pipelines.planning.config import AppendConfig
    from storage_formats.writing.working_copy import working_copy

    with working_copy(index) as copy:
        return run_retry_failed(AppendConfig(copy.root, (), **_with_local_model(options)), on_event)


@name_missing_extra("train")
def train(
    captions: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    preset: str = "paper",
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
    **settings: Mapping[str, Any],
) -> TrainResult:
    """Train an adapter and a joint encoder on captioned images, as `edje-index train` does.

    Call the function again with the same arguments to resume a stopped training run.

    Args:
        captions: one or several caption files; `edje_index.captions.reading.read_captions` lists the formats.
        out: directory of the bundle to write.
        preset: name of the preset to start from, a key of `edje_index.training.config.PRESETS`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        settings: settings that override the preset. Each keyword names a group of settings, such as `loop`. Each value
            maps setting names to setting values. `edje-index train --show-settings` lists all groups and names.

    Raises:
        UsageError: the preset or a setting is invalid.
        ModelError: a model cannot be used.
        JobStopped: the training run stopped early. The last checkpoint is kept.
        MissingExtraError: a package of the extra `train` is not installed.

    Example:
        >>> from pipelines import train
        >>> result = train(
        ...     "captions.jsonl",
        ...     "trained",
        ...     inputs={"model": "model", "images": "photos"},
        ...     architecture={"tokens": 4, "adapter_hidden": 48},
        ...     loop={"steps": 2, "batch_size": 4},
        ... )
        >>> result.images, result.steps
        (6, 2)
    """
    from edje_index.training.config import TrainSettings, merge_settings, validated
    from pipelines.jobs.training.run import run_training

    files = [captions] if isinstance(captions, str | Path) else list(captions)
    values = merge_settings(preset, settings, {"inputs": {"captions": files}, "run": {"out": out}})
    return run_training(validated(TrainSettings, values), on_event, should_stop)
