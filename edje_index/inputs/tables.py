"""Reads tables of images: one entry per image, with the name or the bytes of the image
and further values, such as captions.

The suffix of a table determines its format:

- `.parquet`, `.csv`, `.tsv`: one row per image. In a Parquet file, the column of images
  holds names or the bytes of images.
- `.jsonl`, `.ndjson`: one JSON object per line.
- `.json`: a list of these objects, a Karpathy split file, or a COCO caption file.
- `.txt`, and "-" for standard input: one name per line. Blank lines are skipped.

Consecutive entries of one image and split become one entry with the captions of all and
the other values of the first. All formats but `.json` are read as a stream, so memory
does not depend on their length.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import pyarrow as pa

from edje_index.images.decode import HEAD_BYTES, image_format, undecoded_format
from edje_index.inputs.column_types import BYTES, TEXT, column_kind
from edje_index.inputs.containers import PARQUET, Container, check_expansion, image_leaf
from edje_index.inputs.json_lines import parse_json_lines
from edje_index.inputs.names import file_name
from edje_index.inputs.ranges import RangedFile, open_file, open_ranged
from edje_index.inputs.refs import MAX_INPUT_BYTES
from storage_formats.atomic import Json
from storage_formats.errors import UsageError
from storage_formats.format.parquet import iter_batches, open_parquet
from storage_formats.format.source_columns import (
    CAPTION_COLUMNS,
    PlainText,
    captions_of,
)
from storage_formats.remote.files import read_remote
from storage_formats.remote.urls import is_url

STANDARD_INPUT = "-"
TABLE_SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".txt")
NAME_COLUMNS = (
    "path",
    "image",
    "image_path",
    "file",
    "file_name",
    "filename",
    "filepath",
    "uri",
    "url",
)
"""Names of columns with names of images. Unless the caller names a column, the first of
these names that the table has is the column of images.
"""
CAPTIONS = CAPTION_COLUMNS[0]
SPLIT = "split"
IMAGE_ID = "image_id"

# keys under which the values of a table that are left out are counted
BINARY = "(binary column)"
UNREADABLE = "(unreadable metadata)"
BAD_NAME = "(column name not allowed)"
MORE_FIELDS = "(fields without a column)"

Count: TypeAlias = Callable[..., None]
"""Function that is called with a key, and with a number of values unless it is 1."""

_NAME = NAME_COLUMNS[0]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Number of rows of a Parquet file that are read at once: `_ROWS_WITH_IMAGES` if the
# bytes of images are read, too.
_ROWS = 4096
_ROWS_WITH_IMAGES = 8
# The columns of a JSON file are the names that occur in its first entries. This is the
# number of these entries.
_ENTRIES_WITH_COLUMNS = 1000
# largest number of values of a column that are compared with image formats
_ROWS_TO_TRY = 100
# usual names of columns with the bytes of images, the most preferred first
_PREFERRED = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")


class Entry(NamedTuple):
    """One entry of a table.

    Attributes:
        number: line or row of the entry, counted from 1.
        values: values by column name. Without the column of images, if `image` is set.
        image: name of the image: a str or bytes if it is valid. None if there is none.
        container: how the table packs the bytes of the image; None if it does not have
            them.
        problem: why the entry, or a part of it, cannot be used; empty if it can.
    """

    number: int
    values: Json
    image: Any = None
    container: Container | None = None
    problem: str = ""


class Table:
    """A table of images.

    Args:
        path: path or URL of the table, or "-" for standard input.
        column: the column of images; None selects a column by its content, or the first
            column with a name in `NAME_COLUMNS`.
        images_only: only a Parquet column with the bytes of images is read. A table
            without such a column has no entries. A table that does not have `column`
            is read as if `column` were None.

    Attributes:
        column: the column of images, once `check` or `entries` has selected it.
        has_bytes: True if `column` holds the bytes of images.
    """

    def __init__(
        self,
        path: str,
        column: str | None = None,
        *,
        images_only: bool = False,
    ) -> None:
        self.path = path
        self.column = column
        self.has_bytes = False
        self.suffix = os.path.splitext(file_name(path))[1].lower()
        if path == STANDARD_INPUT:
            self.suffix = ".txt"
        self.images_only = images_only

    def check(self) -> None:
        """Select the column of images.

        Raises:
            UsageError: the table is of an unknown format or has no column of images, or
                standard input is a terminal.
            OSError, ValueError, pyarrow.ArrowException: the table cannot be read.
        """
        if self.suffix not in TABLE_SUFFIXES:
            raise UsageError(
                f"cannot read {self.path} as a table: its name must end in one of"
                f" {', '.join(TABLE_SUFFIXES)}"
            )
        if self.suffix == ".parquet":
            with open_table(os.fsencode(self.path)) as (_, parquet):
                self._select_parquet(parquet)
        elif self.suffix != ".txt":
            self._select(self._columns())
        elif self.path != STANDARD_INPUT:
            self._open().close()
        elif sys.stdin is None or (not sys.stdin.closed and sys.stdin.isatty()):
            raise UsageError(
                "standard input is a terminal; pipe a list of paths into the command",
                parameter="sources",
            )

    def entries(self, count: Count = lambda key, values=1: None) -> Iterator[Entry]:
        """Yield the entries in order.

        If two columns share a name, the first wins. Empty fields of CSV and TSV files
        and Parquet columns with binary values are left out. A class label of Hugging
        Face Datasets becomes the name of the class.

        Args:
            count: called for the values that are left out.

        Raises:
            UsageError: a quoted text has no end, or standard input was read already.
            OSError, ValueError, pyarrow.ArrowException: the table is damaged.
        """
        is_parquet = self.suffix == ".parquet"
        entries = self._parquet_entries(count) if is_parquet else self._texts(count)
        for _, group in itertools.groupby(entries, _identity):
            first, *others = group
            for entry in others:
                add_captions(first.values, entry.values)
            yield first

    def _texts(self, count: Count) -> Iterator[Entry]:
        """See `entries`, for all formats but Parquet."""
        for number, values, problem in self._rows(count):
            # Tools such as pandas write a list to a text column as a text in brackets.
            texts = values.get(CAPTIONS)
            if isinstance(texts, str) and texts[:1] == "[" and texts[-1:] == "]":
                try:
                    values[CAPTIONS] = json.loads(texts)
                except (ValueError, RecursionError):
                    problem = (
                        "'captions' is in brackets but is no JSON list; write a list in"
                        " JSON, or one line per caption in a column 'caption'"
                    )
            image = values.pop(self.column or _NAME, None)
            yield Entry(number, values, image, problem=problem)

    def _select(self, columns: list[str]) -> None:
        candidates = NAME_COLUMNS if self.column is None else (self.column,)
        self.column = next((name for name in candidates if name in columns), None)
        if self.column is None:
            raise UsageError(
                f"{self.path} has no column {' or '.join(candidates)} with texts; name"
                " the column with the paths (columns with texts:"
                f" {', '.join(columns) or 'none'})",
                parameter="column",
            )

    def _columns(self) -> list[str]:
        """Return the names of the columns. Raise ValueError if the file names none."""
        if self.suffix in _DELIMITERS:
            _, row = next(self._text_rows(), (0, None))
            # A zero byte means a damaged file or UTF-16. A "<" means the HTML page of a
            # server.
            if row and "\0" not in row[0] and not row[0].startswith("<"):
                return row
            raise ValueError("the first line does not name columns")
        rows = itertools.islice(self._rows(lambda key: None), _ENTRIES_WITH_COLUMNS)
        names: Json = {}
        first_problem = ""
        for number, values, problem in rows:
            names |= values
            if problem and not first_problem:
                first_problem = f"line {number} cannot be used: {problem}"
        if names or (self.suffix == ".json" and not first_problem):
            return list(names) or [_NAME]
        raise ValueError(first_problem or "the file has no lines")

    def _rows(self, count: Count) -> Iterator[tuple[int, Json, str]]:
        """Yield (number, values, problem) for each entry of a format without types of
        columns. The values are empty if the entry cannot be read.
        """
        if self.suffix in _DELIMITERS:
            yield from self._fields(count)
            return
        with self._open() as file:
            if self.suffix == ".txt":
                for number, line in enumerate(file, 1):
                    if name := line.removeprefix(codecs.BOM_UTF8).strip():
                        yield number, {_NAME: os.fsdecode(name)}, ""
                return
            # A file name in the list need not be UTF-8. Bytes that are not UTF-8 become
            # surrogates.
            records = parse_json_lines(file, "surrogateescape")
            if self.suffix == ".json":
                content = json.loads(file.read().decode("utf-8-sig"))
                values = enumerate(_json_records(content), 1)
                records = ((number, value, "") for number, value in values)
            for number, value, problem in records:
                if not isinstance(value, dict):
                    value = {}
                    problem = problem or "the entry is not a JSON object"
                yield number, value, problem

    def _fields(self, count: Count) -> Iterator[tuple[int, Json, str]]:
        """See `_rows`, for CSV and TSV files."""
        rows = self._text_rows()
        names = next(rows)[1] or []
        if repeated := len(names) - len(set(names)):
            count(BAD_NAME, repeated)
        row: list[str] | None = names
        for number, row in rows:
            fields = row or []
            values: Json = {}
            for column, field in zip(names, fields, strict=False):
                if field:
                    values.setdefault(column, PlainText(field))
            problem = "" if row else "a field is too long"
            if any(fields[len(names) :]):
                count(MORE_FIELDS)
                problem = (
                    f"the line has {len(fields)} fields, but the header has"
                    f" {len(names)}; put quotation marks around texts with commas,"
                    " remove tabs from texts, or write JSON Lines"
                )
            yield number, values, problem
        # If the last row has too few fields, the end of the file may be missing.
        if len(row or names) < len(names):
            count(UNREADABLE)

    def _open(self) -> BinaryIO:
        """Open the file of a format other than Parquet."""
        if self.path == STANDARD_INPUT:
            if sys.stdin.closed:
                raise UsageError(
                    "standard input has been read already, and cannot be read again;"
                    " write the list to a file that ends in .txt, and give its name",
                    parameter="sources",
                )
            return sys.stdin.buffer
        if is_url(self.path):
            return io.BytesIO(read_remote(self.path, MAX_INPUT_BYTES))
        return open(open_file(os.fsencode(self.path))[0], "rb")

    def _text_rows(self) -> Iterator[tuple[int, list[str] | None]]:
        """Yield (number of the last line, fields) for each row of a CSV or TSV file,
        including the header. The fields are None if the row is invalid.

        In a CSV file, quoted text can contain line breaks. In a TSV file, every line is
        a row, because quotation marks have no special meaning in most TSV files.
        """
        with io.TextIOWrapper(
            self._open(), "utf-8-sig", errors="surrogateescape", newline=""
        ) as file:
            if _DELIMITERS[self.suffix] == ",":
                yield from _comma_rows(file, self.path)
                return
            for number, line in enumerate(file, 1):
                row: list[str] | None
                try:
                    row = next(csv.reader([line], delimiter="\t", strict=True))
                except csv.Error:
                    # Either quotation marks are part of the text, or a field is too
                    # long. A line with too long a field is an invalid row.
                    row = (
                        None
                        if len(line) > csv.field_size_limit()
                        else line.rstrip("\r\n").split("\t")
                    )
                if row != []:
                    yield number, row

    def _select_parquet(self, parquet: Any) -> None:
        """Select the column of images of an open Parquet file. If several columns hold
        images, it is the one with a usual name, such as "image".
        """
        schema = parquet.schema_arrow
        if self.images_only and self.column not in schema.names:
            self.column = None
        with_images = [
            name
            for name in schema.names
            if self.column in (None, name) and _holds_images(parquet, name)
        ]
        preferred = [name for name in _PREFERRED if name in with_images]
        if len(with_images) > 1 and not preferred:
            raise UsageError(
                f"{self.path} has several columns of images"
                f" ({', '.join(with_images)}); name the column to index",
                parameter="column",
            )
        self.has_bytes = bool(with_images)
        if with_images or self.images_only:
            self.column = next(iter([*preferred, *with_images]), None)
        else:
            kinds = (TEXT, BYTES)
            self._select(
                [each.name for each in schema if column_kind(each.type) in kinds]
            )

    def _parquet_entries(self, count: Count) -> Iterator[Entry]:
        with open_table(os.fsencode(self.path)) as (file, parquet):
            self._select_parquet(parquet)
            if self.column is None:
                count(self.suffix)
                return
            names = value_columns(parquet.schema_arrow, self.column, count)
            leaves = [self.column]
            at_once = _ROWS
            if self.has_bytes:
                leaves, at_once = _leaves_to_list(parquet, self.column)
            rows = parquet_rows(
                parquet, [*names, self.column], at_once, [*names, *leaves]
            )
            container = Container(PARQUET, file.length, self.column)
            for number, fields in enumerate(rows, 1):
                values = dict(zip(names, fields, strict=False))
                image = fields[-1]
                has_bytes = self.has_bytes and image is not None
                if isinstance(image, dict):
                    has_bytes = image.get("bytes", b"") is not None
                    image = image.get("path")
                    if image:
                        values.setdefault(f"{self.column}_path", image)
                yield Entry(number, values, image, container if has_bytes else None)


def _leaves_to_list(parquet: Any, column: str) -> tuple[list[str], int]:
    """Return the paths of the Parquet columns to read for a list of the images in
    `column`, and the number of rows to read at once. The bytes of images are read only
    if the column may contain nulls, according to the statistics in the file.
    """
    leaf = image_leaf(parquet.schema_arrow, column)
    paths = [parquet.schema.column(at).path for at in range(len(parquet.schema))]
    at = paths.index(leaf)
    kind = parquet.schema.column(at).physical_type
    nulls: list[int | None] = []
    for number in range(parquet.metadata.num_row_groups):
        # PyArrow aborts the process if it is asked for damaged metadata of a column,
        # but reading such a column raises an error. The images of a row group that
        # cannot be read fail one by one.
        with contextlib.suppress(OSError, pa.ArrowException):
            if any(map(len, iter_batches(parquet, 1, [paths[at]], [number]))):
                chunk = parquet.metadata.row_group(number).column(at)
                statistics = chunk.statistics if chunk.physical_type == kind else None
                nulls.append(statistics and statistics.null_count)
    if all(count == 0 for count in nulls):
        return [path for path in paths if path == f"{column}.path"], _ROWS
    needed = (leaf, f"{column}.path")
    return [path for path in paths if path in needed], _ROWS_WITH_IMAGES


def _identity(entry: Entry) -> object:
    """Return an object that is equal for captioned entries of the same image and
    split.
    """
    has_captions = bool(captions_of(entry.values))
    if entry.image is None or entry.container or entry.problem or not has_captions:
        return entry.number
    return entry.image, entry.values.get(SPLIT)


def add_captions(values: Json, others: Json) -> None:
    """Add to the captions in `values` those in `others`, which are values of the same
    image. Nothing is added to captions that are not texts.
    """
    texts = captions_of(values)
    more = [
        text
        for text in captions_of(others)
        if isinstance(text, str) and text not in texts
    ]
    if more and all(isinstance(text, str) for text in texts):
        captioned = values if texts else others
        column = next(name for name in CAPTION_COLUMNS if captioned.get(name))
        values[column] = [*texts, *dict.fromkeys(more)]


def _comma_rows(
    file: Iterable[str], path: str
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield (number of the row's last line, fields) for each row of a comma-separated
    table. The fields are None if one of them is too long.

    Raises:
        UsageError: a quoted text has no closing quotation mark.
    """
    at_end = False

    def lines() -> Iterator[str]:
        nonlocal at_end
        yield from file
        at_end = True

    rows = csv.reader(lines())
    while True:
        first = rows.line_num + 1
        try:
            row: list[str] | None = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = None
        # `csv` reads a further line for a row only while a quoted text is open. If
        # `csv` asks for a line after the last one, the quoted text has no end. If an
        # error occurs after the first line of a row, the quoted text is too long.
        if at_end or (row is None and rows.line_num > first):
            raise UsageError(
                f"the quoted text that begins in line {first} of {path} has no end or"
                " is too long; correct the quotation marks of this line"
            )
        if row != []:
            yield rows.line_num, row


def _json_records(content: Any) -> Iterator[Any]:
    """Yield the records of a JSON file. Those of Karpathy and COCO files get the keys
    of a list of records.
    """
    if isinstance(content, list):
        yield from content
        return
    try:
        images = content["images"]
        if "annotations" in content:
            yield from _coco_records(images, content["annotations"])
            return
        for value in images:
            name = value["filename"]
            if "filepath" in value:
                # In a Karpathy file, 'filepath' is the folder of the image.
                name = os.path.join(value["filepath"], name)
            image_id = value.get("cocoid", value.get("imgid"))
            yield {
                _NAME: name,
                CAPTIONS: [sentence["raw"] for sentence in value["sentences"]],
                SPLIT: value.get(SPLIT),
                IMAGE_ID: None if image_id is None else str(image_id),
            }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"the file is in no known format ({error!r}); give a list of images with"
            " captions, a Karpathy file ('images' with 'sentences') or a COCO file"
            " ('images' and 'annotations')"
        ) from error


def _coco_records(images: list[Any], annotations: Any) -> Iterator[Any]:
    """Yield the records of a COCO caption file, see section 4 of
    https://cocodataset.org/#format-data. Image ids are compared as texts, because some
    tools write them as texts.
    """
    captions: dict[str, list[Any]] = {}
    for value in annotations:
        captions.setdefault(str(value["image_id"]), []).append(value["caption"])
    ids = Counter(str(value["id"]) for value in images)
    if repeated := [image_id for image_id, copies in ids.items() if copies > 1]:
        raise ValueError(
            f"several images have the same id {repeated[0]}; give each image an id of"
            " its own"
        )
    if unknown := captions.keys() - ids:
        raise ValueError(
            f"it has captions of {len(unknown)} images that are not in 'images', for"
            f" example of the image_id {min(unknown)}; add these images, or remove"
            " their captions"
        )
    for value in images:
        image_id = str(value["id"])
        yield {
            _NAME: value.get("file_name"),
            CAPTIONS: captions.get(image_id),
            IMAGE_ID: image_id,
        }


@contextlib.contextmanager
def open_table(path: bytes) -> Iterator[tuple[RangedFile, Any]]:
    """Open a Parquet file, and yield (open file, its `pyarrow.parquet.ParquetFile`).
    Raise ValueError if the file declares more rows than its bytes can hold.
    """
    with open_ranged(path) as file:
        parquet = open_parquet(file, buffer_size=1 << 20)
        if parquet.metadata.num_rows > file.length:
            raise ValueError(
                f"the file declares {parquet.metadata.num_rows} rows, but has only"
                f" {file.length} bytes"
            )
        check_expansion(parquet, file.length)
        yield file, parquet


def _holds_images(parquet: Any, name: str) -> bool:
    """Return True if a column of an open Parquet file holds the bytes of images.

    A column holds images if Hugging Face Datasets recorded the type Image for it.
    Without a recorded type, a binary column holds images if one of its first 100 values
    that are not empty begins like an image file. The same rule holds for the binary
    field `bytes` of a struct column. A struct column whose `bytes` are all empty also
    counts as a column of images, because its field `path` can name image files.
    """
    leaf = image_leaf(parquet.schema_arrow, name)
    if leaf is None:
        return False
    kind = _features_of(parquet.schema_arrow).get(name, {}).get("_type")
    if kind is not None:
        return bool(kind == "Image")
    others = 0
    for batch in iter_batches(parquet, 1, [leaf]):
        value = batch.column(0)[0].as_py()
        data = value["bytes"] if isinstance(value, dict) else value
        # Several values are examined, because the first may be damaged, for example the
        # error page of a server.
        if data:
            head = data[:HEAD_BYTES]
            if image_format(head) or undecoded_format(head):
                return True
            others += 1
            if others == _ROWS_TO_TRY:
                return False
    # If all values are null or empty, a binary column holds no images. For a struct
    # column, the images are then in the files that its field `path` names.
    return leaf != name and not others


def _holds_binary(arrow_type: Any) -> bool:
    """Return True if an Arrow type is binary, or contains a binary type, such as a list
    or a struct of binary values.
    """
    fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
    return column_kind(arrow_type) == BYTES or any(
        _holds_binary(field.type) for field in fields
    )


def value_columns(schema: Any, image_column: str | None, count: Count) -> list[str]:
    """Return the names of the columns with values. These are all columns except
    `image_column` and unusable columns.

    A column is unusable if it has binary values, or if another column has the same
    name. `count` is called for each unusable column.
    """
    copies = Counter(schema.names)
    names: list[str] = []
    for field in schema:
        if field.name == image_column:
            continue
        if copies[field.name] > 1:
            count(BAD_NAME)
        elif _holds_binary(field.type):
            count(BINARY)
        else:
            names.append(field.name)
    return names


def _features_of(schema: Any) -> dict[str, Json]:
    """Return the descriptions of columns ("features") that Hugging Face Datasets
    recorded in a Parquet schema, by column name; {} if another program wrote the file.
    """
    with contextlib.suppress(
        AttributeError, KeyError, TypeError, ValueError, RecursionError
    ):
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"][
            "features"
        ]
        return {
            name: feature
            for name, feature in features.items()
            if isinstance(feature, dict)
        }
    return {}


def parquet_rows(
    file: Any,
    names: list[str],
    rows: int,
    leaves: list[str] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """For each row of an open Parquet file, yield the values of the columns `names` as
    Python objects.

    A class label of Hugging Face Datasets becomes the name of the class. A text that is
    not UTF-8 becomes bytes. A value that no Python type can hold becomes text, or empty
    bytes if it cannot be converted to text.

    Args:
        file: open Parquet file.
        names: names of the columns, in the order in which the values are yielded.
        rows: number of rows to read at once.
        leaves: paths of the Parquet columns to read, if only parts of them are needed.
            The value of a column that is not read is b"". None reads `names`
            completely.
    """
    features = _features_of(file.schema_arrow)
    columns = names if leaves is None else leaves
    for batch in iter_batches(file, rows, columns):
        values: list[list[Any]] = []
        for name in names:
            positions = batch.schema.get_all_field_indices(name)
            if not positions:
                values.append([b""] * len(batch))
                continue
            column = batch.column(positions[0])
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
            try:
                values.append(column.to_pylist())
            except (ValueError, OverflowError):
                values.append(list(map(_python_value, column)))
            classes = features.get(name, {}).get("names")
            # A label that is not the number of a class, such as -1, means that the row
            # has no label.
            if isinstance(classes, list) and pa.types.is_integer(column.type):
                values[-1] = [
                    classes[label] if label in range(len(classes)) else None
                    for label in values[-1]
                ]
        yield from zip(*values, strict=True)


def _python_value(scalar: Any) -> Any:
    """Convert an Arrow value to a Python object by the rules of `parquet_rows`."""
    value = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
    try:
        return value.as_py()
    except UnicodeDecodeError:
        is_text = column_kind(value.type) == TEXT
        return value.as_buffer().to_pybytes() if is_text else b""
    except (ValueError, OverflowError):
        # Python has no type for this value, for example for a date after the year 9999.
        with contextlib.suppress(pa.ArrowException):
            return value.cast(pa.string()).as_py()
        return b""
