"""Opens or builds the indexes that a training run reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.images.decoded_input import DecodeSettings
from edje_index.images.inputs import display_path
from edje_index.training.data.crops import Crops
from pipelines.jobs.training.request import ONLINE
from pipelines.jobs.training.view_images import write_views
from pipelines.planning.config import BuildConfig
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.captions.reading import CaptionedImage
    from edje_index.models.adapter import Adapter
    from edje_index.training.config import TrainConfig
    from pipelines.jobs.training.matching import MatchedCaptions
    from pipelines.jobs.training.read_inputs import ReadInputs
    from pipelines.jobs.training.request import RunSettings, TrainingInputs
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex

ONLINE_INPUTS = "inputs.arrow"
_EMBEDDINGS = "images.edje"
VIEW_INDEX = "views.edje"
VIEW_FILES = "views"
"""Folder of the cropped files. They are needed until the index of views is built and its rows are matched."""
VIEW_ROWS = "view-rows.npy"


@dataclass(frozen=True)
class IndexBuilder:
    """Builds the indexes of one training run.

    Attributes:
        folder: the run folder.
        run: hardware settings, which also select the execution engine.
        dtype: data type of matrix products; "auto" is bfloat16 on CUDA and float32 on a CPU, as in training.
        on_event: called with each progress event.
        should_stop: the build stops once `should_stop()` returns True.
        truncated: "load" or "fail", see `BuildConfig`.
        frames: number of frames per clip; None for images.
        precision: precision of the stored features.
    """

    folder: Path
    run: RunSettings
    dtype: str
    on_event: OnEvent
    should_stop: ShouldStop
    truncated: str = "fail"
    frames: int | None = None
    precision: str = "bf16"

    def build(self, name: str, model: Path, sources: tuple[str, ...], announcement: str) -> CommittedIndex:
        """Build the index `name` in the run folder, or resume the build.

        Args:
            name: directory name of the index.
            model: bundle to build with.
            sources: sources of the images.
            announcement: status message to show first.

        Raises:
            EdjeError: no image could be read.
            JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
        """
        from edje_index.models.devices import threads_kept
        from pipelines.jobs.build import run_build
        from pipelines.jobs.failed_inputs import FailedInputsError
        from storage_formats.format.manifest import CommittedIndex

        self.on_event(StatusMessage(announcement))
        config = BuildConfig(
            sources=sources,
            out=self.folder / name,
            model=model,
            engine="ray" if self.run.distributed else "inline",
            threads=self.run.threads,
            device=self.run.device,
            dtype=None if self.dtype == "auto" else self.dtype,
            address=self.run.address,
            column=_path_column(sources),
            truncated=self.truncated,
            frames=self.frames,
            precisions=(self.precision,),
            max_failed=1.0,  # training has its own message about missing images
        )
        try:
            with threads_kept():
                run_build(config, self.on_event, self.should_stop)
        except FailedInputsError as error:
            raise EdjeError(
                f"{error.problem}. Correct the captions or inputs.images; then remove the run folder {self.folder} and "
                "train again"
            ) from error
        return CommittedIndex.open(config.out)


def feature_index(
    given: CommittedIndex | None, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> CommittedIndex:
    """Return an index of the features of `items`: the index `given`, or a new index.

    Raises:
        UsageError: another tower built `given`.
        JobStopped: the build stopped early. Finished shards are kept.
    """
    if given is not None:
        return _checked(given, start.accepted_features(), start.feature_adapter.kind)
    sources = _image_sources(builder.folder / "features.edje.jsonl", items)
    model = _model_of_features(builder.folder / "features-model", start)
    return builder.build("features.edje", model, sources, "computing features of the frozen tower, once")


def online_index(start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder) -> CommittedIndex:
    """Return an index of the embeddings of the images `items`. Also write the table of the images to `ONLINE_INPUTS`.

    The index stores one unused patch per image instead of the features. If the table exists, the images are not
    checked again, so a run can be resumed even if images are missing.

    Raises:
        EdjeError: the images have changed since the index was built.
        JobStopped: the build stopped before its end. Finished shards are kept.
    """
    from edje_index.images.input_table import write_input_table
    from edje_index.models.adapter import STRIDED, build_adapter
    from pipelines.sources import iter_all, open_sources
    from storage_formats.format.manifest import CommittedIndex

    table = builder.folder / ONLINE_INPUTS
    if table.exists():
        return CommittedIndex.open(builder.folder / _EMBEDDINGS)
    sources = _image_sources(builder.folder / "images.edje.jsonl", items)
    one_patch = build_adapter(replace(start.feature_adapter, kind=STRIDED, num_tokens=1))
    model = _model_of_tower(builder.folder / "images-model", start, one_patch)
    index = builder.build(_EMBEDDINGS, model, sources, "computing embeddings of the frozen tower, once")
    unchecked = table.with_name(f".{table.name}.part")
    rows = write_input_table(unchecked, iter_all(open_sources(sources, _path_column(sources))))
    if rows != index.manifest.spec.rows:
        unchecked.unlink()
        raise EdjeError(
            f"the images have changed since {index.root} was built: it has {index.manifest.spec.rows} rows, but there "
            f"are {rows} images now; remove the run folder {builder.folder} and train again"
        )
    unchecked.rename(table)
    return index


@dataclass(frozen=True)
class ViewIndex:
    """An index of the features of augmented views.

    Attributes:
        index: the index.
        files: folder of the cropped image files. The uri of each view in the index starts with this path.
        is_given: True if the request gives the index, False if this training run built the index.
    """

    index: CommittedIndex
    files: Path
    is_given: bool


@dataclass(frozen=True)
class FurtherIndexes:
    """The indexes that a training run reads in addition to the feature index. All indexes contain the same images.

    Attributes:
        mining: index of the mining model's embeddings.
        teacher: index of the teacher's tokens, or of the features from which the teacher's adapter computes tokens;
            None without a teacher.
        views: index of the features of augmented views; None without views.
    """

    mining: CommittedIndex
    teacher: CommittedIndex | None
    views: ViewIndex | None


def further_indexes(
    inputs: TrainingInputs,
    given: ReadInputs,
    config: TrainConfig,
    start: StartModel,
    matched: MatchedCaptions,
    builder: IndexBuilder,
) -> FurtherIndexes:
    """Check the given indexes, and build the missing indexes.

    Raises:
        UsageError: another model built a given index, or the teacher has a different tokenizer.
        JobStopped: a build stopped early. Finished shards are kept.
    """
    mining, teacher, views = matched.features, None, None
    if inputs.miner is not None:
        mining = _mining_index(inputs.miner, given.miner_features, matched.items, builder)
    if inputs.teacher is not None:
        stored = given.teacher_features or (None if inputs.features == ONLINE else matched.features)
        teacher = _teacher_index(inputs.teacher, stored, start)
    if config.augmentation.views and inputs.features != ONLINE:
        views = _view_index(given.view_features, config, start, matched.items, builder)
    return FurtherIndexes(mining, teacher, views)


def _mining_index(
    miner: Path, given: CommittedIndex | None, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> CommittedIndex:
    """Return an index of the embeddings that `miner` computes of `items`: the index `given`, or a new index."""
    from edje_index.bundles.info import read_bundle_info

    if given is not None:
        return _checked(given, [read_bundle_info(miner).encoder_fingerprint], "embeddings of the mining model")
    sources = _image_sources(builder.folder / "miner.edje.jsonl", items)
    return builder.build("miner.edje", miner, sources, "computing embeddings of the mining model, once")


def _teacher_index(teacher: Path, index: CommittedIndex | None, start: StartModel) -> CommittedIndex | None:
    """Return `index`. Raise UsageError if the teacher cannot score the rows of the index.

    If `index` is None, the teacher reads the same online features as the student. Raise UsageError if the adapter of
    the teacher cannot read these features.
    """
    from edje_index.bundles.info import read_bundle_info
    from edje_index.models.adapter import AdapterConfig
    from edje_index.training.model.start_bundle import feature_fingerprints

    info = read_bundle_info(teacher)
    assert start.bundle.info is not None
    _check_tokenizers(teacher, start.bundle.info, info)
    accepted = feature_fingerprints(info, AdapterConfig.from_json(info.adapter))
    if index is not None:
        return _checked(
            index, [info.encoder_fingerprint, *accepted], "tokens of the teacher, or features for its adapter"
        )
    if accepted[0] != start.accepted_features()[0]:
        raise UsageError(
            f"the adapter of the teacher {teacher} cannot read the online features, because another tower computes "
            "them or they have too few patches; set inputs.teacher_features to an index that the teacher built"
        )
    return None


def _view_index(
    given: CommittedIndex | None,
    config: TrainConfig,
    start: StartModel,
    photos: Sequence[CaptionedImage],
    builder: IndexBuilder,
) -> ViewIndex:
    """Return an index of the features of the views of `photos`: the index `given`, or a new index."""
    from storage_formats.format.layout import Layout
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.rows import read_shard_rows

    if given is None:
        files = builder.folder / VIEW_FILES
        if (builder.folder / VIEW_ROWS).exists():  # the cropped files have been removed
            return ViewIndex(CommittedIndex.open(builder.folder / VIEW_INDEX), files, is_given=False)
        view_list = _crop(photos, files, config, start, builder)
        model = _model_of_features(builder.folder / "features-model", start)
        index = builder.build(VIEW_INDEX, model, (os.fspath(view_list),), "computing features of the views, once")
        return ViewIndex(index, files, is_given=False)
    _checked(given, start.accepted_features(), start.feature_adapter.kind)
    first_uri = read_shard_rows(Layout(given.root), 0, ["uri"])["uri"][0].as_py()
    return ViewIndex(given, Path(first_uri).parent, is_given=True)


def _crop(
    photos: Sequence[CaptionedImage], files: Path, config: TrainConfig, start: StartModel, builder: IndexBuilder
) -> Path:
    """Write the views of the photos to the folder `files`. Return the path of a file that lists the views."""
    from pipelines.sources import iter_all, open_sources

    views, names = config.augmentation.views, {display_path(os.fsencode(photo.path)) for photo in photos}
    sources = _image_sources(builder.folder / "viewed.jsonl", photos)
    refs = (ref for ref in iter_all(open_sources(sources, _path_column(sources))) if ref.uri in names)
    builder.on_event(StatusMessage(f"cropping {views} views of {len(names):,} photos"))
    crops = Crops(views, start.bundle.vision.image_size, config.loop.seed)
    return write_views(refs, files, crops, DecodeSettings(truncated=builder.truncated), builder.should_stop)


def _model_of_features(model: Path, start: StartModel) -> Path:
    """Make a bundle that computes features to train on at `model`, if it is missing. Return `model`."""
    return _model_of_tower(model, start, start.bundle.adapter.features(start.bundle.vision.num_patches))


def _model_of_tower(model: Path, start: StartModel, adapter: Adapter) -> Path:
    """Make a bundle of the towers and `adapter` at `model`, if it is missing. Return `model`."""
    if not model.exists():
        notes = "computes features to train on; it cannot re-rank"
        replace(start.bundle, adapter=adapter, notes=notes, info=None).save(model)
    return model


def _image_sources(list_file: Path, items: Sequence[CaptionedImage]) -> tuple[str, ...]:
    """Return the sources from which to build an index of `items`."""
    # These are the archives that hold images, then `list_file` with the paths of images outside archives, if any.
    paths = list(dict.fromkeys(item.path for item in items))
    archives = {path.partition("!")[0]: None for path in paths if ".tar!" in path}
    files = [path for path in paths if ".tar!" not in path]
    if not files:
        return tuple(archives)
    lines = "".join(json.dumps({"path": file}) + "\n" for file in files).encode()
    if not list_file.exists() or list_file.read_bytes() != lines:
        write_bytes_atomic(list_file, lines)
    return (*archives, os.fspath(list_file))


def _path_column(sources: Sequence[str]) -> str | None:
    """Return the name of the path column, or None if no source is a list of paths."""
    return "path" if sources[-1].endswith(".jsonl") else None


def _checked(index: CommittedIndex, accepted: Sequence[str], content: str) -> CommittedIndex:
    """Return `index`. Raise UsageError if the encoder fingerprint of the index is not in `accepted`."""
    encoder = index.manifest.model["fingerprint"]
    if encoder not in accepted:
        raise UsageError(
            f"{index.root} does not contain the required features ({content}), because its encoder "
            f"fingerprint is {encoder} instead of {' or '.join(accepted)}; give another index, or omit "
            "the index to let the training run compute it"
        )
    return index


def _check_tokenizers(teacher: Path, student_info: BundleInfo, teacher_info: BundleInfo) -> None:
    """Raise UsageError if student and teacher convert a caption to different token ids."""
    if student_info.canonical_captions != teacher_info.canonical_captions:
        raise UsageError(
            f"architecture.canonical_captions is {student_info.canonical_captions} for the student, but "
            f"{teacher_info.canonical_captions} for the teacher {teacher}; use the value of the teacher"
        )
    student, other = (info.files.get("joint/tokenizer.json") for info in (student_info, teacher_info))
    if student is None or other is None or student["sha256"] != other["sha256"]:
        raise UsageError(
            f"the teacher {teacher} has another tokenizer than the student; set inputs.language or "
            "inputs.init to a model with the tokenizer of the teacher"
        )
