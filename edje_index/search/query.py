"""Reads the inputs of a search: query files and query images. Finds the rows that are
named by row id or uri.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edje_index.inputs.json_lines import read_json_lines, text_lines
from storage_formats.arguments import as_list, as_path, as_text, shown
from storage_formats.arrays import Floats, Ints
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import (
    DUPLICATE,
    INDEXED,
    iter_rows,
    read_index_rows,
)
from storage_formats.format.tombstones import check_row_ids

if TYPE_CHECKING:
    from PIL import Image

    from edje_index.indexing.image_encoder import ImageEncoder
    from storage_formats.codecs import Blocks

_MEMBERS = ("query", "text", "caption", "captions")
_SHOWN = 3


def read_queries(path: Path) -> list[str]:
    """Return the queries in a file, in order.

    A text file has one query per line. In a ``.jsonl`` or ``.ndjson`` file, a line is a
    JSON string, or an object with one of the members `query`, `text`, `caption` and
    `captions`. A list of strings in place of a string gives several queries. Blank
    lines are skipped.

    Raises:
        UsageError: the file cannot be read, a line is not valid, or there is no query.
    """
    try:
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            values = list(read_json_lines(path))
        else:
            text = path.read_text(encoding="utf-8-sig")
            values = [(0, line, "") for line in text_lines(text)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read {path}: {reason}; give a UTF-8 text file"
        ) from error
    queries: list[str] = []
    for number, value, fault in values:
        query = value
        if isinstance(value, dict):
            query = next((value[name] for name in _MEMBERS if name in value), None)
        texts = query if isinstance(query, list) and query else [query]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UsageError(
                f"{path}, line {number}: a query must be a JSON string, or an object"
                f" with one of the members {', '.join(_MEMBERS)};"
                f" {fault or f'got {value!r:.80}'}"
            )
        queries += [text.strip() for text in texts]
    if not queries:
        raise UsageError(f"{path} is empty: write one text per line")
    return queries


def requested_rows(index: CommittedIndex, rows: Sequence[int | str]) -> Ints:
    """Return the row id of each entry of `rows`, int64 [k].

    A row id is returned unchanged. For a uri, the result is the first indexed row with
    this uri. If no row with this uri is indexed, the first row with this uri must be a
    duplicate, and the result is the original of the duplicate.

    Raises:
        RowIdError: a row id is out of range, unused or deleted.
        UsageError: an entry is neither an integer nor a string, no row has a requested
            uri, or a requested row has no tokens.
    """
    rows = as_list(rows, "rows", "row ids and uris")
    if any(
        isinstance(row, bool) or not isinstance(row, int | np.integer | str)
        for row in rows
    ):
        raise UsageError(
            f"rows must be a sequence of row ids and uris, got {shown(rows)}",
            parameter="rows",
        )
    uris = dict.fromkeys(as_text(row, "rows") for row in rows if isinstance(row, str))
    indexed_rows: dict[str, int] = {}
    other_rows: dict[str, int] = {}
    wanted = pa.array(uris, pa.string())
    for table in (
        iter_rows(index, ["row_id", "uri", "status", "duplicate_of"]) if uris else ()
    ):
        for row in table.filter(pc.is_in(table["uri"], wanted)).to_pylist():
            row_id = (
                row["duplicate_of"] if row["status"] == DUPLICATE else row["row_id"]
            )
            row_of_uri = indexed_rows if row["status"] == INDEXED else other_rows
            row_of_uri.setdefault(row["uri"], row_id)
        if len(indexed_rows) == len(uris):
            break
    row_of_uri = other_rows | indexed_rows
    unknown = [uri for uri in uris if uri not in row_of_uri]
    if unknown:
        more = f" (and {len(unknown) - _SHOWN} more)" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"no row has the uri {', '.join(map(repr, unknown[:_SHOWN]))}{more}; give"
            " uris of indexed images",
            parameter="rows",
        )
    row_ids = check_row_ids(
        [row_of_uri[row] if isinstance(row, str) else int(row) for row in rows],
        index.manifest.spec.rows,
    )
    table = read_index_rows(
        index, row_ids, ["row_id", "status", "reason", "duplicate_of"]
    )
    holes = table.filter(pc.not_equal(table["status"], INDEXED)).to_pylist()
    if holes:
        first = holes[0]
        why = (
            f"it is a duplicate of row {first['duplicate_of']}"
            if first["status"] == DUPLICATE
            else first["reason"]
        )
        more = f" (and {len(holes) - 1} more)" if len(holes) > 1 else ""
        raise UsageError(
            f"row {first['row_id']}{more} has no tokens: {why}; choose rows with the"
            " status 'indexed'",
            parameter="rows",
        )
    return row_ids


def encode_images(
    encoder: ImageEncoder, images: Sequence[str | Path | bytes | Image.Image]
) -> tuple[Blocks, Floats]:
    """Encode query images in the same way as a build.

    Args:
        encoder: the vision tower and the adapter.
        images: paths of image files, bytes of image files, or PIL images.

    Returns:
        (tokens, bfloat16 [b, m, d]; embeddings, float32 [b, embed_dim]).

    Raises:
        UsageError: an image cannot be read.
    """
    import torch
    from PIL import Image

    from edje_index.images.decode import ImageError, decode_rgb
    from edje_index.inputs.refs import InputRef, display_path, read_bytes

    pixels = []
    for image in images:
        name = f" {image}" if isinstance(image, str | Path) else ""
        try:
            if isinstance(image, str | Path):
                path = os.fsencode(as_path(image, "image"))
                image = read_bytes(InputRef(display_path(path), path))
            is_pil = isinstance(image, Image.Image) and all(image.size)
            if not is_pil and not isinstance(image, bytes):
                raise UsageError(
                    "image must be a path, the bytes of an image file, or a PIL image"
                    f" with pixels, got {shown(image)}; convert an array of pixels with"
                    " PIL.Image.fromarray",
                    parameter="image",
                )
            pixels.append(encoder.preprocess(decode_rgb(image)))
        except ImageError as error:
            message = f"cannot read the query image{name}: {error}; give another image"
            raise UsageError(message, parameter="image") from error
    return encoder.encode(torch.stack(pixels))
