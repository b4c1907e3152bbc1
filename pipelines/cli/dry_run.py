"""Shows what a build or an append would do, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.events import OnEvent, ShouldStop
from pipelines.progress.wording import counted, human_bytes
from storage_formats.format.object_store import IndexLocation

if TYPE_CHECKING:
    from pipelines.jobs.dry_run import DryRun


def show_dry_run(
    job: Callable[[OnEvent, ShouldStop], DryRun],
    root: IndexLocation,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run `job`, and print its result."""
    with running_job(quiet=quiet, can_resume=lambda: False) as (
        on_event,
        should_stop,
    ):
        estimate = job(on_event, should_stop)
    if as_json:
        print_json(asdict(estimate))
        return
    for line in _lines(estimate):
        print_line(f"{root}: {line}")


def _lines(estimate: DryRun) -> list[str]:
    failed = sum(estimate.failed_by_reason.values())
    to_encode = estimate.inputs - estimate.duplicates - failed
    lines = [
        f"{counted(estimate.inputs, 'input')} = {to_encode:,} to encode + {estimate.duplicates:,} duplicates + "
        f"{failed:,} that cannot be read",
        f"{counted(estimate.rows, 'row')} in {counted(estimate.shards, 'shard')}",
    ]
    if estimate.finished_shards:
        lines[-1] += f", {estimate.finished_shards:,} finished"
    lines.append(f"disk {_parts(estimate.disk_bytes)}; {human_bytes(estimate.free_disk_bytes)} free")
    lines.append(
        f"memory at least {_parts(estimate.memory_bytes)}; {human_bytes(estimate.free_memory_bytes)} available"
    )
    return lines


def _parts(sizes: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())
    return f"{human_bytes(sum(sizes.values()))} ({parts})" if parts else "0 B"
