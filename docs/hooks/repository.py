"""MkDocs hook: adds the files of the repository that pages link to, such as SPEC.md,
and adapts the links.

The pages in docs/ link to each other and to other files by relative paths, as a code
host shows them. A file outside docs/ gets the path `repository/<path in the
repository>` in the site. Markdown files become pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
FOLDER = "repository"
START = [
    REPO / name
    for name in (
        "storage_formats/SPEC.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    )
]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def site_path(target: Path) -> str:
    """Path in the site of a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{FOLDER}/{target.relative_to(REPO).as_posix()}"


def origin(page: str) -> Path:
    """File of the repository that the page at this path of the site shows."""
    return (
        REPO / page.removeprefix(f"{FOLDER}/")
        if page.startswith(f"{FOLDER}/")
        else DOCS / page
    )


def linked_files(markdown: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative links of a page that lead to files of the repository, with
    their targets.
    """
    for link in LINK.findall(markdown):
        target = (folder / link).resolve()
        if target.is_relative_to(REPO) and target.is_file():
            yield link, target


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files outside docs/ that can be reached by links from docs/, or from
    the files of `START`.
    """
    waiting = [
        Path(file.abs_src_path)
        for file in files.documentation_pages()
        if file.abs_src_path
    ] + START
    while waiting:
        source = waiting.pop()
        path = site_path(source)
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(source)))
        if source.suffix == ".md":
            targets = {
                target for _, target in linked_files(source.read_text(), source.parent)
            }
            waiting += [
                target
                for target in targets
                if files.get_file_from_path(site_path(target)) is None
            ]
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make the relative links of a page lead to the places of their targets in the
    site.
    """
    here = origin(page.file.src_uri)
    if here.is_relative_to(REPO / "benchmarks"):
        # tables of figures would push the guides out of the results
        page.meta["search"] = {"exclude": True}
    targets = dict(linked_files(markdown, here.parent))

    def moved(match: re.Match[str]) -> str:
        target = targets.get(match[1])
        return (
            match[1]
            if target is None
            else os.path.relpath(site_path(target), Path(page.file.src_uri).parent)
        )

    return LINK.sub(moved, markdown)
