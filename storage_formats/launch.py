"""The installed command `edje-index`. It finds the packages of this project even where others have the same names.

`pipelines` and `benchmarks` are common names: a folder on PYTHONPATH with a module of that name would hide ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = ("storage_formats", "edje_index", "pipelines", "benchmarks")
_HOME = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command line and return its exit code."""
    if any(_is_hidden(name) for name in PACKAGES):
        _put_home_first()
    # Not an import statement: this package must not depend on those above it.
    return int(importlib.import_module("pipelines.cli").main())


def _is_hidden(name: str) -> bool:
    """Whether `import name` would find something else than the package beside this one."""
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return (_HOME / name).is_dir() and not (folders and Path(folders[0]).resolve() == _HOME / name)


def _put_home_first() -> None:
    """Search the folder of the packages first, in this process and in those that it starts, such as Ray's workers."""
    sys.path.insert(0, str(_HOME))
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_HOME), *filter(None, [others])])
    importlib.invalidate_caches()


if __name__ == "__main__":
    sys.exit(main())
