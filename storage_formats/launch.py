"""Entry point of the command `edje-index`, and imports of this project's packages
beside packages of other projects that have the same names.

Other projects may install packages named `pipelines` or `benchmarks`. The entry point
ensures that the command imports the packages of this project. In other programs,
`share_package` makes this project's `pipelines` importable beside the other package of
this name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("storage_formats", "edje_index", "pipelines", "benchmarks")
HOME = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command line and return the exit code."""
    if are_packages_hidden(sys.path):
        # `import name` would import the package of another project. The directory of
        # this project therefore becomes the first of the search path, in this process
        # and in its child processes.
        sys.path.insert(0, str(HOME))
        others = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [others])])
        importlib.invalidate_caches()
    # This is not an import statement, because `storage_formats` must not depend on
    # `pipelines`.
    return int(importlib.import_module("pipelines.cli").main())


def are_packages_hidden(path: Sequence[str]) -> bool:
    """Return True if the first package with a name of this project in the search path
    `path` is that of another project.
    """
    specs = (PathFinder.find_spec(name, path) for name in PACKAGES)
    # A directory without code has no origin. It hides no package.
    origins = [Path(spec.origin).resolve() for spec in specs if spec and spec.origin]
    return any(HOME not in origin.parents for origin in origins)


def share_package() -> None:
    """Make the modules of `pipelines` importable if `import pipelines` imports the
    package of another project.

    The directory of this project's package is appended to the search path of the other
    package. Python then looks for a module in the other package first.

    Raises:
        ImportError: the other package has a module or a directory with the name of one
            of this project.
    """
    package = importlib.import_module("pipelines")
    home = HOME / "pipelines"
    folders = [Path(folder).resolve() for folder in getattr(package, "__path__", [])]
    if home in folders:
        return
    ours = {path.stem for path in home.iterdir()} - {"__init__", "__pycache__"}
    if hidden := next(
        (
            path
            for folder in folders
            for path in sorted(folder.iterdir())
            if path.stem in ours
        ),
        None,
    ):
        raise ImportError(
            f"{hidden} has the name of a module of edje-index, which cannot be imported"
            " beside it; rename it"
        )
    package.__path__ = [*map(str, folders), str(home)]


if __name__ == "__main__":
    sys.exit(main())
