"""The command `edje-index import-arrays`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import (
    json_option,
    out_index_option,
    stored_precisions_option,
)
from pipelines.cli.output import print_result, run_job
from pipelines.progress.wording import counted

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("import-arrays")
@click.argument("tokens", type=_FILE)
@click.argument("embeddings", type=_FILE)
@click.argument("rows", type=_FILE, required=False)
@out_index_option
@stored_precisions_option
@click.option(
    "--encoder",
    default="unknown",
    metavar="NAME",
    help="Name and version of your encoder.",
)
@json_option
def import_arrays(as_json: bool, **options: Any) -> None:
    """Make an index from arrays of tokens and embeddings that your own encoder
    computed.

    \b
    TOKENS      .npy file, shape [rows, tokens per row, width]: float32, float16, or
                bfloat16 saved as uint16
    EMBEDDINGS  .npy file, shape [rows, width]: any floating-point type
    ROWS        Parquet file with the column uri and optionally uri_raw, size,
                content_hash, width, height; other columns, such as captions, are kept

    Embeddings are normalised to unit length. Without ROWS, the URI of each row is the
    row id. The index works with 'info', 'verify', 'quantize', 'bench fetch' and the
    Python interface. Text search is not possible, because the index has no model.

    \b
    Examples:
      edje-index import-arrays tokens.npy embeddings.npy \\
        --out pages.edje --precision fp8
      edje-index import-arrays tokens.npy embeddings.npy rows.parquet \\
        --out pages.edje --encoder colpali-v1.3
    """
    from pipelines.jobs.import_arrays import import_arrays as run_import
    from storage_formats.codecs import codec

    started = time.monotonic()
    options["precisions"] = tuple(dict.fromkeys(options["precisions"]))
    manifest = run_job(run_import, **options)
    spec = manifest.spec
    seconds = time.monotonic() - started
    record_bytes = {
        name: codec(name, spec.block_shape).record_bytes for name in spec.precisions
    }
    value = {
        "rows": spec.rows,
        "shards": spec.shards,
        "block_shape": spec.block_shape,
        "embed_dim": spec.embed_dim,
        "bytes_per_image": record_bytes,
        "ann": manifest.ann["kind"],
        "seconds": seconds,
    }
    m, d = spec.block_shape
    line = (
        f"{options['out']}: {counted(spec.rows, 'row')} of {m} x {d} tokens in"
        f" {counted(spec.shards, 'shard')}, {seconds:.1f} s"
    )
    sizes = [f"{name:6} {size:7,} bytes per row" for name, size in record_bytes.items()]
    print_result(value, line, *sizes, as_json=as_json)
