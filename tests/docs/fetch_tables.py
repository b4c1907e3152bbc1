"""Copies the tables and sentences of a report of `bench fetch` into the pages that show
them:

    python -m tests.docs.fetch_tables benchmarks/results/2026-11-27-fetch.md

The pages name the report between `<!-- fetch:NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.conftest import REPO

PAGES = ("README.md", "docs/performance.md", "docs/lab/fetch.md")


def parts(report: str) -> dict[str, str]:
    """Return the parts of a report that pages show, by name."""
    bullets = [line for line in report.splitlines() if line.startswith("- ")]
    tables = dict(
        re.findall(r"^## (.*), GB/s .*\n\n((?:\|.*\n)+)", report, re.MULTILINE)
    )
    return {
        "precisions": tables["Cold random blocks"].rstrip(),
        "bf16": tables["All of bf16"].rstrip(),
        "disk": "\n".join(line for line in bullets if ": the disk delivers " in line),
        "faster": "\n".join(line for line in bullets if line.startswith("- Faster")),
    }


def replaced(page: str, report: str) -> str:
    """Return `page` with the parts of `report` between its marks."""
    for name, text in parts(report).items():
        page = re.sub(
            rf"(<!-- fetch:{name} -->\n\n).*?(\n\n<!-- end -->)",
            lambda match, text=text: f"{match[1]}{text}{match[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main(path: Path) -> None:
    name = path.name.removesuffix("-fetch.md")
    for page in (REPO / each for each in PAGES):
        text = replaced(page.read_text(), path.read_text())
        # links to the report and its picture
        text = re.sub(r"results/[\d-]{10}-fetch\.", f"results/{name}-fetch.", text)
        page.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
