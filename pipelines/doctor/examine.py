"""Runs all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pipelines.doctor.disk import disk_findings
from pipelines.doctor.finding import Finding
from pipelines.doctor.hardware import hardware_findings
from pipelines.doctor.packages import package_findings, shadow_findings
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.presence import check_files


def examine(path: Path | None) -> Iterator[Finding]:
    """Yield the result of every check.

    Args:
        path: an index, or another directory. The disk that contains `path` is measured. None checks no disk.

    Raises:
        UsageError: `path` is not a directory.
    """
    if path is not None and not path.is_dir():
        raise UsageError(f"{path} is not a directory; give an index or an existing directory", parameter="path")
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": package_findings,
        "names": shadow_findings,
        "hardware": hardware_findings,
    }
    if path is not None:
        layout = Layout(path)
        if layout.manifest.exists() or layout.build.exists():
            checks["index"] = partial(_index_findings, path)
        checks["disk"] = partial(disk_findings, path)
    for name, check in checks.items():
        try:
            yield from check()
        except (EdjeError, OSError) as error:
            yield Finding(name, str(error), "problem", "solve this problem first, and run the command again")
            if name == "index":
                return  # its files cannot be measured


def _index_findings(path: Path) -> Iterator[Finding]:
    index = CommittedIndex.open(path)
    check_files(index)
    manifest = index.manifest
    values = {"rows": manifest.spec.used_rows, "precisions": list(manifest.spec.precisions)}
    yield Finding("index", f"complete: {values['rows']:,} rows in {', '.join(manifest.spec.precisions)}", values=values)
