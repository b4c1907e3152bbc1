"""Builds indexes in the run folder: features of images, features of views, embeddings of the mining model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from pipelines.jobs.training.request import RunSettings
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class IndexBuilder:
    """How this training builds indexes.

    Attributes:
        folder: the run folder.
        run: hardware and engine.
        dtype: type of matrix products.
        on_event, should_stop: as for every job.
    """

    folder: Path
    run: RunSettings
    dtype: str
    on_event: OnEvent
    should_stop: ShouldStop

    def build(self, name: str, model: Path, sources: tuple[str, ...], announcement: str) -> CommittedIndex:
        """Build the index `name` with the bundle `model`, or finish it. Finished shards are kept.

        Raises:
            EdjeError: no image could be read.
            JobStopped: `should_stop()` returned True.
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
            dtype=self.dtype,
            address=self.run.address,
            column=path_column(sources),
            max_failed=1.0,  # training has its own message about missing images
        )
        try:
            with threads_kept():
                run_build(config, self.on_event, self.should_stop)
        except FailedInputsError as error:
            raise EdjeError(
                f"{error.problem}. Check the captions and inputs.images; then remove {self.folder} and train again"
            ) from error
        return CommittedIndex.open(config.out)


def image_sources(list_file: Path, items: Sequence[CaptionedImage]) -> tuple[str, ...]:
    """Sources of the images of `items`: archives as they are, then `list_file` with all other files."""
    paths = list(dict.fromkeys(str(item.path) for item in items))
    archives = {path.partition("!")[0]: None for path in paths if ".tar!" in path}
    files = [path for path in paths if ".tar!" not in path]
    if not files:
        return tuple(archives)
    lines = "".join(json.dumps({"path": file}) + "\n" for file in files).encode()
    if not list_file.exists() or list_file.read_bytes() != lines:
        write_bytes_atomic(list_file, lines)
    return (*archives, os.fspath(list_file))


def path_column(sources: Sequence[str]) -> str | None:
    """Name of the column of paths in a list of sources that `image_sources` returned."""
    return "path" if sources[-1].endswith(".jsonl") else None


def check_encoder(index: CommittedIndex, accepted: Sequence[str], content: str) -> None:
    """Raise UsageError unless the encoder of `index` is one of the `accepted` fingerprints."""
    encoder = index.manifest.model["fingerprint"]
    if encoder not in accepted:
        raise UsageError(
            f"{index.root} does not hold the required features ({content}): its encoder fingerprint is {encoder}, but "
            f"{' or '.join(accepted)} is required; leave the setting out, and the features are computed"
        )
