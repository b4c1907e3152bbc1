"""Schemas of the requests of the service."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

# the largest integer that every JSON reader keeps exactly
_MAX_ROW_ID = 1 << 53
_Item = TypeVar("_Item")

RowId = Annotated[int, Field(ge=0, lt=_MAX_ROW_ID, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=1 << 24)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=1, le=1000, strict=True)]
# Validation blocks all requests, and each error takes a kilobyte, so it ends at the
# first error or too many items. The limits of the service on the number of items are
# lower and have better messages.
Items = Annotated[list[_Item], Field(max_length=10_000, fail_fast=True)]


class _Request(BaseModel):
    """A request. An unknown member is refused: it could change the answer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Search(_Request):
    image: Text | None = None
    """An image as base64 or data URI."""
    row_id: RowId | None = None
    """Row id of an image of the index."""
    k: Count = 10
    """Number of hits."""
    pool: Count | None = None
    """Number of candidates to re-rank, at least k; the default is the value of pool in
    /info.
    """
    score: str | None = Field(None, max_length=200)
    """Score to sort by, for example embedding; the default is the score of the bundle.
    """
    precision: Name | None = None
    """Precision of the tokens; the default is the value of precision in /info."""

    def _check(
        self,
        query: str | None,
        needed: str,
    ) -> Self:
        given = [query is not None, self.image is not None, self.row_id is not None]
        if not any(given) or all(given[1:]):
            raise ValueError(f"give {needed}")
        if self.pool is not None and self.pool < self.k:
            raise ValueError(
                f"pool must be at least k, got pool = {self.pool} and k = {self.k}"
            )
        return self


class SearchRequest(_Search):
    """A search by text, for images that are similar to an image or a row, or by
    text and image together.
    """

    query: Text | None = None
    """The text to search for."""
    where: str | None = Field(None, min_length=1, max_length=4096)
    """Filter such as width > 800 and licence = 'cc0'; only rows that pass are searched.
    /info lists the columns.
    """
    columns: list[Name] | None = Field(None, max_length=64)
    """Columns of the rows that each hit brings; the default is the captions."""
    skip: int = Field(0, ge=0, le=10_000, strict=True)
    """Number of the best hits to leave out."""
    min_relevance: float = Field(0.0, ge=0, le=1)
    """Leave out hits with a lower relevance."""
    embedding_order: bool = False
    """Also return the first k candidates in the order by embedding."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.skip and self.query is not None and self.score != "embedding":
            raise ValueError("skip with a query needs the score embedding")
        return self._check(
            self.query, "query, image or row_id, or query with one of the others"
        )


class TextSearchRequest(_Search):
    """A search for the texts that describe an image best. Exactly one of `image`
    and `row_id` is set.
    """

    texts: Items[Text] = Field(min_length=1)
    """The texts to choose from."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        return self._check(None, "exactly one of image and row_id")


class DocumentObject(BaseModel):
    """A document as a JSON object. If several members are set, the first of row_id,
    uri, text and image is used.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    row_id: RowId | None = None
    uri: Text | None = None
    text: Text | None = None
    """The uri of a row, a row id in digits, or an image as data URI."""
    image: Text | None = None
    """An image as base64 or data URI."""


Document = StrictInt | StrictStr | DocumentObject


class TeiRerankRequest(_Request):
    """A re-ranking request in the format of Hugging Face text-embeddings-inference."""

    query: Text
    texts: Items[Document]
    """Row ids, uris of rows, or images as data URIs."""
    return_text: bool = False
    raw_scores: bool = False
    """Return final scores instead of relevances between 0 and 1."""
    truncate: bool | None = None
    truncation_direction: str | None = None


class CohereRerankRequest(_Request):
    """A re-ranking request in the common format of Cohere and Jina. `model`, `user` and
    the members about the length of documents have no effect.
    """

    query: Text
    documents: Items[Document]
    """Row ids, uris of rows, or images."""
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    truncation: bool | None = None
    user: str | None = None


class ImageInput(_Request):
    """An image to embed."""

    image: Text


class EmbedRequest(_Request):
    """Texts or images to embed, in the format of Hugging Face
    text-embeddings-inference.
    """

    inputs: Text | ImageInput | Items[Text | ImageInput]
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: None = None
    dimensions: None = None
    """Embeddings cannot be shortened; leave this out."""
    normalize: Literal[True] = True
    """Embeddings always have unit length."""
