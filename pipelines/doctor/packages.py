"""Checks of the installed packages: versions, missing extras, and other packages with the same names."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.doctor.finding import Finding, judged
from storage_formats.launch import HOME, PACKAGES

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DISTRIBUTION = "edje-index"
_OTHER_EXTRAS = ("all", "demo", "faiss-gpu", "test", "test-serve")  # combinations, alternatives, and for developers
_SAME_MODULE = {"faiss-cpu": "faiss-gpu-cu12"}  # either of them is enough


def package_findings() -> Iterator[Finding]:
    """Yield one finding for the packages that this project always requires, and one finding for each extra."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in requires(_DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield Finding(
            "packages",
            f"{_DISTRIBUTION} is not installed, so the versions of its packages are unknown",
            "advice",
            "run 'pip install .' in the source directory",
        )
        return
    yield _check_packages("", [each for each in requirements if each.marker is None])
    extras = metadata(_DISTRIBUTION).get_all("Provides-Extra") or ()
    for extra in sorted(set(extras) - set(_OTHER_EXTRAS)):
        yield _check_packages(extra, [each for each in requirements if _belongs_to(each, extra)])


def shadow_findings() -> Iterator[Finding]:
    """Yield a finding for each foreign package on the Python path that has the name of a package of this project."""
    folders = dict.fromkeys(Path(entry or ".").resolve() for entry in (".", *sys.path))
    hiding = [
        (name, Path(spec.origin))
        for folder in folders
        for name in PACKAGES
        if folder != HOME and (spec := PathFinder.find_spec(name, [str(folder)])) is not None and spec.origin
        if not Path(spec.origin).resolve().is_relative_to(HOME)
    ]
    if not hiding:
        yield Finding("names", f"no other package is named {', '.join(PACKAGES[:-1])} or {PACKAGES[-1]}")
    for name, origin in hiding:
        yield Finding(
            "names",
            f"another package is named {name}: {origin}",
            "advice",
            f"this command uses its own package, but a program that imports {name} may get the other one. Rename the "
            f"other package, or put {HOME} first on PYTHONPATH",
            {"name": name, "path": str(origin)},
        )


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    """Return True if `requirement` is a package that `extra` adds to the packages that are always required."""
    marker = requirement.marker
    if marker is None or requirement.name == _DISTRIBUTION:
        return False
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _check_packages(extra: str, requirements: list[Requirement]) -> Finding:
    versions = {each.name: _version(each.name) for each in requirements}
    missing = [name for name, installed in versions.items() if installed is None]
    unsuited = [
        f"{each.name} {installed} (needs {each.specifier})"
        for each in requirements
        if (installed := versions[each.name]) is not None and not each.specifier.contains(installed, prereleases=True)
    ]
    install = f"pip install '{_DISTRIBUTION}{f'[{extra}]' if extra else ''}'"
    result = f"{len(versions) - len(missing)} of {len(versions)} installed"
    if missing:
        result += f", missing: {', '.join(missing)}"
    if unsuited:
        result += f", unsuited version: {', '.join(unsuited)}"
    advice = ""
    if missing or unsuited:
        advice = f"run {install}" if not extra or unsuited else f"if you need this extra, run {install}"
    name = f"packages of [{extra}]" if extra else f"packages, Python {platform.python_version()}"
    return judged(name, result, advice, level="advice" if extra or not missing else "problem", values=versions)


def _version(name: str) -> str | None:
    for candidate in (name, _SAME_MODULE.get(name, name)):
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return None
