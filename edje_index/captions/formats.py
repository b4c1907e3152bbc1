"""The forms that files of captions have, each as a stream of records. ``captions`` says which there are."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edje_index.images.inputs import display_path
from storage_formats.errors import UsageError

IMAGE_KEYS = ("image", "path", "image_path", "file_name", "filename", "filepath")
CAPTION_KEYS = ("captions", "caption", "text")
_ID_KEY, _SPLIT_KEY = "image_id", "split"
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_PARQUET_BATCH = 4096


@dataclass(frozen=True)
class CaptionRecord:
    """What one line, or its like, says; `path` only where the image has no name of its own (a member of a tar)."""

    image: str
    captions: tuple[str, ...]
    split: str | None = None
    image_id: str | None = None
    path: Path | None = None


class _Fault(Exception):
    """A record is not what it has to be; the reader knows its place."""


def read_records(path: Path) -> Iterator[CaptionRecord]:
    """The records of a file, in its order.

    Raises:
        UsageError: with the place of the first fault.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise UsageError(f"{path}: captions are read from files ending in {known}; this is none of them")
    try:
        yield from reader(path)
    except OSError as error:
        raise UsageError(f"cannot read the captions {path}: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[CaptionRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _placed(path, f"line {number}", _json_line, line)


def _json_line(line: bytes) -> CaptionRecord:
    return _record(_parsed(line))


def _json_file(path: Path) -> Iterator[CaptionRecord]:
    content = _placed(path, "", _parsed, path.read_bytes())
    if isinstance(content, list):
        yield from _each(path, "item", content, _record)
    elif isinstance(content, dict) and isinstance(content.get("images"), list):
        if "annotations" in content:
            yield from _coco(path, content)
        else:
            yield from _each(path, "images", content["images"], _karpathy)
    else:
        raise UsageError(
            f"{path} is neither a list of images with captions, nor Karpathy's file ('images' with 'sentences'), "
            "nor COCO's ('images' and 'annotations')"
        )


def _each(path: Path, name: str, values: list[Any], convert: Callable[[Any], CaptionRecord]) -> Iterator[CaptionRecord]:
    for number, value in enumerate(values, 1):
        yield _placed(path, f"{name} {number}", convert, value)


def _karpathy(value: Any) -> CaptionRecord:
    """An element of Karpathy's "images": https://cs.stanford.edu/people/karpathy/deepimagesent/."""
    name = _text(value, "filename")
    sentences = value.get("sentences")
    if not isinstance(sentences, list):
        raise _Fault("it has no list of 'sentences'")
    number = value.get("cocoid", value.get("imgid"))
    return CaptionRecord(
        image=os.path.join(_text(value, "filepath"), name) if "filepath" in value else name,
        captions=_captions([sentence.get("raw") if isinstance(sentence, dict) else None for sentence in sentences]),
        split=_optional(value.get(_SPLIT_KEY)),
        image_id=_optional(number),
    )


def _coco(path: Path, content: Mapping[str, Any]) -> Iterator[CaptionRecord]:
    """COCO's caption annotations: https://cocodataset.org/#format-data, section 4."""
    said: dict[Any, list[Any]] = {}

    def collect(value: Any) -> None:
        if not isinstance(value, dict) or not isinstance(value.get("image_id"), int | str) or "caption" not in value:
            raise _Fault("it has no 'image_id' and 'caption'")
        said.setdefault(value["image_id"], []).append(value["caption"])

    def convert(value: Any) -> CaptionRecord:
        name = _text(value, "file_name")
        captions = said.pop(value.get("id"), [])
        return CaptionRecord(name, _captions(captions), image_id=_optional(value.get("id")))

    annotations = content["annotations"]
    if not isinstance(annotations, list):
        raise UsageError(f"{path}: 'annotations' is no list")
    for number, value in enumerate(annotations, 1):
        _placed(path, f"annotations {number}", collect, value)
    yield from _each(path, "images", content["images"], convert)
    if said:
        raise UsageError(f"{path}: {len(said)} captioned images are not among its 'images', such as {next(iter(said))}")


def _parquet(path: Path) -> Iterator[CaptionRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [
                name for name in (*IMAGE_KEYS, *CAPTION_KEYS, _ID_KEY, _SPLIT_KEY) if name in file.schema_arrow.names
            ]
            for batch in file.iter_batches(_PARQUET_BATCH, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield _placed(path, f"row {number}", _record, value)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no sound Parquet file (after row {number}): {error}") from error


@dataclass
class _Sample:
    """The members of one key of a WebDataset shard."""

    images: list[str] = field(default_factory=list)
    text: bytes | None = None
    json: bytes | None = None


def _webdataset(path: Path) -> Iterator[CaptionRecord]:
    tar = display_path(os.path.abspath(os.fsencode(path)))
    for key, sample in _samples(path).items():
        if sample.images:
            yield _placed(path, f"sample {key}", _of_sample, tar, key, sample)


def _of_sample(tar: str, key: str, sample: _Sample) -> CaptionRecord:
    if len(sample.images) > 1:
        raise _Fault(f"it has {len(sample.images)} images: {', '.join(sample.images)}")
    value: Any = {} if sample.json is None else _parsed(sample.json)
    if not isinstance(value, dict):
        raise _Fault("its .json is no object")
    if sample.text is not None:
        value[CAPTION_KEYS[0]] = [line for line in _decoded(sample.text).splitlines() if line.strip()]
    if not any(name in value for name in CAPTION_KEYS):
        raise _Fault("it has neither a .txt nor a .json with 'captions' or 'caption'")
    name = sample.images[0]
    return CaptionRecord(
        image=name,
        captions=_captions(_said(value)),
        split=_optional(value.get(_SPLIT_KEY)),
        image_id=key,
        path=Path(f"{tar}!{name}"),
    )


def _samples(path: Path) -> dict[str, _Sample]:
    """Key (a member's name up to the first point of its last part) to what there is of it, in the tar's order."""
    samples: dict[str, _Sample] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if not member.isfile() or not stem:
                    continue
                sample = samples.setdefault(folder + slash + stem, _Sample())
                if suffix.lower() in _IMAGE_SUFFIXES:
                    sample.images.append(member.name)
                elif suffix.lower() in ("txt", "json"):
                    data = tar.extractfile(member)
                    assert data is not None
                    setattr(sample, "text" if suffix.lower() == "txt" else "json", data.read())
            _check_end(path, tar)
    except tarfile.TarError as error:
        raise UsageError(f"{path} is no sound uncompressed tar: {error}; make or copy it anew") from error
    return samples


def _check_end(path: Path, tar: tarfile.TarFile) -> None:
    """`tarfile` takes a damaged header for the end; the real end is a block of zeros."""
    with path.open("rb") as file:
        file.seek(tar.offset)
        marker = file.read(tarfile.BLOCKSIZE)
    if len(marker) < tarfile.BLOCKSIZE or marker.strip(b"\0"):
        raise UsageError(f"{path} is cut off or damaged at byte {tar.offset}; make or copy it anew")


def _record(value: Any) -> CaptionRecord:
    """One of our own objects."""
    if not isinstance(value, dict):
        raise _Fault("it is no JSON object")
    key = next((key for key in IMAGE_KEYS if value.get(key) is not None), IMAGE_KEYS[0])
    return CaptionRecord(
        image=_text(value, key),
        captions=_captions(_said(value)),
        split=_optional(value.get(_SPLIT_KEY)),
        image_id=_optional(value.get(_ID_KEY)),
    )


def _captions(value: Any) -> tuple[str, ...]:
    said = [value] if isinstance(value, str) else value
    if not isinstance(said, list) or not said:
        raise _Fault("it has no captions ('captions': a list of strings, or 'caption': a string)")
    if not all(isinstance(caption, str) and caption.strip() for caption in said):
        raise _Fault("one of its captions is blank, or no text; take it out")
    if not all(map(_is_text, said)):
        raise _Fault("one of its captions has half of a surrogate pair, which is no text; take it out")
    return tuple(caption.strip() for caption in said)


def _is_text(value: str) -> bool:
    """False for half of a surrogate pair, which a JSON escape can make."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any, key: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise _Fault(f"it has no '{key}' that is a file name")
    try:
        valid = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
        valid = False
    if not valid:
        raise _Fault(f"its '{key}' {text!r} is no possible file name")
    return text


def _said(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in CAPTION_KEYS if value.get(key) is not None), None)


def _optional(value: Any) -> str | None:
    return None if value is None else str(value)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(_decoded(data))
    except (ValueError, RecursionError) as error:
        raise _Fault(f"it is no JSON: {error}") from error


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Fault(f"it is not UTF-8: {error}") from error


def _placed(path: Path, place: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `read(*arguments)`; its fault as an error that names the place."""
    try:
        return read(*arguments)
    except _Fault as fault:
        raise UsageError(f"{path}{', ' if place else ''}{place}: {fault}") from fault


_READERS: dict[str, Callable[[Path], Iterator[CaptionRecord]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
    ".tar": _webdataset,
}
