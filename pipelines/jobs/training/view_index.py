"""The index of the features of augmented views: a given one, or one that is built in the run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edje_index.images.inputs import display_path
from pipelines.jobs.training.features import feature_model
from pipelines.jobs.training.index_builder import image_sources, path_column
from pipelines.jobs.training.view_images import write_views
from pipelines.progress.events import StatusMessage

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.config import TrainConfig
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex

VIEW_INDEX = "views.edje"
VIEW_FILES = "views"
"""Folder of the cropped files, which are needed until the index is built and matched."""


def build_view_index(
    config: TrainConfig, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> CommittedIndex:
    """Crop the photos of `items` and build an index of the crops' features.

    Raises:
        JobStopped: cropping starts again; finished shards of features are kept.
    """
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import iter_all, open_sources

    views, names = config.augmentation.views, {display_path(os.fsencode(item.path)) for item in items}
    sources = image_sources(builder.folder / "viewed.jsonl", items)
    photos = (ref for ref in iter_all(open_sources(sources, path_column(sources))) if ref.uri in names)
    model = feature_model(builder.folder, start)
    height, width = read_bundle_info(model).vision["image_size"]
    builder.on_event(StatusMessage(f"cropping {views} views of {len(names):,} photos"))
    folder = builder.folder / VIEW_FILES
    view_list = write_views(photos, folder, views, (height, width), config.loop.seed, builder.should_stop)
    return builder.build(VIEW_INDEX, model, (os.fspath(view_list),), "computing features of the views, once")
