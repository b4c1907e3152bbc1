"""Checks that a finished index is complete, and that its sources have not changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.progress.stopping import ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex


def check_finished(config: BuildConfig, index: CommittedIndex, inputs_digest: str, should_stop: ShouldStop) -> None:
    """Check that no file of `index` is missing and that the sources have not changed.

    Args:
        config: request with the sources.
        index: finished index.
        inputs_digest: digest of the inputs that the index was built from.
        should_stop: called before each input; the check stops once `should_stop()` returns True.

    Raises:
        UsageError: the inputs in the sources have changed.
        JobStopped: `should_stop()` returned True.
        CorruptIndexError: a file of the index is missing or has the wrong length.
    """
    from pipelines.sources import digested, iter_all, open_sources
    from storage_formats.presence import check_files

    check_files(index)
    sources, digest = open_sources(config.sources, config.column), hashlib.sha256()
    inputs = sum(1 for _ in digested(iter_all(sources), digest, lambda _: None, should_stop))
    if digest.hexdigest() != inputs_digest:
        before = counted(index.manifest.counts.inputs, "input")
        raise UsageError(
            f"the sources have changed since {config.out} was built: they had {before} and now have {inputs}, with "
            "other names, sizes or metadata. Add new inputs with 'edje-index append', or choose another output "
            "directory",
            parameter="sources",
        )
