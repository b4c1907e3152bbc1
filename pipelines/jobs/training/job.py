"""The steps of a training run: prepare the run folder, train, and write the bundle."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from edje_index.bundles.info import (
    VISION_WEIGHTS,
    BundleInfo,
    matching_bundle,
    read_bundle_info,
)
from edje_index.models.adapter import AdapterConfig
from edje_index.training.checkpoints import CHECKPOINT, read_log
from edje_index.training.config import TrainSettings
from edje_index.training.dataset import (
    TrainingData,
    open_same_images,
    read_captioned_rows,
)
from edje_index.training.loop import (
    TrainTask,
    finish_model,
    run_worker,
    total_steps,
)
from edje_index.training.start import make_start
from edje_index.training.workers import ALONE
from pipelines.jobs.changing import resumable
from pipelines.jobs.training.run import TrainResult
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    ShouldStop,
    StatusMessage,
    progress_callback,
    stop_at_events,
)
from pipelines.progress.wording import by_reason, counted
from storage_formats.atomic import Json, json_bytes, write_bytes_atomic
from storage_formats.errors import EdjeError, TaskInterrupted, UsageError
from storage_formats.format.directory import locked
from storage_formats.format.manifest import CommittedIndex

# the file of a bundle with the result of the run that made the bundle
_RESULT = "training.json"
_TOKENIZER = "joint/tokenizer.json"


def run_training(
    settings: TrainSettings, on_event: OnEvent, should_stop: ShouldStop
) -> TrainResult:
    """Train a model bundle, or resume an interrupted training run with the same
    settings. If an earlier call has finished the training run, return its result.

    Raises:
        UsageError: an input cannot be read, or the run folder belongs to another
            training run.
        ModelError: a bundle or language model cannot be used.
        JobStopped: `should_stop()` returned True. The last checkpoint and all finished
            parts are kept.
        EdjeError: another process uses the run folder, or a file in the run folder is
            damaged.
    """
    started = time.monotonic()
    run = settings.run
    inputs = settings.inputs
    with locked(run.folder), resumable(run.folder):
        index = CommittedIndex.open(inputs.index)
        features = matching_bundle(index, inputs.model)
        _check_features(settings, features)
        on_event(StatusMessage("reading captions"))
        file = run.folder / "train.npy"
        data, hashes, left_out = read_captioned_rows(index, file, inputs.split)
        dev: TrainingData | None = None
        if inputs.dev is not None:
            dev_index = CommittedIndex.open(inputs.dev)
            # The features of both indexes must come from the same encoder.
            matching_bundle(dev_index, features.path)
            file = run.folder / "dev.npy"
            dev, dev_hashes, _ = read_captioned_rows(dev_index, file, inputs.dev_split)
            if shared := {*hashes} & {*dev_hashes}:
                raise UsageError(
                    f"{len(shared):,} images are in both the training set and the dev"
                    " set; give separate indexes, or different splits"
                )
        record = _record(settings, features, data, dev)
        content = json.dumps(record, sort_keys=True).encode()
        fingerprint = hashlib.sha256(content).hexdigest()
        if run.out.exists():
            return _finished_result(settings, fingerprint)
        count = int(data.caption_starts[-1])
        total_steps(settings.loop, count)
        data = replace(
            data,
            miner=open_same_images(inputs.miner, hashes),
            teacher=open_same_images(inputs.teacher_features, hashes),
        )
        if data.teacher is not None:
            matching_bundle(data.teacher.index, inputs.teacher)
        continued = _continued_run(settings)
        start = _begin_run(settings, features, data, record)
        if dev is None:
            text = (
                "inputs.dev is not set, so the weights of the final score are not"
                f" fitted, but stay as they are: {start.score.t2i.described()}"
            )
            on_event(StatusMessage(text, is_warning=True))
        task = TrainTask(settings, fingerprint, start.path, data, dev, continued)
        text = f"training on {counted(count, 'caption')}"
        if left_out:
            text += f"; images left out: {by_reason(left_out)}"
        on_event(StatusMessage(text))

        def report(record: Json) -> None:
            on_event(StatusMessage(describe_record(record)))

        try:
            if run.workers > 1 or run.address is not None:
                from pipelines.engines.ray_train import train_on_ray

                train_on_ray(task, should_stop, report, on_event=on_event)
            else:
                run_worker(task, ALONE, should_stop, report)
        except TaskInterrupted as error:
            # A JobStopped with a cause would count as an error, not as a requested
            # stop.
            raise JobStopped(str(error)) from None
        return _write_bundle(task, left_out, on_event, should_stop, started)


def _check_features(settings: TrainSettings, built_by: BundleInfo) -> None:
    """Raise UsageError if an index that the bundle `built_by` built does not store the
    features that the adapter is trained on.
    """
    architecture = settings.architecture
    width = built_by.vision["patch_dim"]
    adapter = AdapterConfig(architecture.adapter, architecture.tokens, width, width)
    needed = adapter.features(built_by.vision["num_patches"])
    if asdict(needed) != built_by.adapter:
        raise UsageError(
            f"{settings.inputs.index} does not store the features that a"
            f" {architecture.adapter} adapter is trained on ({needed.num_tokens}"
            f" {needed.kind} tokens per image)",
            remedy="features",
        )


def _record(
    settings: TrainSettings,
    features: BundleInfo,
    data: TrainingData,
    dev: TrainingData | None,
) -> Json:
    """Return a record of everything that determines the trained weights.

    The record has the settings by ``group.key``. Digests replace the data and the
    bundles that the settings name.
    """
    # The settings of `fitting` are applied to the last checkpoint. Of the group `run`,
    # only the number of workers changes the trained weights.
    groups = settings.model_dump(mode="json", exclude={"fitting"})
    groups["run"] = {"workers": settings.run.workers}
    digests: Json = {"model": features.fingerprint, "index": data.digest}
    if dev is not None:
        digests["dev"] = dev.digest
    for name in ("miner", "teacher_features"):
        if (location := getattr(settings.inputs, name)) is not None:
            built_by = CommittedIndex.open(location).manifest.model
            digests[name] = built_by["fingerprint"]
    for name in ("init", "teacher"):
        if (path := getattr(settings.inputs, name)) is not None:
            digests[name] = read_bundle_info(path).fingerprint
    groups["inputs"] |= digests
    return {
        f"{group}.{key}": value
        for group, values in groups.items()
        for key, value in values.items()
    }


def _begin_run(
    settings: TrainSettings, features: BundleInfo, data: TrainingData, record: Json
) -> BundleInfo:
    """Write the bundle with the initial weights to the run folder. If the run has begun
    before, compare `record` with the record of the run instead.

    Raises:
        UsageError: the run was begun with other settings.
        EdjeError: the record of the run is damaged.
    """
    folder = settings.run.folder / "start"
    path = folder / "run.json"
    inputs = settings.inputs
    if not folder.exists():
        bundle = make_start(
            settings.architecture,
            settings.loop.seed,
            features.path,
            language=inputs.language,
            init=inputs.init,
            sample=data if settings.alignment.steps else None,
        )

        def commit(start: BundleInfo) -> None:
            _check_teacher(settings, start, features)
            # The record is part of the bundle, so that both appear at the same time.
            write_bytes_atomic(start.path / path.name, json_bytes(record))

        return bundle.save(folder, commit)
    try:
        stored = json.loads(path.read_bytes())
        names = sorted(stored.keys() | record.keys())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise EdjeError(
            f"cannot read {path}: {error}; restore the file, or set run.dir to another"
            " folder"
        ) from error
    lines = [
        f"{name} was {stored.get(name)}, is {record.get(name)}"
        for name in names
        if stored.get(name) != record.get(name)
    ]
    if lines:
        raise UsageError(
            f"the run in {settings.run.folder} was begun with other settings; restore"
            " the earlier settings, or set run.dir to another folder:\n"
            + "\n".join(lines)
        )
    return read_bundle_info(folder)


def _finished_result(settings: TrainSettings, fingerprint: str) -> TrainResult:
    """Return the result of the training run that an earlier call has finished.

    Raises:
        UsageError: the bundle was made by another run, or with other settings of the
            final score.
    """
    out = settings.run.out
    result = _result_of(out)
    if result is None or result.run != fingerprint:
        raise UsageError(
            f"{out} exists already, and this run did not make it; set run.out to"
            " another folder"
        )
    if result.fitting != settings.fitting.model_dump():
        raise UsageError(
            f"{out} exists already, and this run made it with other settings of the"
            " final score (group 'fitting'); remove this folder to write the bundle"
            " again from the last checkpoint, or set run.out to another folder"
        )
    return replace(result, already_finished=True)


def _result_of(bundle: Path) -> TrainResult | None:
    """Return the result of the run that made `bundle`; None if no run made it."""
    path = bundle / _RESULT
    if not path.exists():
        return None
    try:
        return TypeAdapter(TrainResult).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise EdjeError(
            f"cannot read {path}: {error}; restore the file, or remove the bundle to"
            " write it again from the last checkpoint"
        ) from error


def _continued_run(settings: TrainSettings) -> tuple[Path, str] | None:
    """Return the run folder and the fingerprint of the training run that made the
    initial bundle; None if the run is not continued. The run folder is the directory
    BUNDLE.run beside the bundle.

    Raises:
        UsageError: the run folder is missing, or belongs to another bundle.
    """
    bundle = settings.inputs.init
    if bundle is None or not settings.optimizer.continued:
        return None
    folder = bundle.with_name(f"{bundle.name}.run")
    result = _result_of(bundle)
    if result is None or not (folder / CHECKPOINT).exists():
        raise UsageError(
            f"{folder} is not the folder of the run that made {bundle}, so its"
            " optimiser cannot continue; set optimizer.continued to false"
        )
    return folder, result.run


def _check_teacher(
    settings: TrainSettings, student: BundleInfo, features: BundleInfo
) -> None:
    """Raise UsageError if there is a teacher that does not fit the initial bundle
    `student`, or cannot read the features of the index.
    """
    inputs = settings.inputs
    if inputs.teacher is None:
        return
    teacher = read_bundle_info(inputs.teacher)
    reading = [
        (bundle.canonical_captions, bundle.files.get(_TOKENIZER))
        for bundle in (student, teacher)
    ]
    if reading[0] != reading[1]:
        raise UsageError(
            f"the teacher {inputs.teacher} has another tokenizer than the student; set"
            " inputs.language or inputs.init to a model with its tokenizer, and"
            f" architecture.canonical_captions to {str(reading[1][0]).lower()}"
        )
    if inputs.teacher_features is not None:
        return
    patches = int(features.vision["num_patches"])
    read = AdapterConfig.from_json(teacher.adapter, teacher.path).features(patches)
    towers = [each.files[VISION_WEIGHTS] for each in (teacher, features)]
    if towers[0] != towers[1] or asdict(read) != features.adapter:
        raise UsageError(
            f"the adapter of the teacher {inputs.teacher} cannot read the features of"
            " the student, because another tower computes them or they have too few"
            " patches; set inputs.teacher_features to an index that the teacher built"
        )


def _write_bundle(
    task: TrainTask,
    left_out: dict[str, int],
    on_event: OnEvent,
    should_stop: ShouldStop,
    started: float,
) -> TrainResult:
    """Write the bundle of the last checkpoint, with the result of the run.

    Args:
        left_out: number of rows that were not used, by reason.
        started: time at which this call started, as returned by `time.monotonic`.
    """
    settings = task.config
    run = settings.run
    stopped = "the training run stopped before its bundle was written"
    report = stop_at_events(on_event, should_stop, stopped)
    bundle, steps, choices = finish_model(task, progress_callback(report))
    images = task.data.images
    captions = int(task.data.caption_starts[-1])
    bundle.notes = (
        f"trained {steps} steps of {settings.loop.batch_size} pairs on {images} images"
        f" with {captions} captions of {Path(settings.inputs.index).name};"
        f" run {task.run}"
    )
    log = read_log(run.folder)
    dev = {
        direction: {**asdict(choice), "weights": choice.weights.to_json()}
        for direction, choice in choices.items()
    }

    def result(info: BundleInfo) -> TrainResult:
        return TrainResult(
            bundle=str(run.out),
            fingerprint=info.fingerprint,
            run=task.run,
            images=images,
            captions=captions,
            left_out=left_out,
            steps=steps,
            seconds=time.monotonic() - started,
            last=log[-1] if log else {},
            score=bundle.score.to_json(),
            fitting=settings.fitting.model_dump(),
            dev=dev or None,
        )

    def record(info: BundleInfo) -> None:
        # The result is part of the bundle, so that both appear at the same time.
        write_bytes_atomic(info.path / _RESULT, json_bytes(asdict(result(info))))

    return result(bundle.save(run.out, record))


def describe_record(record: Json) -> str:
    """Return a record of the training log as one line of text."""
    values = [
        f"{name} {value:.4g}"
        for name, value in record.items()
        if name not in ("phase", "step", "steps")
    ]
    progress = f"{record['phase']} {record['step']:,}/{record['steps']:,}"
    return ", ".join([progress, *values])
