"""One step of one system, in a process of its own: `python -m benchmarks.end_to_end.run STEP SYSTEM FOLDER ...`."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.collection import Collection
from benchmarks.end_to_end.systems import SYSTEMS, System
from benchmarks.steps import answer_step

_WARM_UP = 3


def _system(name: str, folder: str) -> System:
    return SYSTEMS[name](Path(folder) / name.replace(" ", "-"), Collection.open(Path(folder)))


def _build(name: str, folder: str) -> dict[str, Any]:
    system = _system(name, folder)
    system.build()
    files = [path for path in system.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"bytes": sum(path.stat().st_size for path in files)}


def _search(name: str, folder: str, effort: str, k: str) -> dict[str, Any]:
    system = _system(name, folder)
    system.open()
    queries, positions, milliseconds = system.collection.queries, [], []
    for query in queries[:_WARM_UP]:
        system.search(query, int(k), int(effort))
    for query in queries:
        started = time.perf_counter()
        positions.append(system.search(query, int(k), int(effort)))
        milliseconds.append(1e3 * (time.perf_counter() - started))
    return {"positions": positions, "milliseconds": milliseconds}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {"build": _build, "search": _search}


def _load_libraries() -> None:
    """Import the libraries of the system before the search.

    Their memory then does not count as memory of the search.
    """
    package = SYSTEMS[sys.argv[2]].package
    importlib.import_module(package or "faiss")


if __name__ == "__main__":
    answer_step(STEPS, _load_libraries)
