"""The build job: plans a build, encodes each shard, and commits the index."""

from __future__ import annotations

import contextlib
import time

from pipelines.engines.base import describe_error
from pipelines.jobs.build_result import BuildResult, build_result
from pipelines.jobs.encode_shards import encode_shards
from pipelines.jobs.leftovers import remove_leftovers
from pipelines.jobs.lock import locked_index
from pipelines.jobs.publish_build import publish_build
from pipelines.planning.config import BuildConfig
from pipelines.planning.output import check_output
from pipelines.planning.prepare import prepare_build
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop
from storage_formats.format.layout import Layout


def run_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> BuildResult:
    """Build the index that `config` describes. Resume an unfinished build, or check a finished index.

    Raises:
        UsageError: a setting of `config` is invalid, or differs from the settings of the index in `config.out`.
        ModelError: the model bundle cannot be used.
        JobStopped: the build stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, no input could be indexed, or more inputs failed than
            `config.max_failed` allows.
    """
    started = time.monotonic()
    check_output(config)
    is_finished = Layout(config.out).manifest.exists()
    if is_finished:
        remove_leftovers(config.out)
    with contextlib.nullcontext() if is_finished else locked_index(config.out):
        prepared = prepare_build(config, on_event, should_stop)
        run = None
        if prepared.finished is not None:
            manifest = prepared.finished.manifest
        else:
            try:
                run = encode_shards(config, prepared, on_event, should_stop)
                manifest = publish_build(prepared.plan, run.receipts, on_event, memory=config.memory)
            except OSError as error:
                reason = f"cannot write {config.out}: {describe_error(error)}; finished shards are kept"
                raise JobStopped(reason) from error
    return build_result(manifest, prepared.plan, run, time.monotonic() - started)
