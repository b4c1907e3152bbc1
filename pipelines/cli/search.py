"""`edje-index search`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines.cli.output import dtype_option, json_option, note, print_json
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.search.token_index import Hit

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("index", type=click.Path(path_type=Path))
@click.argument("text")
@click.option("-k", "k", type=_POSITIVE, default=10, show_default=True, help="Hits to show.")
@click.option("--pool", type=_POSITIVE, default=100, show_default=True, help="Nearest rows that are re-ranked.")
@click.option(
    "--rerank/--no-rerank", default=True, help="Re-rank with the joint encoder, or keep the embeddings' order."
)
@click.option("--model", type=click.Path(path_type=Path), help="Model bundle.  [default: the one that built INDEX]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the model runs.",
)
@dtype_option
@json_option
def search(
    index: Path,
    text: str,
    k: int,
    pool: int,
    rerank: bool,
    model: Path | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Find the images that fit TEXT best.

    The nearest rows by embedding are fetched from the token store and sorted by score: the joint encoder's, plus the
    embeddings' similarity times the weight that the model bundle gives to it.

    \b
    Examples:
      edje-index search photos.edje "two dogs play in the snow"
      edje-index search photos.edje "a red car" -k 3 --pool 500 --json
      edje-index search photos.edje "a red car" --no-rerank
      edje-index search photos.edje "a red car" --dtype bfloat16
    """
    if rerank and pool < k:
        raise UsageError(f"--pool {pool} is smaller than -k {k}: only what is in the pool is ranked")
    from storage_formats.format.manifest import Manifest

    trained = Manifest.load(index).model.get("trained", True)  # before torch is loaded: it may raise
    from edje_index.search.token_index import TokenIndex

    opened = TokenIndex.open(index, model, device=device, dtype=dtype)
    if not trained:
        note("note: the weights of this model are untrained; the order of these results has no meaning")
    hits = opened.search(text, k, max(pool, k), rerank=rerank)
    if as_json:
        print_json({"query": text, "hits": [asdict(hit) for hit in hits]})
    else:
        _print(hits)


def _print(hits: list[Hit]) -> None:
    click.echo(f"{'score':>9} {'joint':>9} {'embedding':>10} {'row':>9}  image")
    for hit in hits:
        joint = "-" if hit.joint_score is None else f"{hit.joint_score:.4f}"
        click.echo(f"{hit.score:>9.4f} {joint:>9} {hit.embedding_score:>10.4f} {hit.row_id:>9}  {hit.uri}")
