"""The command `edje-index ann build`: builds the nearest-neighbour index again."""

from __future__ import annotations

import click

from pipelines.cli.lazy_group import LazyGroup
from pipelines.cli.options import index_argument, json_option
from pipelines.cli.output import note, print_result, run_job
from pipelines.progress.wording import counted, human_bytes
from storage_formats.remote.urls import IndexLocation


@click.group(
    "ann", cls=LazyGroup, sections={"Commands": {"build": "pipelines.cli.ann:build"}}
)
def group() -> None:
    """Build the nearest-neighbour index."""


@click.command()
@index_argument
@click.option(
    "--ann",
    default="auto",
    metavar="FACTORY",
    help=(
        "Kind of nearest-neighbour index: auto, or a FAISS factory string such as"
        " IVF1000,Flat or IVF1000,PQ192x4fs."
    ),
)
@click.option(
    "--recall",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.95,
    help="Target recall: share of the 100 nearest rows that a search finds.",
)
@json_option
def build(
    index: IndexLocation,
    ann: str,
    recall: float,
    as_json: bool,
) -> None:
    """Build the nearest-neighbour index of INDEX from the stored embeddings, and
    replace the existing one.

    'edje-index info' describes the nearest-neighbour index, and says whether to build
    it again.

    With --ann auto, a search of up to 100,000 rows compares the query with every
    embedding. For more rows, the embeddings are divided into inverted lists and
    compressed to short codes. A search then reads only some lists. The number of these
    lists is chosen to reach --recall. The search then compares the query with the
    stored embeddings of the best rows, so the scores of hits are exact.

    \b
    Examples:
      edje-index ann build photos.edje
      edje-index ann build photos.edje --ann IVF4096,PQ96x4fs --recall 0.98
    """
    from edje_index.indexing.faiss_build import AnnRequest
    from pipelines.jobs.ann import add_ann
    from pipelines.jobs.resources import usable_memory

    request = AnnRequest(ann, recall, usable_memory(None))
    built = run_job(add_ann, index, request).ann
    measured = built.get("recall")
    file_bytes = sum(file["bytes"] for file in built["files"])
    kind = " ".join(filter(None, [built["kind"], built.get("factory")]))
    lines = [
        f"{index}: {kind}, {counted(built['vectors'], 'vector')},"
        f" {human_bytes(file_bytes)}"
    ]
    if measured is not None:
        lines.append(
            f"recall@{measured['k']} {measured['value']:.3f} with {built['probes']}"
            " lists per query"
        )
    files = len(built["files"])
    value = {"index": str(index), **built, "files": files, "bytes": file_bytes}
    print_result(value, *lines, as_json=as_json)
    if not as_json and measured is not None and measured["value"] < recall:
        note(
            f"the recall is below {recall}; for a higher recall, give --ann a"
            " factory string with longer codes"
        )
