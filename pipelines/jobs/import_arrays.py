"""The import job: writes an index, or appends rows to one, from token blocks and
embeddings in .npy files.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edje_index.indexing.faiss_build import build_ann, check_faiss
from edje_index.inputs.tables import parquet_rows, value_columns
from pipelines.jobs.plan import check_ann_memory, check_disk
from pipelines.metadata import Ignored, source_values
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
)
from pipelines.progress.wording import by_reason
from storage_formats.arrays import Array
from storage_formats.atomic import naming
from storage_formats.codecs import BF16, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import SHARD_SIZE, IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.parquet import open_parquet
from storage_formats.format.places import open_place
from storage_formats.remote.urls import IndexLocation
from storage_formats.writing.index_writer import ROW_COLUMNS, IndexWriter, Rows

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        rows: number of imported rows.
        shards: number of new shards.
        first_row: row id of the first imported row.
        block_shape: (m, d), tokens per row and width of a token.
        embed_dim: width of an embedding.
        bytes_per_image: length of a record in bytes, by precision.
        ann: kind of the nearest-neighbour index.
        seconds: wall time.
    """

    rows: int
    shards: int
    first_row: int
    block_shape: tuple[int, int]
    embed_dim: int
    bytes_per_image: dict[str, int]
    ann: str
    seconds: float


def import_arrays(
    tokens: Path,
    embeddings: Path,
    out: IndexLocation,
    rows: Path | None = None,
    *,
    append: bool = False,
    precisions: Sequence[str] | None = None,
    encoder: str | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> ImportResult:
    """Write a new index at `out` from arrays of token blocks and embeddings, or append
    rows to the index at `out`. After an error, `out` is as before.

    Args:
        tokens: .npy file with an array of shape [rows, m, d], where m is the number of
            tokens per row and d the width of a token. Its dtype is float32, float16, or
            bfloat16 that was saved as uint16 or as raw 16-bit words.
        embeddings: .npy file with a floating-point array of shape [rows, embed_dim].
        out: directory of the index, or its URL (s3://, gs://, az://).
        rows: Parquet file with the column `uri`, and any of the other `ROW_COLUMNS`.
            All other columns become source columns, except columns with binary values.
            A column whose name the index itself uses is renamed: `status` becomes
            `source_status`. If `rows` is None, the uri of each row is its row id.
        append: append the rows to the index of arrays at `out`. Its precisions, its
            encoder and its kind of nearest-neighbour index stay.
        precisions: precision of the stored tokens; repeatable. None selects bf16, or
            with `append` those of the index.
        encoder: name and version of your encoder, which computed the arrays. None
            selects "unknown", or with `append` that of the index.
        on_event: called with each progress event.
        should_stop: called often; the import stops once it returns True.

    Raises:
        UsageError: an input file is invalid, the files have different numbers of rows,
            `out` is in use, or the disk or the memory is too small; or, with `append`,
            the arrays, `precisions` or `encoder` do not fit the index.
        JobStopped: `should_stop()` returned True.
        MissingExtraError: FAISS is not installed.
    """
    started = time.monotonic()
    check_faiss()
    blocks = open_npy(tokens, 3)
    vectors = open_npy(embeddings, 2)
    if len(blocks) != len(vectors):
        raise UsageError(
            f"{tokens} has {len(blocks)} rows, but {embeddings} has {len(vectors)}"
            " rows; save one row per image in both files"
        )
    _, m, d = blocks.shape
    before = CommittedIndex.open(out).manifest if append else None
    stored = before.spec.precisions if before else ("bf16",)
    names = [codec(name).name for name in precisions or stored]
    spec = IndexSpec(
        len(blocks),
        before.spec.shard_size if before else SHARD_SIZE,
        (m, d),
        vectors.shape[1],
        tuple(dict.fromkeys(names)),
    )
    ignored = Ignored()
    parts = _row_parts(rows, spec.rows, ignored)
    if before is None:
        check_ann_memory(spec)
    else:
        if {*names} != {*stored}:
            raise UsageError(
                f"{out} stores {', '.join(stored)}, so rows with {', '.join(names)}"
                " cannot be appended; quantize the index before or afterwards",
                parameter="precisions",
            )
        if encoder not in (None, kept := before.model.get("encoder")):
            raise UsageError(
                f"{out} has vectors of the encoder {kept!r}, not {encoder!r}; write a"
                " new index",
                parameter="encoder",
            )
    with open_place(out) as place:
        check_disk(place, spec)
    with (
        IndexWriter.open(out)
        if append
        else IndexWriter.create(
            out,
            block_shape=spec.block_shape,
            embed_dim=spec.embed_dim,
            precisions=spec.precisions,
            shard_size=spec.shard_size,
            encoder=encoder or "unknown",
        )
    ) as writer:
        for count, table in parts:
            if should_stop():
                raise JobStopped(
                    f"the import stopped, and {out} is as before; run the import again"
                )
            part = slice(len(writer), len(writer) + count)
            writer.append(blocks[part], vectors[part], table)
            on_event(Progress("importing", len(writer), spec.rows))
        if ignored:
            text = f"values of {rows} that are not stored: {by_reason(ignored)}"
            on_event(StatusMessage(text, is_warning=True))
        if not append:
            on_event(StatusMessage("building the nearest-neighbour index"))
        manifest = writer.finish(build_ann)
    return ImportResult(
        spec.rows,
        spec.shards,
        manifest.spec.used_segments[-1].first_row,
        spec.block_shape,
        spec.embed_dim,
        {name: codec(name, spec.block_shape).record_bytes for name in spec.precisions},
        manifest.ann["kind"],
        time.monotonic() - started,
    )


def open_npy(path: Path, dimensions: int) -> Array:
    """Open the array in a .npy file as a memory map. An array of uint16 or of raw
    16-bit words is returned as bfloat16.

    Args:
        dimensions: required number of dimensions.

    Raises:
        UsageError: the file is not a complete .npy file, or the array has another
            number of dimensions or is empty.
    """
    with _parsing(path, "a .npy file", "save the array with numpy.save"), naming(path):
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    if (extra := path.stat().st_size - array.offset - array.nbytes) > 0:
        raise UsageError(
            f"{path} has {extra:,} bytes after its array; save one array per file"
        )
    if array.ndim != dimensions:
        raise UsageError(
            f"the array in {path} must have {dimensions} dimensions, but its shape is"
            f" {list(array.shape)}; reshape the array"
        )
    if not array.size:
        raise UsageError(
            f"the array in {path} is empty: its shape is {list(array.shape)}"
        )
    return array.view(BF16) if array.dtype in (np.uint16, np.dtype("V2")) else array


@contextlib.contextmanager
def _parsing(path: Path, kind: str, advice: str) -> Iterator[None]:
    """Context manager that converts the error of a file that is not of its `kind` to
    UsageError.
    """
    try:
        yield
    except (OSError, ValueError, EOFError, pa.ArrowException) as error:
        # An OSError with an errno comes from the operating system and does not mean
        # that the file is invalid. For a file that they cannot parse, NumPy and PyArrow
        # raise an OSError without an errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read {path} as {kind}: {reason}; {advice}") from error


def _row_parts(
    path: Path | None, rows: int, ignored: Ignored
) -> Iterator[tuple[int, Rows | None]]:
    """Yield the rows of the index in consecutive parts of at most `_CHUNK_ROWS` rows,
    as (number of rows, columns of these rows).

    Args:
        path: Parquet file of the rows; None to yield None instead of the columns.
        rows: number of rows of the arrays, which the file must have, too.
        ignored: counter to which the values that cannot be stored are added.
    """
    if path is None:
        for start in range(0, rows, _CHUNK_ROWS):
            yield min(_CHUNK_ROWS, rows - start), None
        return
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    with _parsing(path, "a Parquet file", "ROWS must be a Parquet file"):
        file = open_parquet(path)
    names = file.schema_arrow.names
    own = [name for name in names if name in ROW_COLUMNS]
    if repeated := {name for name in own if own.count(name) > 1}:
        raise UsageError(
            f"{path} has several columns {min(repeated)}; leave one of them"
        )
    others = value_columns(
        pa.schema(field for field in file.schema_arrow if field.name not in own),
        None,
        ignored.count,
    )
    if "uri" not in own:
        raise UsageError(
            f"{path} has no column 'uri', only {', '.join(names)}; rename the column of"
            " URIs to uri"
        )
    if file.metadata.num_rows != rows:
        raise UsageError(
            f"{path} has {file.metadata.num_rows} rows, but the arrays have {rows}"
            " rows; write one row per image"
        )
    lines = parquet_rows(file, [*own, *others], _CHUNK_ROWS)
    while True:
        with _parsing(path, "a Parquet file", "write this file again"):
            part = list(itertools.islice(lines, _CHUNK_ROWS))
        if not part:
            return
        values = [
            source_values(
                dict(zip(others, row[len(own) :], strict=True)), ignored, renames=False
            )
            or {}
            for row in part
        ]
        columns: dict[str, list[Any]] = {
            name: [row[position] for row in part] for position, name in enumerate(own)
        }
        for name in dict.fromkeys(itertools.chain(*values)):
            columns[name] = [row.get(name) for row in values]
        yield len(part), columns
