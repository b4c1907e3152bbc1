"""Copies the tables and sentences of a report of `bench fetch` into the pages that show
them:

    python -m tests.docs.fetch_tables benchmarks/results/2026-12-01-fetch.md

The pages name the report between `<!-- fetch:NAME -->` and `<!-- end -->`.
"""

import re
import sys
from pathlib import Path

from tests.conftest import REPO

PAGES = ("README.md", "docs/performance.md", "docs/lab/fetch.md")


def parts(report):
    """Return the parts of a report that pages show, by name."""
    bullets = [line for line in report.splitlines() if line.startswith("- ")]
    tables = dict(
        re.findall(r"^## (.*), GB/s .*\n\n((?:\|.*\n)+)", report, re.MULTILINE)
    )
    return {
        "words": words(tables["All of bf16"]),
        "precisions": next(iter(tables.values())).rstrip(),
        "bf16": tables["All of bf16"].rstrip(),
        "disk": "\n".join(
            line
            for line in bullets
            if ": the disk delivers " in line or " of this rate" in line
        ),
        "faster": "\n".join(line for line in bullets if line.startswith("- Faster")),
    }


def words(table):
    """Return the most important rates in a table as a list in Markdown."""
    header, _, *rows = (
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()
    )

    def case(name):
        """The rate of edje-index, and its ratio to the rate of each other library."""
        column = header.index(name)
        cells = {row[0].split(",")[0]: row[column].split(" (") for row in rows}
        own, _ = cells.pop("edje-index")
        for name in ("the device", "edje-index records"):
            cells.pop(name, None)
        return own, sorted((float(cell[1][:-1]), each) for each, cell in cells.items())

    def slower(name):
        own, ((least, nearest), *_, (most, last)) = case(name)
        others = f"{least:.1f} ({nearest}) to {most:.0f} ({last})"
        return f"{own} GB/s. The others take {others} times as long."

    queries = "5,000 random blocks, 100 per call"
    _, warm = case(f"{queries}, warm")
    faster = [f"{each} by {1 / ratio:.1f}" for ratio, each in warm if ratio < 0.95]
    lines = [
        f"**Queries** of 100 random blocks, cold: {slower(f'{queries}, cold')}",
        "**Bulk**, 5,000 random blocks in one call, cold:"
        f" {slower('5,000 random blocks in one call, cold')}",
        f"**Others are faster** in queries from the page cache: {', '.join(faster)}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def replaced(page, report):
    """Return `page` with the parts of `report` between its marks."""
    for name, text in parts(report).items():
        page = re.sub(
            rf"(<!-- fetch:{name} -->\n\n).*?(\n\n<!-- end -->)",
            lambda match, text=text: f"{match[1]}{text}{match[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main(path):
    name = path.name.removesuffix("-fetch.md")
    for page in (REPO / each for each in PAGES):
        text = replaced(page.read_text(), path.read_text())
        # links to the report and its picture
        text = re.sub(r"results/[\d-]{10}-fetch\.", f"results/{name}-fetch.", text)
        page.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
