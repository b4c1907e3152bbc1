"""Reads the documents of a re-ranking request: rows of the index, or images in the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edje_index.search.requested_rows import requested_rows
from pipelines.service.errors import ServiceError
from pipelines.service.images import image_bytes, is_data_uri
from pipelines.service.schemas import Document, DocumentObject, ImageUrl
from pipelines.service.settings import Limits
from storage_formats.errors import RowIdError, UsageError
from storage_formats.format.manifest import CommittedIndex

_MAX_DIGITS = 15


@dataclass(frozen=True)
class Documents:
    """The documents to score.

    Attributes:
        rows: row id or uri of each document that is a row, by position in the request.
        images: encoded bytes of each document that is an image, by position in the request.
    """

    rows: dict[int, int | str]
    images: dict[int, bytes]


def read_documents(documents: Sequence[Document], limits: Limits) -> Documents:
    """Read the documents of a request. Separate the rows from the images.

    Raises:
        ServiceError: status 413 for too many documents or images, 422 for an invalid document.
    """
    if len(documents) > limits.documents:
        raise ServiceError(413, f"send fewer documents: {len(documents)} are over the limit of {limits.documents}")
    rows: dict[int, int | str] = {}
    images: dict[int, bytes] = {}
    for position, document in enumerate(documents):
        value = _value(document, position)
        if isinstance(value, bytes):
            images[position] = value
        else:
            rows[position] = value
    if len(images) > limits.images:
        raise ServiceError(413, f"send fewer images: {len(images)} are over the limit of {limits.images}")
    return Documents(rows, images)


def resolve_rows(index: CommittedIndex, documents: Documents) -> dict[int, int]:
    """Return the row ids of the documents that are rows, by position in the request. This function reads files.

    Raises:
        ServiceError: status 422 if a row does not exist or has no tokens.
    """
    try:
        row_ids = requested_rows(index, list(documents.rows.values()))
    except (RowIdError, UsageError) as error:
        hint = "; URLs are not fetched" if "://" in str(error) else ""
        raise ServiceError(422, f"{error}{hint}") from error
    return dict(zip(documents.rows, row_ids.tolist(), strict=True))


def _value(document: Document, position: int) -> int | str | bytes:
    if isinstance(document, DocumentObject):
        return _object_value(document, position)
    return document if isinstance(document, int) else _text_value(document)


def _text_value(text: str) -> int | str | bytes:
    """Return the image bytes of a data URI, the row id of a text of digits, or else the text as a uri."""
    if is_data_uri(text):
        return image_bytes(text)
    if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    return text


def _object_value(document: DocumentObject, position: int) -> int | str | bytes:
    part = document.content[0] if document.content else None
    if document.row_id is not None:
        return document.row_id
    if document.uri is not None:
        return document.uri
    text = document.text or (part.text if part else None)
    if text is not None:
        return _text_value(text)
    image = document.image or document.image_url or (part.image_url if part else None)
    if isinstance(image, ImageUrl):
        image = image.url
    if not image:
        raise ServiceError(
            422, f"document {position} is empty: set one of row_id, uri, text, image, image_url and content"
        )
    return image_bytes(image)
