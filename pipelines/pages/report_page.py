"""The HTML page that `edje-index report` writes."""

from __future__ import annotations

from edje_index.images.thumbnails import read_thumbnails
from pipelines.jobs.index_report import IndexReport
from pipelines.pages.rendering import render
from pipelines.pages.search_page import short_name


def report_page(report: IndexReport) -> str:
    """Return the HTML page for `report`, including the images that the sample searches found."""
    row_ids = sorted({hit.row_id for search in report.searches for hit in search.hits})
    thumbnails = {thumbnail.row_id: thumbnail for thumbnail in read_thumbnails(report.root, row_ids)}
    stages = report.rows.stages
    slowest = max(stages, key=lambda name: stages[name].seconds, default="")
    return render(
        "report.html",
        report=report,
        manifest=report.manifest,
        spec=report.manifest.spec,
        counts=report.manifest.counts,
        thumbnails=thumbnails,
        names={hit.row_id: short_name(hit.uri) for search in report.searches for hit in search.hits},
        total_bytes=sum(report.bytes_by_part.values()),
        slowest_stage=slowest,
    )
