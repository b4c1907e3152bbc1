"""Checks that the sources of a finished index have not changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.progress.events import ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex


def check_sources(config: BuildConfig, index: CommittedIndex, inputs_digest: str, should_stop: ShouldStop) -> None:
    """Check that the sources of `index` have not changed.

    Args:
        config: request with the sources.
        index: finished index.
        inputs_digest: digest of the inputs that the index was built from.
        should_stop: called before each input; the check stops once `should_stop()` returns True.

    Raises:
        UsageError: the inputs in the sources have changed.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import digested, iter_all, open_sources

    sources, digest = open_sources(config.sources, config.column, clips=config.frames is not None), hashlib.sha256()
    inputs = sum(1 for _ in digested(iter_all(sources), digest, lambda _: None, should_stop))
    if digest.hexdigest() != inputs_digest:
        raise sources_changed(config, index, inputs)


def sources_changed(config: BuildConfig, index: CommittedIndex, inputs: int) -> UsageError:
    """Return the error for changed sources of a finished index. `inputs` is the number of inputs in the sources now."""
    before = counted(index.manifest.counts.inputs, "input")
    return UsageError(
        f"the sources have changed since {config.out} was built: they had {before} and now have {inputs}, with "
        "other names, sizes or metadata. Add new inputs with 'edje-index append', or choose another output "
        "directory",
        parameter="sources",
    )
