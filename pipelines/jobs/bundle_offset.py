"""Gives a model bundle the offset block of photos, so that builds have one from their
first shard.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.import_models import check_new, import_checkpoint
from edje_index.bundles.info import INFO_FILE, BundleInfo
from edje_index.bundles.repositories import Say
from pipelines.jobs.build import build_index
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.remote.urls import IndexLocation
from storage_formats.writing.conversion import sampled_offset


def import_with_offset(
    source: IndexLocation,
    vision: str | None,
    out: Path,
    *,
    photos: IndexLocation,
    on_event: OnEvent,
    should_stop: ShouldStop,
    say: Say,
    **options: Any,
) -> BundleInfo:
    """Make a bundle from `source`, as `import_checkpoint` does, or from another bundle.
    The new bundle has the mean of the tokens of `photos` as its offset block.

    Args:
        photos: source of images, as for `build_index`. All images are encoded.

    Raises:
        UsageError: the images are too few, or an offset would not pay.
    """
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        model = Path(source)
        if vision is not None or not (model / INFO_FILE).is_file():
            model = Path(folder, "model")
            import_checkpoint(source, vision, model, say=say, **options)
        sample = Path(folder, "sample.edje")
        build_index(
            photos,
            sample,
            model,
            engine="inline",
            on_event=on_event,
            should_stop=should_stop,
        )
        offset = sampled_offset(CommittedIndex.open(sample), "bf16")
        if offset is None:
            raise UsageError(
                f"{photos} gives no offset: it has fewer than 32 images, or the mean of"
                " their tokens has less than 6 % of the energy; give other photos",
                parameter="photos",
            )
        return replace(ModelBundle.load(model), offset=offset).save(out)
