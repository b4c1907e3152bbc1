"""Checks the links between the pages of a built site: `python -m tests.docs.links site`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """Collects the targets of links, images and scripts, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]


def read_links(page: Path) -> Links:
    return Links(page.read_text())


def pages_of(site: Path) -> dict[Path, Links]:
    """Pages of a site. The page 404.html is left out, because its links start at the address of the site."""
    return {page.resolve(): read_links(page) for page in sorted(site.rglob("*.html")) if page.name != "404.html"}


def broken_links(site: Path) -> Iterator[str]:
    """Yield "page: target" for each link inside the site that leads to no file or to no anchor."""
    pages = pages_of(site)
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not file.is_file() or (parts.fragment and file in pages and parts.fragment not in pages[file].anchors):
                yield f"{page.relative_to(site.resolve())}: {target}"


if __name__ == "__main__":
    problems = list(broken_links(Path(sys.argv[1])))
    sys.exit("\n".join(["broken links:", *problems]) if problems else 0)
