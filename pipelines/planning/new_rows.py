"""Plans the rows that `append`, `update` and `retry-failed` add to a finished index.

The new rows form a new segment (SPEC.md section 12). A stopped change resumes from its stored plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipelines.planning.config import AppendConfig, BuildConfig
from pipelines.planning.inputs import check_frozen_inputs, removed_on_failure, store_inputs
from pipelines.planning.plan import BuildPlan, BuildSettings, discard_change, model_record, plan_of_manifest, read_plan
from pipelines.planning.prepare import PreparedBuild
from pipelines.planning.resources import check_disk, check_extension_memory, check_workers
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout, Segment

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.images.inputs import InputRef
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class NewInputs:
    """The inputs that get new rows.

    Attributes:
        refs: inputs in row order.
        digest: SHA-256 of the inputs, in hexadecimal; see `BuildPlan.inputs_digest`.
        duplicates: number of inputs that get no row, because the index or an earlier input has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or reason.
    """

    refs: list[InputRef]
    digest: str
    duplicates: int
    ignored: dict[str, int]


@dataclass(frozen=True)
class PreparedRows:
    """A change whose new rows are ready to be encoded.

    Attributes:
        duplicates: see `NewInputs`.
        build: plan and receipts of the new rows; None if there are no new rows.
        config: build request with the settings of the change; the engine is created from this request.
    """

    duplicates: int
    build: PreparedBuild | None = None
    config: BuildConfig | None = None


@dataclass(frozen=True)
class RowsRequest:
    """A validated request for new rows.

    Attributes:
        index: the index before the change.
        change: name of the change, see `BuildPlan.change`.
        info: description of the model bundle.
        settings: settings of the new rows.
        build: build request with the same settings.
        workers: number of worker processes; None lets the Ray cluster choose the number.
    """

    index: CommittedIndex
    change: str
    info: BundleInfo
    settings: BuildSettings
    build: BuildConfig
    workers: int | None

    @property
    def first_shard(self) -> int:
        """Number of the first shard of the new rows."""
        manifest = self.index.manifest
        return max(manifest.spec.shards, manifest.snapshot.next_shard)

    def fits(self, stored: BuildPlan) -> bool:
        """Return True if the plan `stored` of a stopped change was made for the current rows of `index`."""
        return (
            stored.spec.used_segments[:-1] == self.index.manifest.spec.used_segments
            and stored.shards.start >= self.index.manifest.snapshot.next_shard
        )

    def check_size(self, rows: int) -> None:
        """Raise UsageError if the disk or the memory of this machine is too small for `rows` new rows."""
        manifest, memory = self.index.manifest, self.build.memory
        check_extension_memory(manifest, rows, memory)
        check_disk(self.index.root, replace(manifest.spec, rows=rows, segments=()), memory)

    def prepared(self, new: NewInputs) -> PreparedRows:
        """Plan the rows of `new`. Store the plan and the lists of inputs in `build/`.

        Raises:
            UsageError: the disk or the memory is too small.
            OSError: the plan cannot be written.
        """
        if not new.refs:
            return PreparedRows(new.duplicates)
        with removed_on_failure(self.index.root):
            self.check_size(len(new.refs))
            if Layout(self.index.root).receipt(0).parent.exists():  # of a stopped conversion, which begins anew
                discard_rows(self.index)
            plan = self._planned(new)
            plan.write()
        return PreparedRows(new.duplicates, PreparedBuild(plan, self.workers), self.build)

    def resumed(self, stored: BuildPlan) -> PreparedRows:
        """Return a stopped change with the plan `stored`, ready to continue.

        Raises:
            UsageError: the memory is too small for the nearest-neighbour index.
            CorruptIndexError: a list of inputs is damaged.
        """
        from storage_formats.format.receipts import read_receipts

        check_extension_memory(self.index.manifest, stored.rows, self.build.memory)
        receipts = read_receipts(Layout(self.index.root), stored.shards, stored.fingerprint)
        check_frozen_inputs(stored, receipts)
        plan = replace(stored, model=model_record(self.info))
        return PreparedRows(plan.duplicates, PreparedBuild(plan, self.workers, receipts), self.build)

    def _planned(self, new: NewInputs) -> BuildPlan:
        manifest, spec = self.index.manifest, self.index.manifest.spec
        lists = store_inputs(
            Layout(self.index.root),
            new.refs,
            spec.shard_size,
            first_shard=self.first_shard,
            earlier_columns=manifest.columns,
        )
        segments = (*spec.used_segments, Segment(self.first_shard * spec.shard_size, lists.rows))
        return BuildPlan(
            root=self.index.root,
            spec=replace(spec, rows=segments[-1].stop, segments=segments),
            model=model_record(self.info),
            settings=self.settings,
            inputs_digest=new.digest,
            duplicates=new.duplicates,
            ignored={**new.ignored, **lists.ignored},
            input_checksums=lists.checksums,
            columns=lists.columns,
            change=self.change,
        )


def request_rows(config: AppendConfig, index: CommittedIndex, change: str) -> RowsRequest:
    """Check that this machine and the model can encode new rows of `index`, and return the request.

    Raises:
        UsageError: the machine lacks the device or memory, or the index was not made by a build.
        ModelError: the model bundle cannot be used, or another bundle built the index.
    """
    from edje_index.bundles.info import matching_bundle

    info = matching_bundle(index, config.model)
    settings = settings_of_rows(config, index)
    build = _build_config(config, info, settings)
    return RowsRequest(index, change, info, settings, build, check_workers(build, settings, info))


def refuse_change_of_another_kind(stored: BuildPlan, change: str) -> None:
    """Raise EdjeError if `stored` is not a plan for `change` ("append", "update" or "retry-failed")."""
    if stored.change != change:
        raise EdjeError(
            f"'{stored.change}' of {stored.root} has not finished; run 'edje-index {stored.change}' again, or "
            f"{discard_change(stored.root)}"
        )


def resume_or_plan(config: AppendConfig, index: CommittedIndex, change: str, new: NewInputs) -> PreparedRows:
    """Resume a stopped change if its plan contains the inputs of `new`. Otherwise discard that plan and make a new one.

    Raises:
        UsageError, ModelError: see `request_rows`.
        EdjeError: another kind of change has not finished.
        CorruptIndexError: the stored plan or a list of inputs is damaged.
        OSError: the plan cannot be written.
    """
    stored = read_plan(config.root, append=True)
    if stored is not None:
        refuse_change_of_another_kind(stored, change)
    request = request_rows(config, index, change) if new.refs else None
    if stored is not None:
        has_same_rows = request is not None and stored.settings == request.settings and request.fits(stored)
        if request is not None and has_same_rows and stored.inputs_digest == new.digest:
            return request.resumed(stored)
        discard_rows(index)
    return PreparedRows(new.duplicates) if request is None else request.prepared(new)


def is_committed(plan: BuildPlan, index: CommittedIndex) -> bool:
    """Return True if the new rows of `plan` are already committed to `index`."""
    return plan.spec.used_segments[-1] in index.manifest.spec.used_segments


def discard_rows(index: CommittedIndex) -> None:
    """Remove the plan and the files of an unfinished change. Committed snapshots are kept."""
    from storage_formats.writing.publish import remove_build
    from storage_formats.writing.snapshots import kept_snapshots, remove_unnamed_files

    layout = Layout(index.root)
    remove_unnamed_files(layout, kept_snapshots(index))
    remove_build(layout)


def settings_of_rows(config: AppendConfig, index: CommittedIndex) -> BuildSettings:
    """Return the settings of new rows: the settings of the index, but with the sources of `config` and with `dedupe`.

    Raises:
        UsageError: the index was not made by a build.
    """
    from pipelines.sources.base import absolute_spec

    built = plan_of_manifest(config.root, index.manifest).settings
    sources = tuple(absolute_spec(source) for source in config.sources)
    precisions = index.manifest.spec.precisions
    return replace(built, sources=sources, column=config.column, dedupe=True, precisions=precisions)


def _build_config(config: AppendConfig, info: BundleInfo, settings: BuildSettings) -> BuildConfig:
    return BuildConfig(
        sources=config.sources,
        out=config.root,
        model=info.path,
        engine=config.engine,
        workers=config.workers,
        threads=settings.threads,
        shard_size=settings.shard_size,
        batch_size=settings.batch_size,
        precisions=settings.precisions,
        max_failed=config.max_failed,
        address=config.address,
        memory=config.memory,
    )
