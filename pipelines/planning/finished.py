"""Compares a finished index with a request to build it, and checks that its files are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import check_inputs
from pipelines.planning.plan import BuildSettings, plan_of_manifest, refuse_differences
from pipelines.progress.stopping import ShouldStop
from storage_formats.errors import CorruptIndexError

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest

_PROBLEMS_SHOWN = 3


def check_finished(config: BuildConfig, manifest: Manifest, should_stop: ShouldStop = lambda: False) -> None:
    """Check that the finished index at `config.out` is the one that `config` describes, and that no file is missing.

    Raises:
        UsageError: the model, the settings or the inputs differ.
        ModelError: the model bundle cannot be used.
        JobStopped: `should_stop()` returned True.
        CorruptIndexError: a file of the index is missing or has a different length from the committed one.
    """
    from edje_index.bundles.info import read_bundle_info

    info = read_bundle_info(config.model)
    plan = plan_of_manifest(config.out, manifest)
    refuse_differences(plan, info, BuildSettings.choose(config, plan.settings))
    _check_files(config.out, manifest)
    check_inputs(config, plan, should_stop)


def _check_files(root: Path, manifest: Manifest) -> None:
    from storage_formats.presence import find_missing_files

    problems = [f"{problem.path} {problem.message}" for problem in find_missing_files(root, manifest)]
    if not problems:
        return
    shown = "; ".join(problems[:_PROBLEMS_SHOWN])
    rest = f"; and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
    raise CorruptIndexError(
        f"{root} is finished but damaged: {shown}{rest}. 'edje-index verify {root}' lists all damage; restore the "
        f"files, or remove {root} and build again"
    )
