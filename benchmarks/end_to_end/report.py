"""The report of the comparison of whole systems: Markdown with a plot, and JSON with every figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edje_index.evaluation.plots import COLOURS, new_figure, save_figure

_METHOD = """Every system gets the same embeddings, tokens and queries. Each run is a process of its own that searches
for one caption after the other, after three searches to warm up.

- R@k: percentage of the captions whose photo is among the first k hits.
- Of exact ten: percentage of the ten photos with the highest MaxSim that the system finds. The joint encoder sorts by
  another score, so it may find fewer of these photos.
- Memory: peak resident memory, including mapped files. The number in brackets is the memory of the imported libraries.
- Bytes per photo: all files of the system. The row with the joint encoder counts the index with all its precisions.
- Only the row with the joint encoder includes the time of the text tower."""


_RECALL = ("R@1", "R@5", "R@10")
_COSTS = ("p50 ms", "p95 ms", "memory MiB", "bytes per photo", "build s")
_COLUMNS = ("system", "setting", *_RECALL, "of exact ten", *_COSTS)


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `<date>-end-to-end.md`, `.json` and a plot to `folder`. Return the paths, the Markdown first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['environment']['date']}-end-to-end"
    text, data, plot = folder / f"{stem}.md", folder / f"{stem}.json", folder / f"{stem}.png"
    _draw(report, plot)
    text.write_text("\n".join(_markdown(report, plot.name)) + "\n")
    data.write_text(json.dumps(report, indent=1, sort_keys=True, default=str) + "\n")
    return [text, data, plot]


def table(report: dict[str, Any]) -> list[str]:
    """Return the results as lines of a Markdown table."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for system in report["systems"]:
        if "problem" in system:
            lines.append(f"| {system['name']} | {system['problem']} |" + " |" * (len(_COLUMNS) - 2))
        else:
            lines += [_row(system, run) for run in system["runs"]]
    return lines


def _row(system: dict[str, Any], run: dict[str, Any]) -> str:
    cells = [
        system["name"],
        f"{system['effort']} {run['effort']}",
        *(f"{value:.1f}" for value in run["recall"].values()),
        f"{run['of_exact']:.1f}",
        f"{run['p50_ms']:.1f}",
        f"{run['p95_ms']:.1f}",
        f"{run['memory_bytes'] / 2**20:.0f} ({run['libraries_bytes'] / 2**20:.0f})",
        f"{system['bytes_per_image']:,.0f}",
        f"{system['build_seconds']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _draw(report: dict[str, Any], path: Path) -> None:
    """Draw R@10 against p95, one line per system."""
    figure, axes = new_figure("Recall by latency", "p95 of a search, ms", "R@10, %")
    for number, system in enumerate(report["systems"]):
        runs = system["runs"]
        if "problem" not in system:
            times, recalls = [run["p95_ms"] for run in runs], [run["recall"]["10"] for run in runs]
            axes.plot(times, recalls, color=COLOURS[number % len(COLOURS)], marker="o", label=system["name"])
    axes.set_xscale("log")
    axes.legend(frameon=False)
    save_figure(figure, path)


def _markdown(report: dict[str, Any], plot: str) -> Iterator[str]:
    facts, collection = report["environment"], report["collection"]
    m, d = collection["block_shape"]
    yield f"# Whole systems, {facts['date']}\n"
    yield f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB."
    yield f"{collection['images']:,} photos of {m} x {d} tokens, {collection['queries']:,} captions.\n"
    yield f"![Recall by latency]({plot})\n"
    yield from table(report)
    yield "\n## Settings\n"
    for system in report["systems"]:
        yield f"- {system['name']}: {system['settings']}."
        if system.get("memory_cap"):
            yield f"  {system['memory_cap']}."
    yield "\n## Method\n"
    yield _METHOD
