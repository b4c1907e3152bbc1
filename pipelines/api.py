"""The jobs as functions with keyword arguments, for Python programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from pipelines.jobs.append import AppendResult
    from pipelines.jobs.build_result import BuildResult
    from pipelines.jobs.compact import CompactResult
    from pipelines.jobs.merge import MergeResult
    from pipelines.jobs.quantize import QuantizeResult
    from pipelines.jobs.repair import RepairResult
    from pipelines.jobs.retry_failed import RetryResult
    from pipelines.jobs.snapshots import DeleteResult
    from pipelines.jobs.training.result import TrainResult
    from pipelines.jobs.update import UpdateResult
    from pipelines.progress.events import Event, OnEvent
    from pipelines.progress.stopping import ShouldStop


class BuildOptions(TypedDict, total=False):
    """Optional settings of `build_index`, see `pipelines.planning.config.BuildConfig`."""

    engine: Literal["ray", "inline"]
    workers: int | None
    threads: int | None
    shard_size: int
    batch_size: int
    device: str
    dtype: str
    precisions: Sequence[str]
    dedupe: bool
    column: str | None
    max_pixels: int | None
    max_failed: float | None
    address: str | None


class UpdateOptions(TypedDict, total=False):
    """Optional settings of `update_index`, with the meanings and defaults of `UpdateConfig`."""

    model: str | Path | None
    engine: Literal["ray", "inline"]
    workers: int | None
    address: str | None
    column: str | None
    max_failed: float | None
    max_vanished: float


def _ignore(event: Event) -> None:
    """Ignore an event. This is the default of `on_event`."""


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
    """Index images, as `edje-index build` does. The same call resumes an unfinished index.

    Args:
        sources: directories, tar archives, lists of paths or image files, in the order of the rows.
        out: directory of the index.
        model: directory of the model bundle.
        on_event: called with each progress event. `pipelines.progress.display.progress_display` yields a function that
            prints the events.
        should_stop: called often; the build stops once `should_stop()` returns True.
        options: further settings of the build, see `BuildOptions`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the build stopped before its end; the same call resumes the build.
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
    config = BuildConfig(tuple(map(str, names)), Path(out), Path(model), **settings)  # type: ignore[arg-type]
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
    """Store the tokens of an index in further precisions, as `edje-index quantize` does.

    Args:
        index: directory of the index. The index stays readable during the conversion.
        to: precisions to add; those that the index already holds are left unchanged.
        drop: precisions to remove after the others have been added.
        source: precision to convert from; None takes the highest-fidelity precision stored.
        workers: number of Ray workers; None converts in this process.
        on_event: as in `build_index`.

    Raises:
        UsageError: there is no index, a precision is unknown, or the disk is too small.
        JobStopped: a shard could not be converted; the same call resumes the conversion.
        MissingExtraError: `workers` is given and Ray is not installed.

    Example:
        >>> from pipelines import quantize_index
        >>> result = quantize_index("photos.edje", ["fp8", "nvfp4"])
        >>> result.precisions, result.bytes_per_image["nvfp4"]
        (('bf16', 'fp8', 'nvfp4'), 36)
    """
    from pipelines.engines import open_engine
    from pipelines.jobs.quantize import QuantizeConfig, run_quantize

    engine = open_engine("inline" if workers is None else "ray", workers)
    return run_quantize(QuantizeConfig(Path(index), tuple(to), tuple(drop), source), engine, on_event)


@name_missing_extra("build")
def append_index(
    index: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    on_event: OnEvent = _ignore,
) -> AppendResult:
    """Add new images to an index, as `edje-index append` does. The same call resumes a stopped append.

    Images whose content the index already holds are left out.

    Args:
        index: directory of the index. Its rows keep their ids.
        sources: directories, tar archives, lists of paths or image files, as in `build_index`.
        model: directory of the model bundle; None takes the bundle that built the index.
        engine: "ray" or "inline".
        workers: number of worker processes; None chooses a number that suits the machine.
        on_event: as in `build_index`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the append stopped before its end; the same call resumes the append.
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

    names = [sources] if isinstance(sources, str | Path) else sources
    bundle = None if model is None else Path(model)
    config = AppendConfig(Path(index), tuple(map(str, names)), bundle, engine=engine, workers=workers)
    return run_append(config, on_event)


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
    """Make an index equal to its sources, as `edje-index update` does. The same call resumes a stopped update.

    New and changed files get new rows. The rows of changed and vanished files are deleted. Unchanged files are not
    encoded again.

    Args:
        index: directory of the index. Unchanged rows keep their ids.
        sources: all sources of the index, as in `build_index`. If empty, the sources that the index records.
        dry_run: return what would change without changing the index.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        options: further settings of the update, see `UpdateOptions`.

    Raises:
        UsageError, ModelError: the request is invalid, or the index does not record its sources.
        JobStopped: the update stopped before its end; the same call resumes the update.
        EdjeError: another process is changing the index, a source cannot be read, or too many rows vanished or too many
            images failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import update_index
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.failed, result.vanished
        (6, 0, 0)
    """
    from pipelines.jobs.update import run_update
    from pipelines.planning.config import UpdateConfig

    names = [sources] if isinstance(sources, str | Path) else sources
    bundle = options.get("model")
    settings = {**options, "model": None if bundle is None else Path(bundle)}
    config = UpdateConfig(Path(index), tuple(map(str, names)), dry_run=dry_run, **settings)  # type: ignore[arg-type]
    return run_update(config, on_event, should_stop)


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
        index: directory of the index.
        rows: ids of the rows to delete.
        uri: a shell pattern such as "*.jpg"; rows whose uri matches the pattern are deleted too.
        where: a filter such as "licence is null"; rows that pass it are deleted too. See `edje_index.search.where`.
        erase: overwrite the data of the rows and of their duplicates, also of rows that were deleted before, and remove
            all earlier snapshots. The same call finishes an erasure that was stopped.
        dry_run: return the result without changing the index.

    Raises:
        UsageError: there is no index, `rows`, `uri` and `where` are all missing, or `where` is invalid.
        RowIdError: a row id is out of range or belongs to no input.
        EdjeError: another process is changing the index.

    Example:
        >>> from pipelines import delete_rows
        >>> result = delete_rows("photos.edje", rows=[1, 3])
        >>> result.deleted, result.left, result.snapshot
        ((1, 3), 4, 1)
    """
    from pipelines.jobs.erase import run_erase
    from pipelines.jobs.snapshots import run_delete

    return (run_erase if erase else run_delete)(Path(index), rows, uri, where=where, dry_run=dry_run)


@name_missing_extra("search")
def compact_index(index: str | Path, *, on_event: OnEvent = _ignore, should_stop: ShouldStop = _never) -> CompactResult:
    """Write an index again without its deleted rows, as `edje-index compact` does. The model is not needed.

    The other rows get new row ids. `storage_formats.TokenStore.translate` returns the new ids of old ones. Does nothing
    if no row is deleted. The same call resumes a stopped compaction.

    Args:
        index: directory of the index. The index stays readable during the compaction.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: there is no index, all rows are deleted, or the disk is too small.
        JobStopped: the compaction stopped before its end, or a row is damaged; the same call resumes the compaction.
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

    return run_compact(Path(index), on_event, should_stop)


@name_missing_extra("search")
def merge_indexes(
    indexes: Sequence[str | Path],
    out: str | Path,
    *,
    on_event: OnEvent = _ignore,
    should_stop: ShouldStop = _never,
) -> MergeResult:
    """Copy several indexes of one model into a new index, as `edje-index merge` does. The model is not needed.

    Rows whose content an earlier index holds are deleted in the new index. The indexes do not change. The same call
    resumes a stopped merge.

    Args:
        indexes: directories of the indexes. They need the same model, block shape, shard size and precisions.
        out: directory of the new index. It appears once it is complete.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: an index does not exist or does not fit the first one, or `out` exists.
        JobStopped: the merge stopped before its end, or a file is damaged; the same call resumes the merge.
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

    return run_merge([Path(index) for index in indexes], Path(out), on_event, should_stop)


@name_missing_extra("search")
def repair_index(index: str | Path, *, dry_run: bool = False, on_event: OnEvent = _ignore) -> RepairResult:
    """Rebuild damaged files of an index from its other files, as `edje-index repair` does. The model is not needed.

    Tokens are repaired only if checksums show that the result is what the index held.

    Args:
        index: directory of the index.
        dry_run: return what would be repaired without changing the index.
        on_event: as in `build_index`.

    Raises:
        UsageError: there is no index.
        CorruptIndexError: `index.json` is damaged.
        EdjeError: another process is changing the index, or a change that adds rows has not finished.
        MissingExtraError: FAISS is not installed, but the nearest-neighbour index is damaged.

    Example:
        >>> from pathlib import Path
        >>> from pipelines import repair_index
        >>> Path("photos.edje/checksums/bf16/00000000.crc32c").unlink()
        >>> [(file.path, file.source) for file in repair_index("photos.edje").repaired]
        [('checksums/bf16/00000000.crc32c', 'the tokens')]
    """
    from pipelines.jobs.repair import run_repair

    return run_repair(Path(index), on_event, dry_run=dry_run)


@name_missing_extra("build")
def retry_failed(
    index: str | Path,
    *,
    model: str | Path | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    on_event: OnEvent = _ignore,
) -> RetryResult:
    """Try the failed inputs of an index again, as `edje-index retry-failed` does. The same call resumes the retry.

    Args:
        index: directory of the index.
        model: directory of the model bundle; None takes the bundle that built the index.
        engine: "ray" or "inline".
        workers: number of worker processes; None chooses a number that suits the machine.
        on_event: as in `build_index`.

    Raises:
        UsageError, ModelError: the request is invalid.
        JobStopped: the retry stopped before its end; the same call resumes it.
        EdjeError: another process is changing the index.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import retry_failed
        >>> retry_failed("photos.edje", engine="inline").indexed
        0
    """
    from pipelines.jobs.retry_failed import run_retry_failed
    from pipelines.planning.config import AppendConfig

    bundle = None if model is None else Path(model)
    return run_retry_failed(AppendConfig(Path(index), (), bundle, engine=engine, workers=workers), on_event)


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
    """Train adapter and joint encoder on captions, as `edje-index train` does. The same call resumes a training run.

    Args:
        captions: one or several caption files, see `edje_index.captions.reading.read_captions` for their formats.
        out: directory of the bundle to write.
        preset: name of the preset to start from, a key of `edje_index.training.presets.PRESETS`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        settings: settings that override the preset. Each keyword is a group of settings, such as `loop`; its value maps
            names of settings to values. `edje-index train --show-settings` lists all groups and names.

    Raises:
        UsageError: the preset or a setting is invalid.
        ModelError: a model cannot be used.
        JobStopped: the training run stopped before its end; the same call resumes the run.
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
    from edje_index.training.config import TrainConfig, validated
    from edje_index.training.presets import PRESETS
    from pipelines.jobs.training.request import TrainRequest
    from pipelines.jobs.training.run import run_training
    from storage_formats.errors import UsageError

    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    groups = {
        name: {**PRESETS[preset].get(name, {}), **settings.get(name, {})} for name in {*PRESETS[preset], *settings}
    }
    files = [captions] if isinstance(captions, str | Path) else list(captions)
    inputs = {**groups.pop("inputs", {}), "captions": files}
    run = {**groups.pop("run", {}), "out": out}
    request = validated(TrainRequest, {"inputs": inputs, "run": run})
    return run_training(request, validated(TrainConfig, groups), on_event, should_stop)
