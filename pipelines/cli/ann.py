"""The command group `edje-index ann`: the nearest-neighbour index."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pipelines.cli.lazy_group import LazyGroup
from pipelines.cli.options import json_option, location, memory_option, quiet_option
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.progress.wording import counted, human_bytes
from storage_formats.format.object_store import IndexLocation

if TYPE_CHECKING:
    from edje_index.indexing.ann_info import AnnInfo

_INDEX = click.argument("index", type=location)
_RECALL = click.option(
    "--recall",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    help="Target recall: share of the 100 nearest rows that a search finds.",
)


SECTIONS = {
    "Commands": {
        "build": "pipelines.cli.ann:build",
        "info": "pipelines.cli.ann:info",
        "tune": "pipelines.cli.ann:tune",
    }
}


@click.group("ann", cls=LazyGroup, sections=SECTIONS)
def group() -> None:
    """Build, describe and tune the nearest-neighbour index."""


@click.command()
@_INDEX
@click.option(
    "--ann",
    default="auto",
    show_default=True,
    metavar="FACTORY",
    help="Kind of nearest-neighbour index: auto, or a FAISS factory string such as IVF1000,Flat or IVF1000,PQ192x4fs.",
)
@_RECALL
@memory_option
@quiet_option
@json_option
def build(index: IndexLocation, ann: str, recall: float, memory: int | None, quiet: bool, as_json: bool) -> None:
    """Build the nearest-neighbour index of INDEX from the stored embeddings, and replace the existing one.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    With --ann auto, a search of up to 100,000 rows compares the query with every embedding. For more rows, the
    embeddings are divided into inverted lists and compressed to short codes. A search then reads only some lists. The
    number of these lists is chosen to reach --recall. The search then compares the query with the stored embeddings
    of the best rows, so the scores of hits are exact.

    \b
    Examples:
      edje-index ann build photos.edje
      edje-index ann build photos.edje --memory 4G
      edje-index ann build photos.edje --ann IVF4096,PQ96x4fs --recall 0.98
    """
    from pipelines.jobs.ann import run_ann_build

    with running_job(quiet=quiet, can_resume=lambda: False) as (on_event, should_stop):
        built = run_ann_build(index, ann, recall, on_event, should_stop, memory=memory)
    _show(index, built, as_json)
    if built.recall is not None and float(built.recall["value"]) < recall:
        note(f"the recall is below {recall}; for a higher recall, give --ann a factory string with longer codes")


@click.command()
@_INDEX
@json_option
def info(index: IndexLocation, as_json: bool) -> None:
    """Describe the nearest-neighbour index of INDEX, and say whether to rebuild it.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    An append adds rows to the nearest-neighbour index without rebuilding it. The drift shows how much worse the
    appended rows fit. It is their mean distance to the nearest centroid of an inverted list, divided by the mean
    distance of the rows that the nearest-neighbour index was built from.

    \b
    Example:
      edje-index ann info photos.edje
    """
    from pipelines.jobs.ann import ann_info

    _show(index, ann_info(index), as_json)


@click.command()
@_INDEX
@_RECALL
@quiet_option
@json_option
def tune(index: IndexLocation, recall: float, quiet: bool, as_json: bool) -> None:
    """Choose the number of inverted lists that a search reads.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    The command measures recall and time for increasing numbers of lists, and stores the first number that reaches
    --recall. The queries are 200 stored embeddings, so the recall of text queries can differ.

    \b
    Example:
      edje-index ann tune photos.edje --recall 0.99
    """
    from pipelines.jobs.ann import run_ann_tune

    with running_job(quiet=quiet, can_resume=lambda: False) as (on_event, should_stop):
        measured = run_ann_tune(index, recall, on_event, should_stop)
    chosen = measured[-1].probes if measured else None
    if as_json:
        print_json({"index": str(index), "probes": chosen, "measurements": [asdict(each) for each in measured]})
        return
    for each in measured:
        mark = "  chosen" if each.probes == chosen else ""
        print_line(
            f"{counted(each.probes, 'list'):>12}: recall@{each.k} {each.recall:.3f}, "
            f"{each.milliseconds:.2f} ms of processor time per query{mark}"
        )
    if not measured:
        print_line(f"{index}: a search compares the query with every embedding, so there is nothing to tune")


def _show(index: IndexLocation, described: AnnInfo, as_json: bool) -> None:
    if as_json:
        print_json({"index": str(index), **asdict(described)})
        return
    print_line(
        f"{index}: {described.kind} {described.factory}, {counted(described.vectors, 'vector')}, "
        f"{human_bytes(described.bytes)} in {counted(described.files, 'file')}"
    )
    if described.recall is not None:
        print_line(
            f"recall@{described.recall['k']} {described.recall['value']:.3f} with {described.probes} lists per query"
        )
    if described.appended:
        drift = "" if described.drift is None else f", drift {described.drift:.2f}"
        print_line(f"{counted(described.appended, 'vector')} appended{drift}")
    for reason in described.rebuild:
        print_line(f"run 'edje-index ann build': {reason}")
