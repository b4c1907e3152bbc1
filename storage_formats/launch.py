"""Entry point of the command `edje-index`.

The entry point ensures that Python imports `pipelines` and `benchmarks` from this project, not other packages with
these names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = ("storage_formats", "edje_index", "pipelines", "benchmarks")
HOME = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command line and return the exit code."""
    if any(_is_hidden(name) for name in PACKAGES):
        _put_home_first()
    # Not an import statement: this package must not depend on those above it.
    return int(importlib.import_module("pipelines.cli").main())


def _is_hidden(name: str) -> bool:
    """Return True if `import name` would import a package other than the package of this project."""
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return (HOME / name).is_dir() and not (folders and Path(folders[0]).resolve() == HOME / name)


def _put_home_first() -> None:
    sys.path.insert(0, str(HOME))
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [others])])
    importlib.invalidate_caches()


if __name__ == "__main__":
    sys.exit(main())
