"""The routes in the formats of other services: re-ranking as in Hugging Face
text-embeddings-inference, Cohere and Jina, and embeddings as in the first of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.exceptions import HTTPException

from edje_index.scoring.weights import TEXT_TO_IMAGE, relevance
from edje_index.search.query import encode_images, requested_rows
from pipelines.service.state import (
    Items,
    JsonRequest,
    RowId,
    ServiceState,
    State,
    Text,
    check_count,
    image_bytes,
    new_router,
)
from storage_formats.atomic import Json
from storage_formats.errors import RowIdError, UsageError

router = new_router()
# A document of at most this many digits is a row id. Such row ids are below
# `MAX_ROW_ID`.
_MAX_DIGITS = 15


class DocumentObject(JsonRequest):
    """A document as a JSON object. If several members are set, the first of row_id,
    uri, text and image is used. Other members have no effect.
    """

    model_config = ConfigDict(extra="ignore")

    row_id: RowId | None = None
    uri: Text | None = None
    text: Text | None = None
    """The uri of a row, a row id in digits, or an image as data URI."""
    image: Text | None = None
    """An image as base64 or data URI."""


Document = int | str | DocumentObject


class TeiRerankRequest(JsonRequest):
    """A re-ranking request in the format of Hugging Face text-embeddings-inference."""

    query: Text
    texts: Items[Document]
    """Row ids, uris of rows, or images as data URIs."""
    return_text: bool = False
    raw_scores: bool = False
    """Return final scores instead of relevances between 0 and 1."""
    truncate: bool | None = None
    truncation_direction: str | None = None


class CohereRerankRequest(JsonRequest):
    """A re-ranking request in the common format of Cohere and Jina. `model`, `user` and
    the members about the length of documents have no effect.
    """

    query: Text
    documents: Items[Document]
    """Row ids, uris of rows, or images."""
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None
    truncation: bool | None = None
    user: str | None = None


def _dialect(body: Any) -> str:
    """Return the format of a re-ranking request: "cohere" if the request has the member
    `documents`, else "tei".
    """
    has_documents = isinstance(body, dict) and "documents" in body
    return "cohere" if has_documents else "tei"


class ImageInput(JsonRequest):
    """An image to embed."""

    image: Text


class EmbedRequest(JsonRequest):
    """Texts or images to embed, in the format of Hugging Face
    text-embeddings-inference.
    """

    inputs: Text | ImageInput | Items[Text | ImageInput]
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: None = None
    dimensions: None = None
    """Embeddings cannot be shortened; leave this out."""
    normalize: Literal[True] | None = True
    """Embeddings always have unit length."""


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(
    state: State,
    body: Annotated[
        Annotated[TeiRerankRequest, Tag("tei")]
        | Annotated[CohereRerankRequest, Tag("cohere")],
        Discriminator(_dialect),
    ],
) -> list[Json] | Json:
    """Score documents for a query, and return them best first.

    A document is an image, or the row id or uri of a row of the index. Documents are
    sorted by the final score.

    Requests and responses have one of two formats. In the format of
    text-embeddings-inference, score is the relevance, a number between 0 and 1; with
    raw_scores, it is the final score. In the common format of Cohere and Jina,
    relevance_score is the relevance, and score is the final score.
    """
    if isinstance(body, TeiRerankRequest):
        scores = await _rerank(state, body.query, body.texts)
        answers: list[Json] = []
        for position, score, relevant in scores:
            shown = score if body.raw_scores else relevant
            answers.append({"index": position, "score": shown})
            if body.return_text and isinstance(text := body.texts[position], str):
                answers[-1]["text"] = text
        return answers
    scores = await _rerank(state, body.query, body.documents)
    results: list[Json] = []
    for position, score, relevant in scores[: body.top_n]:
        results.append({"index": position, "relevance_score": relevant, "score": score})
        if body.return_documents and isinstance(text := body.documents[position], str):
            results[-1]["document"] = {"text": text}
    return {
        "id": str(uuid.uuid4()),
        "model": state.name,
        "results": results,
        "meta": {"api_version": {"version": "2"}},
        "usage": {},
    }


async def _rerank(
    state: ServiceState,
    query: str,
    documents: list[Document],
) -> list[tuple[int, float, float]]:
    """Return (position, score, relevance) of each document, best first."""
    index = state.index
    state.check_query(query)
    check_count(len(documents), state.limits.documents, "documents")
    values = [
        _document(document, position) for position, document in enumerate(documents)
    ]
    images = [value for value in values if isinstance(value, bytes)]
    check_count(len(images), state.limits.images, "images")
    rows = [value for value in values if not isinstance(value, bytes)]
    is_image = np.array([isinstance(value, bytes) for value in values], dtype=bool)
    scores = np.empty(len(values))
    if rows:
        try:
            row_ids = await state.files.run(requested_rows, index.committed, rows)
        except (RowIdError, UsageError) as error:
            hint = "; URLs are not fetched" if "://" in str(error) else ""
            raise HTTPException(422, f"{error}{hint}") from error

        def rerank_rows(payloads: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
            return index.rerank_each(
                [text for text, _ in payloads], [its_rows for _, its_rows in payloads]
            )

        unique = np.unique(row_ids).tolist()
        hits, _ = await state.batcher.submit(
            (query, unique),
            rerank_rows,
            pairs=len(unique),
            kind=("rerank", index.store),
        )
        of_row = {hit.row_id: hit.score for hit in hits}
        scores[~is_image] = [of_row[row_id] for row_id in row_ids.tolist()]
    if images:
        scores[is_image], _ = await state.on_images(
            index,
            images,
            lambda part: index.score_pairs([(query, each) for each in part]),
            pairs=1,
        )
    relevances = relevance(scores, index.model.weights(TEXT_TO_IMAGE))
    best = np.argsort(-scores, kind="stable").tolist()
    return [(at, float(scores[at]), float(relevances[at])) for at in best]


def _document(document: Document, position: int) -> int | str | bytes:
    """Return the row id, the uri or the image bytes of a document."""
    if isinstance(document, DocumentObject):
        if document.row_id is not None:
            return document.row_id
        if document.uri is not None:
            return document.uri
        if document.text is None:
            if document.image is None:
                raise HTTPException(
                    422,
                    f"document {position} is empty: set one of row_id, uri, text and"
                    " image",
                )
            return image_bytes(document.image)
        document = document.text
    if isinstance(document, int):
        return document
    if document[:5].lower() == "data:":
        return image_bytes(document)
    is_row_id = (
        document.isascii() and document.isdecimal() and len(document) <= _MAX_DIGITS
    )
    return int(document) if is_row_id else document


@router.post("/embed")
async def embed(state: State, body: EmbedRequest) -> list[list[float]]:
    """Return embeddings of unit length, one per text or image."""
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    texts = [value for value in inputs if isinstance(value, str)]
    images = [
        image_bytes(value.image) for value in inputs if isinstance(value, ImageInput)
    ]
    check_count(len(inputs), state.limits.documents, "texts")
    check_count(len(images), state.limits.images, "images")
    if texts and images:
        raise HTTPException(
            422, "a request cannot mix texts and images; send either texts or images"
        )
    state.check_query(*texts)
    index = state.index
    model = index.model
    embeddings: list[list[float]] = []
    if texts:
        # Encoding a text with the text tower takes about as long as scoring a pair with
        # the joint encoder. Each text therefore costs as much as one pair.
        embeddings, _ = await state.batcher.submit(
            texts,
            lambda requests: [model.text.encode(each).tolist() for each in requests],
            pairs=len(texts),
            kind=("embed", index.store),
        )
    elif images:
        embeddings, _ = await state.on_images(
            index,
            images,
            lambda part: encode_images(model.image_encoder, part)[1].tolist(),
        )
    return embeddings
