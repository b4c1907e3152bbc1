"""Checks that a finished index is whole and that its sources have not changed."""

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
    """Check that no file of `index` is missing and that the sources still list the inputs that it was built from.

    Raises:
        UsageError: the inputs differ.
        JobStopped: `should_stop()` returned True.
        CorruptIndexError: a file of the index is missing or has a different length from the committed one.
    """
    from pipelines.sources import digested, iter_all, open_sources
    from storage_formats.format.rows import read_all_rows
    from storage_formats.presence import check_files

    check_files(index)
    sources, digest = open_sources(config.sources, config.column), hashlib.sha256()
    for _ in digested(iter_all(sources), digest, lambda _: None, should_stop):
        pass
    if digest.hexdigest() == inputs_digest:
        return
    rows = read_all_rows(index, ["uri", "size"])
    then = dict(zip(rows["uri"].to_pylist(), rows["size"].to_pylist(), strict=True))
    now = {ref.uri: ref.size for ref in iter_all(sources)}
    resized = sum(now[uri] != then[uri] for uri in now.keys() & then.keys())
    raise UsageError(
        f"the sources have changed since {config.out} was built: {counted(len(then), 'input')} then, {len(now)} now "
        f"({len(now.keys() - then.keys())} new, {len(then.keys() - now.keys())} gone, {resized} of another size); "
        "choose another output directory",
        parameter="sources",
    )
