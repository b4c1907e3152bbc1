"""The steps of a training run: prepare the run folder, train, and write the bundle."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import INFO_FILE, BundleInfo, read_bundle_info
from edje_index.captions.matching import (
    NOT_IN_INDEX,
    MatchedRows,
    match_items,
    name_table,
)
from edje_index.captions.reading import (
    CaptionedImage,
    check_apart,
    check_image_directory,
    read_caption_file,
)
from edje_index.models.adapter import AdapterConfig
from edje_index.models.devices import resolve_device
from edje_index.training.captions import CaptionSet, write_caption_table
from edje_index.training.checkpoints import read_log
from edje_index.training.config import ONLINE, TrainSettings, validated
from edje_index.training.features import unreadable_by_reason
from edje_index.training.finish import finish_model
from edje_index.training.loop import (
    TrainingStopped,
    TrainTask,
    run_worker,
    total_steps,
)
from edje_index.training.start import feature_fingerprint, make_start
from edje_index.training.workers import WorkerGroup, is_worker, joined_group
from pipelines.jobs.changing import resumable
from pipelines.jobs.training.features import (
    INPUT_TABLE,
    TrainJob,
    check_encoder,
    online_features,
    rows_of_all,
    stored_features,
    stored_views,
)
from pipelines.jobs.training.run import TrainResult
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShouldStop
from pipelines.progress.wording import by_reason, counted
from storage_formats.arrays import Ints
from storage_formats.atomic import Json, write_json_atomic
from storage_formats.change import Journal, read_journal
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.lock import locked

BLANK_CAPTION = "blank-caption"
"""The key of `TrainResult.left_out` that counts blank captions instead of images."""
_LANGUAGE_FILES = (
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "vocab.txt",
)
_TOKENIZER = "joint/tokenizer.json"
_REPORT_SECONDS = 5.0
_LOSSES = ("loss", "itm", "mlm", "recovery", "distillation", "accuracy")


def run_training(
    settings: TrainSettings, on_event: OnEvent, should_stop: ShouldStop
) -> TrainResult:
    """Train a model bundle, or resume an interrupted training run with the same
    settings.

    If `torchrun` started this process, this process becomes one of a group of workers.
    All workers train and return the result. Worker 0 also prepares the run and writes
    the bundle.

    Raises:
        UsageError: an input cannot be read, or the run folder belongs to another
            training run.
        ModelError: a bundle or language model cannot be used.
        JobStopped: `should_stop()` returned True. The last checkpoint and all finished
            parts are kept.
        EdjeError: another process uses the run folder, or a file in the run folder is
            damaged.
    """
    job = TrainJob(settings, on_event, should_stop)
    if not is_worker():
        return _run(job, None)
    with joined_group(resolve_device(settings.run.device)) as group:
        values = settings.model_dump()
        settings = validated(
            TrainSettings, {**values, "run": {**values["run"], "workers": group.size}}
        )
        job = replace(job, settings=settings)
        if group.rank == 0:
            result: TrainResult = group.share(_run(job, group))
            return result
        while isinstance(message := group.share(None), TrainTask):
            run_steps(job, message, group)
        result = message
        return result


def _run(job: TrainJob, group: WorkerGroup | None) -> TrainResult:
    """Prepare the run folder, train, and write the bundle. If an earlier call has
    finished the training run, return its result.
    """
    started = time.monotonic()
    folder = job.folder
    settings = job.settings
    run = settings.run
    inputs = settings.inputs
    with locked(folder), resumable(folder):
        if run.export_step and not (folder / "checkpoints").is_dir():
            raise UsageError(
                f"{folder} has no checkpoint to export; set run.dir to the folder of a"
                " training run"
            )
        job.say("reading captions")
        given = {}
        if inputs.features not in (None, ONLINE):
            given["features"] = CommittedIndex.open(inputs.features)
        if inputs.teacher_features is not None:
            given["teacher_features"] = CommittedIndex.open(inputs.teacher_features)
        check_image_directory(inputs.images)
        blank = 0
        items: list[CaptionedImage] = []
        for path in inputs.captions:
            read, its_blank = read_caption_file(path, inputs.images, inputs.split)
            items += read
            blank += its_blank
        dev_items: list[CaptionedImage] = []
        if inputs.dev is not None:
            dev_items, its_blank = read_caption_file(
                inputs.dev, inputs.images, inputs.dev_split
            )
            blank += its_blank
        check_apart(items, dev_items)
        continued = None
        if settings.optimizer.continued and inputs.init is not None:
            continued = last_step(inputs.init)
        fingerprint = begin_run(folder, training_record(settings, given))
        if (finished := finished_result(settings, fingerprint)) is not None:
            return finished
        if run.out.exists():
            raise UsageError(
                f"{run.out} exists already; remove this folder, or set run.out to"
                " another folder"
            )
        # If there are too few captions, this raises an error before anything is
        # computed.
        total_steps(settings.loop, sum(len(item.captions) for item in items))
        task, counts = prepare_task(
            job, fingerprint, given, items, dev_items, continued
        )
        if blank:
            job.say(f"blank captions left out: {blank:,}")
            counts["left_out"] = {**counts["left_out"], BLANK_CAPTION: blank}
        if run.export_step is None:
            run_steps(job, task, group)
        return write_bundle(job, task, counts, started)


def prepare_task(
    job: TrainJob,
    fingerprint: str,
    given: Mapping[str, CommittedIndex],
    items: list[CaptionedImage],
    dev_items: list[CaptionedImage],
    continued: tuple[Path, str, int] | None,
) -> tuple[TrainTask, Json]:
    """Write the files that the run folder lacks: the initial model, the indexes of
    features, and the tables of captions.

    Args:
        fingerprint: fingerprint of the settings and data.
        given: indexes that the user gives, by the name of their setting.
        items: captioned images to train on.
        dev_items: captioned images of the dev set; empty if there is none.
        continued: run folder, fingerprint and last step of the run whose optimiser
            state is continued, as returned by `last_step`; None begins a new state.

    Returns:
        The task of the workers, and the attributes `images`, `captions`, `left_out` and
        `truncated` of the result.
    """
    settings = job.settings
    inputs = settings.inputs
    folder = job.folder
    job.say("loading the initial model")
    start_path = folder / "start"
    if not start_path.exists():
        make_start(
            settings.architecture,
            settings.loop.seed,
            model=inputs.model,
            vision=inputs.vision,
            language=inputs.language,
            init=inputs.init,
        ).save(start_path)
    start = ModelBundle.load(start_path)
    assert start.info is not None
    is_online = inputs.features == ONLINE
    if is_online:
        features = online_features(job, start, [*items, *dev_items])
    else:
        features = stored_features(
            job, start, [*items, *dev_items], given.get("features")
        )
    kept, captions, dev, counts = match_captions(job, features, items, dev_items)
    count = counts["captions"]
    steps = total_steps(settings.loop, count)
    mining = features
    mining_rows = captions.rows
    if inputs.miner is not None:
        sources = job.sources("miner.edje.jsonl", kept)
        mining = job.build("miner.edje", inputs.miner, sources, "embeddings for mining")
        mining_rows = rows_of_all(mining, kept)
    teacher_tokens = None
    if inputs.teacher is not None:
        teacher_tokens = _teacher_tokens(
            inputs.teacher, start, given.get("teacher_features"), features, kept
        )
    views = None
    if settings.augmentation.views and not is_online:
        views = stored_views(job, start, kept)
    data = folder / "data"
    if not data.exists():
        job.say(f"preparing {counted(count, 'caption')}")
    write_caption_table(data, captions, mining_rows)
    dev_task = None
    if dev is not None:
        dev_task = (dev, folder / "dev")
        write_caption_table(dev_task[1], dev, dev.rows)
    task = TrainTask(
        config=settings,
        run=fingerprint,
        start=start_path,
        features=features,
        data=data,
        mining=mining,
        steps=steps,
        new_adapter=inputs.init is None
        or read_bundle_info(inputs.init).adapter != start.info.adapter,
        # Absolute, because a worker may run in another directory.
        miner=None if inputs.miner is None else inputs.miner.absolute(),
        inputs=folder / INPUT_TABLE if is_online else None,
        views=views,
        teacher=None if inputs.teacher is None else inputs.teacher.absolute(),
        teacher_tokens=teacher_tokens,
        continued=continued,
        dev=dev_task,
    )
    return task, counts


def write_bundle(
    job: TrainJob, task: TrainTask, counts: Json, started: float
) -> TrainResult:
    """Write the bundle of the last checkpoint, or of the step to export. Unless a step
    is exported, also write the result to the run folder.

    Args:
        counts: attributes of the result, as returned by `prepare_task`.
        started: time at which this call started, as returned by `time.monotonic`.
    """
    settings = task.config
    run = settings.run
    inputs = settings.inputs
    folder = run.folder

    def progress(activity: str, done: int, total: int) -> None:
        if job.should_stop():
            raise JobStopped(
                f"stopped while {activity}, after {done:,} of {total:,}; run the"
                " command again to continue"
            )
        job.on_event(Progress(activity, done, total))

    bundle, steps, choices = finish_model(task, run.export_step, progress)
    pairs = settings.loop.batch_size
    names = ", ".join(path.name for path in inputs.captions)
    teacher = f", distilled from {inputs.teacher.name}" if inputs.teacher else ""
    notes = (
        f"trained {steps} steps of {pairs} pairs on {counts['images']} images with"
        f" {counts['captions']} captions of {names}{teacher}; run {task.run}"
    )
    left_out = dict(Counter(counts["left_out"]) + Counter(unreadable_by_reason(folder)))
    log = read_log(folder)
    # The keys say what is ranked: images in text-to-image search, captions in
    # image-to-text search.
    dev = {
        ranked: {
            **asdict(choices[direction]),
            "weights": choices[direction].weights.to_json(),
        }
        for ranked, direction in (("images", "t2i"), ("captions", "i2t"))
        if choices
    }

    def result(info: BundleInfo) -> TrainResult:
        return TrainResult(
            bundle=str(run.out),
            fingerprint=info.fingerprint,
            run=task.run,
            steps=steps,
            seconds=time.monotonic() - started,
            last=log[-1] if log else {},
            score=bundle.score.to_json(),
            fitting=settings.fitting.model_dump(),
            dev=dev or None,
            **{**counts, "left_out": left_out},
        )

    def record(info: BundleInfo) -> None:
        # `save` calls this function before the bundle appears at its path, so that no
        # bundle is ever without a record. Such a bundle would look like the bundle of
        # another run.
        if run.export_step is None:
            write_json_atomic(folder / "result.json", asdict(result(info)))

    return result(replace(bundle, notes=notes).save(run.out, record))


def training_record(
    settings: TrainSettings, given: Mapping[str, CommittedIndex]
) -> Json:
    """Return a record of everything that determines the trained weights: the settings
    by ``group.key``, in which a digest replaces each input file.
    """
    # The settings of `fitting` are applied to the last checkpoint. Of the group `run`,
    # only the number of workers changes the trained weights.
    groups = settings.model_dump(mode="json", exclude={"fitting"})
    groups["run"] = {"workers": settings.run.workers}
    inputs = settings.inputs
    recorded = groups["inputs"]
    recorded["captions"] = [_file_digest(path) for path in inputs.captions]
    if inputs.images is not None:
        recorded["images"] = str(inputs.images.absolute())
    # Record the dev captions too, because the indexes of features contain the dev
    # images.
    if inputs.dev is not None:
        recorded["dev"] = _file_digest(inputs.dev)
    for name, index in given.items():
        recorded[name] = index.manifest.plan
    for name in ("model", "language", "init", "teacher", "miner"):
        path = getattr(inputs, name)
        if path is not None:
            recorded[name] = _model_digest(path)
    return {
        f"{group}.{key}": value
        for group, values in groups.items()
        for key, value in values.items()
    }


def _model_digest(path: Path) -> str:

    files = [path / name for name in _LANGUAGE_FILES if (path / name).is_file()]
    if (path / INFO_FILE).exists() or not files:
        return read_bundle_info(path).fingerprint
    return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; check the path and the permissions"
        ) from error


def begin_run(folder: Path, record: Json) -> str:
    """Write `record` to the journal of the run folder. If the run has begun before,
    compare `record` with the journal instead. Return the fingerprint of `record`.

    If the run folder contains nothing but a journal, nothing has been computed, and
    `record` replaces the journal. The journal has the format of the journal of an index
    change. In the journal of a run, `base` is None, because a run changes no index.

    Raises:
        UsageError: the run was begun with other settings, or the folder is not a run
            folder.
        EdjeError: the journal is damaged.
    """
    layout = Layout(folder)
    try:
        journal = read_journal(folder)
    except CorruptIndexError as error:
        raise EdjeError(
            f"cannot read {layout.journal}: {error.__cause__}; restore the file, or set"
            " run.dir to another folder"
        ) from error
    # The folder `build` does not count: it contains the lock and the journal.
    others = {entry.name for entry in folder.iterdir()} - {layout.build.name}
    if journal is None and others:
        raise UsageError(
            f"{folder} is not a run folder of this version of edje-index: it"
            f" contains {min(others)}; set run.dir to another folder"
        )
    if journal is None or (journal.kind == "train" and not others):
        Journal("train", record, base=None).write(layout)
        stored = record
    else:
        stored = journal.request
    lines = [
        f"{name} was {stored.get(name)}, is {record.get(name)}"
        for name in sorted(stored.keys() | record.keys())
        if stored.get(name) != record.get(name)
    ]
    if lines:
        raise UsageError(
            f"the run in {folder} was begun with other settings; restore the earlier"
            " settings, or set run.dir to another folder:\n" + "\n".join(lines)
        )
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def finished_result(settings: TrainSettings, fingerprint: str) -> TrainResult | None:
    """Return the result of the training run if an earlier call has finished it; None
    otherwise.

    Args:
        fingerprint: fingerprint of the settings and data.

    Raises:
        UsageError: the bundle was made with other settings of the final score.
    """
    out = settings.run.out
    result = read_result(settings.run.folder)
    if result is None or not out.exists():
        return None
    written = (result.run, result.bundle, result.fingerprint)
    if written != (fingerprint, str(out), read_bundle_info(out).fingerprint):
        # The result belongs to another run, or the bundle was replaced.
        return None
    if result.fitting != settings.fitting.model_dump():
        raise UsageError(
            f"{out} was trained with other settings of the final score (group"
            " 'fitting'); remove this folder to write the bundle again from the last"
            " checkpoint, or set run.out to another folder"
        )
    return replace(result, already_finished=True)


def read_result(folder: Path) -> TrainResult | None:
    """Return the result in a run folder; None if the run has not finished."""
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        return TypeAdapter(TrainResult).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise EdjeError(
            f"cannot read {path}: {error}; restore the file, or remove it and the"
            " bundle to write both again from the last checkpoint"
        ) from error


def last_step(bundle: Path) -> tuple[Path, str, int]:
    """Return the run folder, the fingerprint and the last step of the training run that
    made `bundle`. The run folder is the directory BUNDLE.run beside the bundle.

    Raises:
        UsageError: the run folder is missing, or belongs to another bundle.
    """
    folder = bundle.absolute().with_name(f"{bundle.name}.run")
    result = read_result(folder)
    if result is None or result.fingerprint != read_bundle_info(bundle).fingerprint:
        raise UsageError(
            f"{folder} is not the folder of the run that made {bundle}, so its"
            " optimiser cannot continue; set optimizer.continued to false"
        )
    return folder, result.run, result.steps


def match_captions(
    job: TrainJob,
    index: CommittedIndex,
    items: list[CaptionedImage],
    dev_items: list[CaptionedImage],
) -> tuple[list[CaptionedImage], CaptionSet, CaptionSet | None, Json]:
    """Find the captioned images that have features in `index`.

    Args:
        index: index of the features.
        items: captioned images to train on.
        dev_items: captioned images of the dev set; empty if there is none.

    Returns:
        Four values: the training images that have features; their captions; the dev
        captions, or None if there are none; and the attributes `images`, `captions`,
        `left_out` and `truncated` of the result.

    Raises:
        UsageError: an image is not in `index`, or no training or dev image has
            features.
    """
    table = name_table(index)

    def matched(
        setting: str, part: list[CaptionedImage]
    ) -> tuple[list[CaptionedImage], CaptionSet, MatchedRows]:
        rows = match_items(index.root, table, part, allow_none=True)
        if absent := rows.missing().get(NOT_IN_INDEX):
            raise UsageError(
                f"{absent:,} of the {len(part):,} images of {setting} are not in"
                f" {index.root}; build that index from all training and dev images, or"
                " leave inputs.features out"
            )
        kept, row_ids = rows.indexed(part)
        if not kept:
            raise UsageError(
                f"none of the {len(part):,} images of {setting} has features"
                f" ({by_reason(rows.missing())}); correct the image files"
            )
        return kept, CaptionSet(row_ids, [item.captions for item in kept]), rows

    kept, captions, rows = matched("inputs.captions", items)
    dev = matched("inputs.dev", dev_items)[1] if dev_items else None
    if left_out := rows.missing():
        job.say(f"images left out because they have no features: {by_reason(left_out)}")
    if truncated := int(rows.truncated.sum()):
        job.say(f"truncated images that are used in part: {truncated:,}")
    counts = {
        "images": len(kept),
        "captions": len(captions.texts()),
        "left_out": left_out,
        "truncated": truncated,
    }
    return kept, captions, dev, counts


def _teacher_tokens(
    teacher: Path,
    start: ModelBundle,
    given: CommittedIndex | None,
    features: CommittedIndex,
    items: list[CaptionedImage],
) -> tuple[CommittedIndex, Ints] | None:
    """Return the index with the tokens of the teacher, and the row of each image.
    Return None if there is no such index, because the adapter of the teacher can
    compute the tokens from the features of the student.

    Raises:
        UsageError: the teacher and the student do not fit together.
    """
    info = read_bundle_info(teacher)
    student = start.info
    assert student is not None
    if student.canonical_captions != info.canonical_captions:
        raise UsageError(
            f"architecture.canonical_captions is {student.canonical_captions} for the"
            f" student, but {info.canonical_captions} for the teacher {teacher}; use"
            " the value of the teacher"
        )
    if student.files.get(_TOKENIZER) != info.files.get(_TOKENIZER):
        raise UsageError(
            f"the teacher {teacher} has another tokenizer than the student; set"
            " inputs.language or inputs.init to a model with the tokenizer of the"
            " teacher"
        )
    if given is not None:
        check_encoder(given, info.encoder_fingerprint, "tokens of the teacher")
        return given, rows_of_all(given, items)
    read = feature_fingerprint(student, start.adapter.config)
    if read != feature_fingerprint(
        info, AdapterConfig.from_json(info.adapter, info.path)
    ):
        raise UsageError(
            f"the adapter of the teacher {teacher} cannot read the features of the"
            " student, because another tower computes them or they have too few"
            " patches; set inputs.teacher_features to an index that the teacher built"
        )
    return None


def run_steps(job: TrainJob, task: TrainTask, group: WorkerGroup | None) -> None:
    """Train from the last checkpoint to the last step. The steps run in this process,
    on Ray, or in a worker of `torchrun`.

    Args:
        group: the workers of `torchrun`; None if `torchrun` did not start this process.
    """
    last = -_REPORT_SECONDS

    def report(record: Json) -> None:
        nonlocal last
        is_important = "lr" not in record or record["step"] == record["steps"]
        if is_important or time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            job.say(describe_record(record))

    try:
        if group is None and task.config.run.distributed:
            from pipelines.engines.ray_train import train_on_ray

            train_on_ray(task, job.should_stop, report, on_event=job.on_event)
        else:
            if group is not None and group.rank == 0:
                group.share(task)
            run_worker(task, group or WorkerGroup(), job.should_stop, report)
    except TrainingStopped as error:
        # A JobStopped with a cause would count as an error, not as a requested stop.
        raise JobStopped(str(error)) from None


def describe_record(record: Json) -> str:
    """Return a record of the training log as one line of text."""
    parts = [f"{record['phase']} {record['step']:,}/{record['steps']:,}"]
    # Only a training step has a learning rate. Other records are about an evaluation
    # or about shards of captions.
    if "lr" not in record:
        recalls = (name for name in ("t2i", "i2t") if name in record)
        parts += [f"{name} R@1 {100 * record[name]:.1f}" for name in recalls]
        return ", ".join(parts)
    parts += [f"{name} {record[name]:.3f}" for name in _LOSSES if name in record]
    parts += [f"lr {record['lr']:.2e}", f"{record['images_per_second']:.1f} images/s"]
    minutes = (record["steps"] - record["step"]) * record["step_seconds"] / 60
    parts.append(f"{minutes:.0f} min left")
    waited = record["data_wait"] / record["seconds"]
    if waited > 0.1:
        parts.append(f"waiting for data {waited:.0%} of the time")
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    if record.get("unreadable"):
        parts.append(f"unreadable images {record['unreadable']}")
    return ", ".join(parts)
