"""Compares a finished index with a request to build it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import check_inputs
from pipelines.planning.plan import BuildSettings, plan_of_manifest, refuse_differences
from pipelines.progress.stopping import ShouldStop

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest


def check_finished(config: BuildConfig, manifest: Manifest, should_stop: ShouldStop = lambda: False) -> None:
    """Check that the finished index at `config.out` is the one that `config` describes.

    Raises:
        UsageError: the model, the settings or the inputs differ.
        ModelError: the model bundle cannot be used.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info

    info = read_bundle_info(config.model)
    plan = plan_of_manifest(config.out, manifest)
    refuse_differences(plan, info, BuildSettings.choose(config, plan.settings))
    check_inputs(config, plan, should_stop)
