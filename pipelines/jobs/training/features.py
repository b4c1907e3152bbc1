"""The index of the frozen tower's features: a given one, or one that is built in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder, image_sources

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex


def feature_index(
    given: CommittedIndex | None, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> CommittedIndex:
    """The feature index of `items`.

    Raises:
        UsageError: `given` was built by another tower.
        JobStopped: the build was stopped; finished shards are kept.
    """
    if given is not None:
        check_encoder(given, start.accepted_features(), start.feature_adapter.kind)
        return given
    name = "features.edje"
    sources = image_sources(builder.folder / f"{name}.jsonl", items)
    model = feature_model(builder.folder, start)
    return builder.build(name, model, sources, "computing features of the frozen tower, once")


def feature_model(folder: Path, start: StartModel) -> Path:
    """The bundle in the run folder that computes features. It is made if it is missing."""
    from edje_index.models.adapter import build_adapter

    model = folder / "features-model"
    if not model.exists():
        adapter = build_adapter(start.feature_adapter)
        notes = "computes features to train on; it cannot re-rank"
        replace(start.bundle, adapter=adapter, notes=notes, info=None).save(model)
    return model
