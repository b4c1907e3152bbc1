"""Computes an offset block from photos, and adds it to a copy of a model bundle. A
build with this copy encodes all shards with the offset.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.models.filesystem import check_new
from pipelines.jobs.build import build_index
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.remote.urls import IndexLocation
from storage_formats.writing.conversion import sampled_offset


def add_offset(
    bundle: IndexLocation,
    photos: IndexLocation,
    out: Path,
    *,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> BundleInfo:
    """Copy a model bundle to the new directory `out`, with an offset block: the mean of
    the token blocks of `photos`. If there are more than 2,047 photos, the mean is
    computed from an evenly spaced sample of them.

    Args:
        bundle: directory of the model bundle.
        photos: source of images, as for `build_index`. All images are encoded.

    Returns:
        The content of the ``bundle.json`` of the copy.

    Raises:
        UsageError: fewer than 32 images can be read, or the mean has less than 6 % of
            the energy of the tokens, so that an offset would hardly reduce errors.
        JobStopped: `should_stop()` returned True. Nothing was written.
    """
    check_new(out)
    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder, "sample.edje")
        try:
            build_index(
                photos,
                sample,
                bundle,
                engine="inline",
                max_failed=1.0,
                on_event=on_event,
                should_stop=should_stop,
            )
        except JobStopped as error:
            reason = str(error).partition("; ")[0]
            raise JobStopped(f"{reason}; nothing was written") from error
        offset = sampled_offset(CommittedIndex.open(sample), "bf16")
    if offset is None:
        raise UsageError(
            f"{photos} gives no offset: fewer than 32 images can be read, or the mean"
            " of their tokens has less than 6 % of the energy; give other photos",
            parameter="photos",
        )
    return replace(ModelBundle.load(str(bundle)), offset=offset).save(out)
