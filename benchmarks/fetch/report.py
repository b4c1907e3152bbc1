"""The report of `bench fetch`: a verdict, a chart, a picture, and tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.fetch.bench import (
    DEPTH,
    FIO,
    PAPER,
    QUERY,
    SEQUENTIAL_BYTES,
    Workload,
)
from benchmarks.fetch.peers import READER
from benchmarks.report import Report, machine
from edje_index.evaluation.report import table

# A row of the report is called faster than edje-index if the rate of edje-index is less
# than this fraction of the rate in the row.
_FASTER = 0.95
_BAR = 40
_COLUMNS = (
    "",
    "page cache",
    "blocks/s",
    "GB/s (range)",
    "edje-index / row",
    "CPU us per block",
    "read",
    "p50 / p95 / p99 ms",
)
_METHOD = """Every run is a process of its own, which imports, opens and warms up before
the timing starts. The warm-up reads other rows. The subjects of a table take turns, so
that a change of the disk's speed affects all of them.

- Cold: the pages of the files were evicted, and at most 1 % of them were in the page
  cache right before the run. All other cold runs are discarded and listed above. Warm:
  at least 99 % of the pages were in the page cache, and all blocks were fetched before.
- The device: the program fio reads as many records at random positions, each in whole
  sectors, or as many bytes in contiguous reads of 1 MiB.
- GB/s: stored bytes of the requested blocks, median and range. edje-index checks and
  decodes them to bfloat16 in this time. The others return stored bytes unchecked. The
  program fio discards the data.
- edje-index / row: ratio of the rates, as the median over repeats. Less than 1: the row
  is faster.
- CPU: user and system time of the process.
- Read: bytes that the kernel counted as read from storage, divided by the bytes of the
  requested blocks.
- p50 / p95 / p99: of a call, and of a single read for the device. The files are evicted
  once, before the first call. No block is requested twice, but readahead may load
  blocks of later calls into the page cache.
- The report cannot see caches of the drive or, in a virtual machine, of the host."""


def report_lines(report: Report, picture: str | None = None) -> Iterator[str]:
    """Yield the lines of the report in Markdown. `picture` is the name of the file that
    `draw` wrote.
    """
    where = report["environment"]
    disk = where["disk"]
    settings = report["settings"]
    rows = report["rows"]
    valid = [row for row in rows if row["runs"]]
    yield f"# Fetching blocks, {where['date']}\n"
    yield from (f"- {line}" for line in verdict(valid))
    yield "\n```text"
    yield from bars(valid)
    yield "```\n"
    if picture:
        yield f"![Throughput, latency and ratios]({picture})\n"
    for name, lines in summary_tables(valid).items():
        yield f"## {name}, GB/s (edje-index / row)\n"
        yield from lines
        yield ""
    yield "## Machine\n"
    yield machine(where)
    yield (
        f"Disk: {disk['device']} ({disk['model'] or 'model unknown'}), scheduler"
        f" {disk['scheduler'] or 'unknown'}, {disk['queue']}, {disk['file_system']}"
        f" ({disk['mount_options']}). Load average before the first run:"
        f" {where['load_before']:.1f}."
    )
    options = "".join(f" --precision {name}" for name in settings["compared"])
    options += "".join(f" --{name}" for name in ("quick", "paper") if settings[name])
    yield (
        f"\nThe first {settings['rows']:,} rows, medians of {settings['repeats']} runs."
        " This command repeats all of them:\n"
    )
    yield (
        f"    edje-index bench fetch {settings['index']}{options} --pool"
        f" {settings['pool']} --repeats {settings['repeats']}\n"
    )
    yield from table(
        (
            "the device",
            "bytes per read",
            "depth",
            "GB/s",
            "reads/s",
            "p50 ms",
            "p99 ms",
        ),
        map(_device_cells, _select(valid, subject=FIO)),
    )
    yield ""
    for precision, title in dict.fromkeys((r["precision"], r["title"]) for r in rows):
        of_table = _select(rows, precision=precision, title=title)
        yield f"## {precision}, {of_table[0]['record_bytes']:,} bytes: {title}\n"
        yield from table(_COLUMNS, map(_cells, of_table))
        yield "\n```sh"
        yield from dict.fromkeys(row["command"] for row in of_table)
        yield "```\n"
    yield "## Settings, notes and discarded runs\n"
    uses = {row["subject"]: row["setting"] for row in rows}
    yield from (f"- {name}: {text}." for name, text in uses.items())
    yield from (f"- {line}" for line in report["notes"])
    yield from (
        f"- {row['precision']}, {row['title']}, {row['subject']}, {row['cache']}:"
        f" {reason}"
        for row in rows
        for reason in row["discarded"]
        if reason
    )
    yield f"\n## Method\n\n{_METHOD}"


def verdict(rows: list[Report]) -> Iterator[str]:
    """Yield sentences about the rates of the disk, the pairs per second that a GPU can
    score with the blocks from this disk, the cases in which a library is faster than
    edje-index, and the times that the EDJE paper reports.
    """
    large = _large(rows)
    for precision, title in large.items():
        of_table = _select(rows, precision=precision, title=title, cache="cold")
        for device in _select(of_table, subject=FIO):
            p50, _, p99 = device["latency_ms"]
            yield (
                f"{precision}: the disk delivers records of"
                f" {device['record_bytes']:,} bytes at {device['gb_per_s'][0]:.2f} GB/s"
                f" ({device['blocks_per_s']:,.0f} reads/s, p50 {p50:.2f} ms, p99"
                f" {p99:.2f} ms), and edje-index reads at {device['ratio']:.2f} of this"
                " rate."
            )
    yield "A GPU that scores N pairs/s needs N blocks/s from a cold page cache."
    feeds = dict[str, list[str]]()
    for row in _select(rows, subject=READER, cache="cold"):
        if row["title"] in large.values() or row["workload"]["pool"] == QUERY:
            text = f"{row['blocks_per_s']:,.0f} pairs/s at {row['precision']}"
            feeds.setdefault(row["title"], []).append(text)
    for title, rates in feeds.items():
        yield f"{title}: this disk feeds {', '.join(rates)}."
    faster = dict[str, list[str]]()
    for row in rows:
        if _is_faster(row):
            case = f"{row['subject']}, {row['cache']}, {row['title']}"
            text = f"{1 / row['ratio']:.1f} ({row['precision']})"
            faster.setdefault(case, []).append(text)
    for case, factors in faster.items():
        yield f"Faster than edje-index: {case}, by {', '.join(factors)}."
    paper = {PAPER: 0.59, PAPER._replace(is_contiguous=True): 0.39}
    for row in _select(rows, cache="cold"):
        seconds = paper.get(Workload(**row["workload"]))
        if seconds is not None and row["subject"] != FIO:
            measured = row["workload"]["blocks"] / row["blocks_per_s"]
            yield (
                f"The paper loads {row['title']} from a memory map in {seconds} s."
                f" {row['subject']} takes {measured:.2f} s at {row['precision']} here."
            )


def bars(rows: list[Report]) -> Iterator[str]:
    """Yield a bar chart of cold random fetches, as text."""
    for precision, title in _large(rows).items():
        yield f"{precision}: {title}, cold, GB/s"
        of_table = _select(rows, precision=precision, title=title, cache="cold")
        longest = max(row["gb_per_s"][0] for row in of_table)
        for row in of_table:
            length = round(_BAR * row["gb_per_s"][0] / longest)
            yield f"  {row['subject']:12} {'█' * length} {row['gb_per_s'][0]:.2f}"


def summary_tables(rows: list[Report]) -> dict[str, list[str]]:
    """Return tables of rates, by title. One table shows cold random fetches at all
    precisions. For each precision that was compared with other libraries, a further
    table shows all compared workloads.
    """
    versions = {row["subject"]: row["version"] for row in rows}
    large = _large(rows)
    tables = {
        "Cold random blocks": {
            precision: {"precision": precision, "title": title, "cache": "cold"}
            for precision, title in large.items()
        }
    }
    for row in rows:
        if row["subject"] not in (FIO, READER):
            values = {key: row[key] for key in ("precision", "title", "cache")}
            columns = tables.setdefault(f"All of {row['precision']}", {})
            columns[f"{row['title']}, {row['cache']}"] = values
    texts = {}
    for name, columns in tables.items():
        lines = []
        for subject, version in versions.items():
            cells = []
            for values in columns.values():
                selected = _select(rows, subject=subject, **values)
                cells.append("".join(map(_rate_and_ratio, selected)))
            if any(cells):
                lines.append((f"{subject}, {version}", *cells))
        texts[name] = table(("", *columns), lines)
    return texts


def draw(rows: list[Report], path: Path) -> None:
    """Write a picture to `path` with three diagrams: throughput by blocks per call,
    latency of queries, and how much faster edje-index is than each library.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["runs"]]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    by_pool, latency, ratios = figure.subplots(1, 3)
    large = _large(rows)
    cold = _select(rows, cache="cold")
    others = list(dict.fromkeys(row["subject"] for row in cold))
    others.remove(READER)
    for number, (precision, title) in enumerate(large.items()):
        color = f"C{number}"
        of_precision = _select(cold, precision=precision)
        points = sorted(
            (row["workload"]["pool"], row["gb_per_s"][0])
            for row in _select(of_precision, subject=READER)
            if not row["workload"]["is_contiguous"]
        )
        by_pool.plot(*zip(*points, strict=True), "o-", color=color, label=precision)
        of_table = _select(of_precision, title=title)
        for device in _select(of_table, subject=FIO):
            by_pool.axhline(device["gb_per_s"][0], color=color, linestyle="--")
        compared = [row for row in of_table if row["subject"] != READER]
        height = 0.8 / len(large)
        ratios.barh(
            [others.index(row["subject"]) + height * number for row in compared],
            [row["ratio"] for row in compared],
            height,
            color=color,
            label=precision,
        )
    by_pool.plot([], [], "k--", label=f"the device, {DEPTH} reads in flight")
    by_pool.set(xscale="log", xlabel="random blocks per call", ylabel="GB/s, cold")
    ratios.axvline(1, color="black")
    ratios.set(xscale="log", xlabel="edje-index is faster by, cold random blocks")
    ratios.set_yticks(range(len(others)), others)
    queries = [
        row
        for row in cold
        if row["workload"]["pool"] == QUERY and row["subject"] != FIO
    ]
    queries = [row for row in queries if row["precision"] == queries[0]["precision"]]
    for number, name in enumerate(("p50", "p95", "p99")):
        latency.bar(
            np.arange(len(queries)) + 0.27 * number,
            [row["latency_ms"][number] for row in queries],
            0.27,
            color=f"C{number}",
            label=name,
        )
    latency.set(yscale="log", ylabel=f"ms per query of {QUERY} cold blocks")
    latency.set_title(queries[0]["precision"] if queries else "")
    latency.set_xticks(range(len(queries)), [row["subject"] for row in queries])
    latency.tick_params("x", rotation=30)
    for axes in (by_pool, latency, ratios):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _select(rows: list[Report], **values: object) -> list[Report]:
    return [row for row in rows if all(row[key] == values[key] for key in values)]


def _large(rows: list[Report]) -> dict[str, str]:
    """Return the title of the large random workload of each precision, which is the
    first workload in the rows of the precision.
    """
    titles = dict[str, str]()
    for row in rows:
        titles.setdefault(row["precision"], row["title"])
    return titles


def _rate_and_ratio(row: Report) -> str:
    text = f"{row['gb_per_s'][0]:.2f} ({row['ratio']:.2f})"
    return f"**{text}**" if _is_faster(row) else text


def _is_faster(row: Report) -> bool:
    return row["subject"] != FIO and bool(row["ratio"] < _FASTER)


def _device_cells(row: Report) -> list[str]:
    # A read of fio takes whole sectors, which can be more than a record.
    size = round(row["record_bytes"] * row["read_per_requested"])
    reads = row["blocks_per_s"]
    if row["workload"]["is_contiguous"]:
        reads *= size / SEQUENTIAL_BYTES
        size = SEQUENTIAL_BYTES
    p50, _, p99 = row["latency_ms"]
    return [
        f"{row['precision']}, {row['title']}",
        f"{size:,}",
        str(min(DEPTH, row["workload"]["pool"])),
        f"{reads * size / 1e9:.2f}",
        f"{reads:,.0f}",
        f"{p50:.3f}",
        f"{p99:.3f}",
    ]


def _cells(row: Report) -> list[str]:
    name = f"{row['subject']}, {row['version']}"
    if not row["runs"]:
        return [name, row["cache"], "every run was discarded", *[""] * 5]
    middle, low, high = row["gb_per_s"]
    ratio = f"{row['ratio']:.2f}"
    if _is_faster(row):
        ratio = f"**{ratio}, faster**"
    return [
        name,
        row["cache"],
        f"{row['blocks_per_s']:,.0f}",
        f"{middle:.3f} ({low:.3f} - {high:.3f})",
        ratio,
        f"{row['cpu_us_per_block']:.1f}",
        f"{row['read_per_requested']:.3f}",
        # If there was only one call, its percentiles are equal and shown once.
        " / ".join(dict.fromkeys(f"{value:.2f}" for value in row["latency_ms"])),
    ]
