"""The command `edje-index import-arrays`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import LOCAL_INDEX, json_option, quiet_option, shard_size_option, stored_precisions_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("import-arrays")
@click.argument("tokens", type=_FILE)
@click.argument("embeddings", type=_FILE)
@click.argument("rows", type=_FILE, required=False)
@click.option("--out", required=True, type=LOCAL_INDEX, help="Directory of the new index.")
@stored_precisions_option
@shard_size_option
@click.option(
    "--encoder", default="unknown", show_default=True, metavar="NAME", help="Name and version of your encoder."
)
@click.option(
    "--ann/--no-ann", default=True, show_default=True, help="Build a nearest-neighbour index of the embeddings."
)
@quiet_option
@json_option
def import_arrays(quiet: bool, as_json: bool, **options: Any) -> None:
    """Make an index from arrays of tokens and embeddings that your own encoder computed.

    \b
    TOKENS      .npy file, shape [rows, tokens per row, width]: float32, float16, or bfloat16 saved as uint16
    EMBEDDINGS  .npy file, shape [rows, width]: any floating-point type
    ROWS        Parquet file with the column uri and optionally uri_raw, size, content_hash, width, height

    Embeddings are normalised to unit length. Without ROWS, the URI of each row is the row id. The index works with
    'info', 'verify', 'quantize', 'bench fetch' and the Python interface. Text search is not possible, because the index
    has no model.

    \b
    Examples:
      edje-index import-arrays tokens.npy embeddings.npy --out pages.edje --precision fp8
      edje-index import-arrays tokens.npy embeddings.npy rows.parquet --out pages.edje --encoder colpali-v1.3
    """
    from pipelines.jobs.import_arrays import ArraysConfig
    from pipelines.jobs.import_arrays import import_arrays as run_import

    options["precisions"] = tuple(dict.fromkeys(options["precisions"]))
    config = ArraysConfig(**options)
    with running_job(quiet=quiet, resumes=False) as (on_event, should_stop):
        result = run_import(config, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
        return
    (m, d), out = result.block_shape, options["out"]
    print_line(
        f"{out}: {counted(result.rows, 'row')} of {m} x {d} tokens in {counted(result.shards, 'shard')}, "
        f"{result.seconds:.1f} s"
    )
    for name, size in result.bytes_per_image.items():
        print_line(f"{name:6} {size:7,} bytes per row")
