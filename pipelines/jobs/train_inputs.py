"""What a training needs before its first step, made once in the run folder and found there again.

run.json          settings and fingerprints of everything that decides the training
start/            bundle of the first step
features-model/   bundle that makes the features, and features.edje/, the index of them; where none is given
views.edje/       index of the features of views, where they are asked for
miner.edje/       index of the miner's embeddings, where none is given
data/             captions as tokens and embeddings, and the teacher's rows
checkpoints/, log.jsonl, tensorboard/, result.json
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edje_index.images.inputs import display_path
from pipelines.jobs.train_request import TrainRequest
from pipelines.jobs.train_stages import watched
from pipelines.planning.config import BuildConfig
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.captions.reading import CaptionedImage
    from edje_index.models.adapter import AdapterConfig
    from edje_index.training.config import TrainConfig
    from edje_index.training.data.dataset import CaptionSet, Miner
    from edje_index.training.loop.train_worker import TeacherTask, TrainTask


@dataclass(frozen=True)
class Prepared:
    """Everything is there.

    Attributes:
        task: for the ranks.
        images, captions: trained on.
        left_out: images without features, by reason.
        dev: captions that are not trained on, where given.
    """

    task: TrainTask
    images: int
    captions: int
    left_out: dict[str, int]
    dev: CaptionSet | None


def prepare_training(
    request: TrainRequest, config: TrainConfig, run: str, on_event: OnEvent, should_stop: ShouldStop
) -> Prepared:
    """Make what is missing in the run folder.

    Raises:
        UsageError, ModelError: something given does not fit.
        JobStopped: `should_stop()` turned true; what is finished is kept.
    """
    from edje_index.training.loop.train_worker import TrainTask, total_steps
    from edje_index.training.loop.training_loop import Runtime

    objective = config.objective
    if request.teacher is None and not objective.itm_weight + objective.mlm_weight + objective.recovery_weight:
        raise UsageError("all losses have weight 0 and there is no --teacher: there is nothing to train")
    selection = config.selection
    if selection.pooled_dim and request.dev is None and not selection.pooled_weight:
        raise UsageError("--pooled-dim fits a score that would have no weight: give --dev, or --pooled-weight")
    if selection.bank and request.dev is None:
        raise UsageError("--bank needs --dev, whose captions the weight of its prior is fitted to")
    if request.view_features is not None and not config.seen.views:
        raise UsageError("--view-features needs --views: how many of each photo to train on")
    parts = _Parts(request, config, on_event, should_stop)
    total_steps(config, len(parts.items))
    features = parts.features
    data, temperature = parts.data()
    runtime = Runtime(
        run_dir=parts.folder,
        device=request.device,
        threads=request.threads,
        checkpoint_every=request.checkpoint_every,
        log_every=request.log_every,
        compile=request.compile,
    )
    task = TrainTask(
        config=config,
        runtime=runtime,
        run=run,
        start=parts.folder / "start",
        features=features,
        data=data,
        temperature=temperature,
        teacher=parts.teacher(),
        new_adapter=parts.new_adapter,
        views=parts.views(),
    )
    total_steps(config, len(parts.kept.rows))
    captions = sum(map(len, parts.kept.captions))
    return Prepared(task, len(parts.kept.rows), captions, parts.left_out, parts.dev())


def check_captions(request: TrainRequest) -> None:
    """UsageError where a file of captions cannot be read, or images of --dev are trained on."""
    from edje_index.captions.reading import check_apart, read_captions

    trained = [item for path in request.captions for item in read_captions(path, request.images, request.split)]
    if request.dev is not None:
        check_apart(trained, read_captions(request.dev, request.images, request.dev_split))


class _Parts:
    """The parts of the run folder, each made when it is first asked for."""

    def __init__(self, request: TrainRequest, config: TrainConfig, on_event: OnEvent, should_stop: ShouldStop) -> None:
        self.folder = request.run_folder.absolute()
        self.left_out: dict[str, int] = {}
        self._request = request
        self._config = config
        self._on_event = on_event
        self._should_stop = should_stop

    @cached_property
    def items(self) -> list[CaptionedImage]:
        """Captioned images to train on, as the files have them; after `kept`, those with features."""
        from edje_index.captions.reading import read_captions

        self._on_event(StatusMessage("reading captions"))
        request = self._request
        return [item for path in request.captions for item in read_captions(path, request.images, request.split)]

    @cached_property
    def dev_items(self) -> list[CaptionedImage]:
        """Captioned images to fit weights to, as the file has them."""
        from edje_index.captions.reading import read_captions

        request = self._request
        return read_captions(request.dev, request.images, request.dev_split) if request.dev else []

    @cached_property
    def start(self) -> ModelBundle:
        """The bundle of the first step."""
        from edje_index.bundles.bundle import ModelBundle
        from edje_index.training.model.start_bundle import Origin, make_start

        path = self.folder / "start"
        if not path.exists():
            self._on_event(StatusMessage("putting together the model to start from"))
            request = self._request
            origin = Origin(request.model, request.vision, request.language, request.init)
            make_start(origin, self._config.architecture, self._config.loop.seed).save(path)
        return ModelBundle.load(path)

    @property
    def new_adapter(self) -> bool:
        """Whether the adapter of the first step is not that of --init."""
        from edje_index.bundles.info import read_bundle_info

        init = self._request.init
        assert self.start.info is not None
        return init is None or read_bundle_info(init).adapter != self.start.info.adapter

    @cached_property
    def features(self) -> Path:
        """The index of features: the one that was given, if the tower made it, else one that is built now."""
        from edje_index.training.model.start_bundle import feature_fingerprints

        if self._request.features is not None:
            assert self.start.info is not None
            accepted = feature_fingerprints(self.start.info, self.start.adapter.config)
            _check_index(self._request.features, accepted, self._feature_adapter.kind)
            return self._request.features.absolute()
        self._on_event(StatusMessage("computing features of the frozen tower, once"))
        return self._build("features.edje", self._features_model, [*self.items, *self.dev_items])

    @property
    def _feature_adapter(self) -> AdapterConfig:
        """What the features are of."""
        return self.start.adapter.config.features(self.start.vision.num_patches)

    @cached_property
    def _features_model(self) -> Path:
        """The bundle that makes features."""
        from edje_index.models.adapter import build_adapter

        model = self.folder / "features-model"
        if not model.exists():
            adapter = build_adapter(self._feature_adapter)
            notes = "makes features to train on; not to re-rank with"
            replace(self.start, adapter=adapter, notes=notes, info=None).save(model)
        return model

    @cached_property
    def kept(self) -> CaptionSet:
        """The captions whose images have features."""
        found = self._matched(self.features, self.items, self.left_out)
        self.items = found[0]
        if self.left_out:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.left_out.items())
            self._on_event(StatusMessage(f"left out, having no features: {reasons}"))
        return found[1]

    def data(self) -> tuple[Path, float]:
        """Folder of the prepared captions, and the temperature of the mining softmax."""
        from edje_index.training.data.dataset import TrainingData, prepare_data

        path, kept = self.folder / "data", self.kept
        miner, scale = self._miner()
        if not path.exists():
            tokenizer, tower = self.start.joint.tokenizer, self.start.text
            progress = watched("embedding captions", self._on_event, self._should_stop)
            prepare_data(kept, tokenizer, tower, miner, progress).save(path)
        if TrainingData.open(path).images != len(kept.rows):
            raise UsageError(f"{path} was made of other captions; give another --run-dir")
        temperature = self._config.negatives.negatives_temperature
        return path, 1 / scale if temperature is None else temperature

    def teacher(self) -> TeacherTask | None:
        """The teacher with what it reads."""
        import numpy as np

        from edje_index.bundles.info import read_bundle_info
        from edje_index.captions.matching import match_rows
        from edje_index.models.adapter import AdapterConfig
        from edje_index.training.loop.train_worker import TeacherTask
        from edje_index.training.model.start_bundle import feature_fingerprints
        from storage_formats.format.manifest import Manifest

        request = self._request
        if request.teacher is None:
            return None
        info = read_bundle_info(request.teacher)
        self._check_tokenizer(info.files)
        index = (request.teacher_features or self.features).absolute()
        has_tokens = Manifest.load(index).model["fingerprint"] == info.encoder_fingerprint
        if not has_tokens:
            _check_index(index, feature_fingerprints(info, AdapterConfig(**info.adapter)), "for the teacher")
        rows = match_rows(index, self.items)
        if (rows < 0).any():
            raise UsageError(f"{index} lacks {int((rows < 0).sum()):,} images that are trained on; build it of all")
        path = self.folder / "teacher-rows.npy"
        np.save(path, rows)
        return TeacherTask(request.teacher.absolute(), index, has_tokens, path)

    def views(self) -> tuple[Path, Path] | None:
        """The index of the features of views, and the file of its rows [n, views]."""
        import numpy as np

        from edje_index.captions.matching import match_items
        from pipelines.jobs.train_views import view_path

        count, items, given = self._config.seen.views, self.items, self._request.view_features
        if not count:
            return None
        folder, rows = self.folder / "views", self.folder / "view-rows.npy"
        index = self.folder / "views.edje" if given is None else given.absolute()
        if not rows.exists():
            if given is None:
                self._view_features(count, folder)
            names = [display_path(os.fsencode(item.path)) for item in items]
            made_in = folder if given is None else self._views_folder(index)
            shown = [
                [replace(item, path=view_path(made_in, name, view)) for item, name in zip(items, names, strict=True)]
                for view in range(count)
            ]
            found = np.stack([match_items(index, views, allow_none=True).rows for views in shown], axis=1)
            if given is not None and (lacking := int((found < 0).any(axis=1).sum())):
                raise UsageError(
                    f"{index} lacks {lacking:,} of {len(items):,} photos, or some of {count} views of them; leave "
                    "--view-features out to have them made"
                )
            content = io.BytesIO()
            np.save(content, found)
            write_bytes_atomic(rows, content.getvalue())
        shutil.rmtree(folder, ignore_errors=True)
        return index, rows

    def _views_folder(self, index: Path) -> Path:
        """Where the files were that `index` was made of; UsageError where another tower made it."""
        from edje_index.training.model.start_bundle import feature_fingerprints
        from storage_formats.format.rows import read_rows

        assert self.start.info is not None
        accepted = feature_fingerprints(self.start.info, self.start.adapter.config)
        _check_index(index, accepted, self._feature_adapter.kind)
        return Path(read_rows(index, [0], ["uri"])["uri"][0].as_py()).parent

    def _view_features(self, count: int, folder: Path) -> None:
        """Build ``views.edje`` from files in `folder`."""
        from edje_index.bundles.info import read_bundle_info
        from pipelines.jobs.train_views import write_views
        from pipelines.sources import iter_all, open_sources

        names = {display_path(os.fsencode(item.path)) for item in self.items}
        sources = self._sources("viewed.jsonl", self.items)
        column = "path" if sources[-1].endswith(".jsonl") else None
        photos = (ref for ref in iter_all(open_sources(sources, column)) if ref.uri in names)
        height, width = read_bundle_info(self._features_model).vision["image_size"]
        self._on_event(StatusMessage(f"cropping {count} views of {len(names):,} photos"))
        made = write_views(photos, folder, count, (height, width), self._config.loop.seed, self._should_stop)
        self._on_event(StatusMessage("computing features of the views, once"))
        self._build_of("views.edje", self._features_model, (os.fspath(made),))

    def dev(self) -> CaptionSet | None:
        """Captions that are not trained on."""
        return self._matched(self.features, self.dev_items, {})[1] if self.dev_items else None

    def _miner(self) -> tuple[Miner, float]:
        """What negatives are mined with, and its logit scale."""
        from edje_index.bundles.bundle import ModelBundle
        from edje_index.captions.matching import match_rows
        from edje_index.training.data.dataset import Miner
        from edje_index.training.model.start_bundle import logit_scale

        kept, request = self.kept, self._request
        if request.miner is None:
            return Miner(self.start.text, self.features, kept.rows), logit_scale(self.start)
        bundle = ModelBundle.load(request.miner)
        if request.miner_features is not None:
            _check_index(request.miner_features, [bundle.encoder_fingerprint], "the miner's")
        index = request.miner_features or self._build("miner.edje", request.miner, self.items)
        rows = match_rows(index, self.items)
        if (rows < 0).any():
            raise UsageError(f"{index} lacks {int((rows < 0).sum()):,} images that are trained on; build it of all")
        return Miner(bundle.text, index, rows), logit_scale(bundle)

    def _matched(
        self, index: Path, items: Sequence[CaptionedImage], left_out: dict[str, int]
    ) -> tuple[list[CaptionedImage], CaptionSet]:
        """The items that the index holds, with their rows; `left_out` receives how many it does not, by reason."""
        from edje_index.captions.matching import NOT_IN_INDEX, match_items
        from edje_index.training.data.dataset import CaptionSet

        matched = match_items(index, items)
        left_out.update(matched.missing())
        if absent := matched.missing().get(NOT_IN_INDEX):
            raise UsageError(
                f"{absent:,} of {len(items):,} captioned images are not in {index}: build it of all of them, those "
                "of --dev too, or leave --features out"
            )
        places = [at for at, row in enumerate(matched.rows) if row >= 0]
        kept = [items[at] for at in places]
        return kept, CaptionSet(matched.rows[places], [item.captions for item in kept])

    def _build(self, name: str, model: Path, items: Sequence[CaptionedImage]) -> Path:
        """An index of the items' images in the run folder."""
        return self._build_of(name, model, self._sources(f"{name}.jsonl", items))

    def _build_of(self, name: str, model: Path, sources: tuple[str, ...]) -> Path:
        from edje_index.models.devices import threads_kept
        from pipelines.jobs.build import run_build

        request, out = self._request, self.folder / name
        config = BuildConfig(
            sources=sources,
            out=out,
            model=model,
            engine="inline" if request.workers == 1 and request.address is None else "ray",
            threads=request.threads,
            device=request.device,
            dtype=self._config.loop.dtype,
            address=request.address,
            column="path" if sources[-1].endswith(".jsonl") else None,
        )
        with threads_kept():
            run_build(config, self._on_event, self._should_stop)
        return out

    def _sources(self, name: str, items: Sequence[CaptionedImage]) -> tuple[str, ...]:
        """Archives as they are, and a list of all other files."""
        paths = list(dict.fromkeys(str(item.path) for item in items))
        archives = {path.partition("!")[0]: None for path in paths if ".tar!" in path}
        files = [path for path in paths if ".tar!" not in path]
        if not files:
            return tuple(archives)
        path = self.folder / name
        lines = "".join(json.dumps({"path": file}) + "\n" for file in files).encode()
        if not path.exists() or path.read_bytes() != lines:
            write_bytes_atomic(path, lines)
        return (*archives, os.fspath(path))

    def _check_tokenizer(self, teacher_files: Any) -> None:
        """UsageError unless student and teacher have the same words."""
        assert self.start.info is not None
        own, other = (files.get("joint/tokenizer.json") for files in (self.start.info.files, teacher_files))
        if own is None or other is None or own["sha256"] != other["sha256"]:
            raise UsageError(
                f"the teacher {self._request.teacher} has another tokenizer than the student; begin the student with "
                "the teacher's language model (--language or --init)"
            )


def _check_index(index: Path, accepted: Sequence[str], what: str) -> None:
    from storage_formats.format.manifest import Manifest

    found = Manifest.load(index).model["fingerprint"]
    if found not in accepted:
        raise UsageError(
            f"{index} does not hold the features that are needed ({what}): it was made by the encoder {found}, wanted "
            f"is {' or '.join(accepted)}; leave it out to have them made in the run's folder"
        )
