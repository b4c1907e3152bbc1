"""The routes of the service, and the schemas of their requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from starlette.exceptions import HTTPException

from edje_index import __version__
from edje_index.images.decode import ImageError, declared_pixels, decode_rgb
from edje_index.inputs.thumbnails import (
    PHOTO_COLUMNS,
    PHOTO_ERRORS,
    describe_photo_error,
    read_photo,
    thumbnail_of,
)
from edje_index.scoring.final_score import relevance
from edje_index.scoring.weights import EMBEDDING, IMAGE_TO_TEXT, TEXT_TO_IMAGE
from edje_index.search.hits import rank_hits
from edje_index.search.query import encode_images, requested_rows
from pipelines.service.batching import Batcher, Timing
from pipelines.service.guard import CODES, Limits, Metrics
from storage_formats.arguments import did_you_mean
from storage_formats.atomic import Json
from storage_formats.errors import RowIdError, UsageError
from storage_formats.format.rows import read_index_rows, type_name
from storage_formats.format.source_columns import MAX_COLUMNS

if TYPE_CHECKING:
    from PIL import Image

    from edje_index.search.token_index import TokenIndex


# the largest integer that every JSON reader keeps exactly
_MAX_ROW_ID = 1 << 53
_Item = TypeVar("_Item")

RowId = Annotated[int, Field(ge=0, lt=_MAX_ROW_ID)]
Text = Annotated[str, Field(min_length=1, max_length=1 << 24)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=1, le=1000)]
# Validation blocks all other requests, and each error takes a kilobyte of memory.
# Validation therefore ends at the first error, and refuses a list that is far too long.
# The routes check lower limits on the number of items, with better messages.
Items = Annotated[list[_Item], Field(max_length=10_000, fail_fast=True)]


class _Request(BaseModel):
    """A request. Unknown members are refused, because a misspelt member would otherwise
    be ignored. Values of another type are refused, too: "0.2" is no number.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _check_members(cls, body: Any) -> Any:
        if isinstance(body, dict) and cls.model_config["extra"] == "forbid":
            names = cls.model_fields
            for name in body.keys() - names:
                raise ValueError(
                    f"there is no member {name[:99]}{did_you_mean(name[:99], names)};"
                    f" choose from: {', '.join(names)}"
                )
        return body


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

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ("query", "image", "row_id")
        possible = [name for name in names if name in type(self).model_fields]
        if all(getattr(self, name) is None for name in possible):
            raise ValueError(f"give {' or '.join(possible)}")
        if self.image is not None and self.row_id is not None:
            raise ValueError("give only one of image and row_id")
        if self.pool is not None and self.pool < self.k:
            raise ValueError(
                f"pool must be at least k, got pool = {self.pool} and k = {self.k}"
            )
        return self


class SearchRequest(_Search):
    """A search by `query`, by `image` or `row_id`, or by `query` and one of the other
    two together.
    """

    query: Text | None = None
    """The text to search for."""
    where: str | None = Field(None, min_length=1, max_length=4096)
    """Filter such as width > 800 and licence = 'cc0'; only rows that pass are searched.
    /info lists the columns.
    """
    columns: list[Name] | None = Field(None, max_length=MAX_COLUMNS + 16)
    """Names of the columns that each hit contains; the default is the captions."""
    skip: int = Field(0, ge=0, le=10_000)
    """Number of the best hits to leave out."""
    min_relevance: float = Field(0.0, ge=0, le=1)
    """Leave out hits with a lower relevance."""
    embedding_order: bool = False
    """Also return the k candidates with the highest embedding similarity."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.skip and self.query is not None and self.score != "embedding":
            raise ValueError("skip with a query needs the score embedding")
        return self


class TextSearchRequest(_Search):
    """A search for the texts that describe an image best. Exactly one of `image`
    and `row_id` is set.
    """

    texts: Items[Text] = Field(min_length=1)
    """The texts to choose from."""


class DocumentObject(_Request):
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
    return_documents: bool | None = None
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    truncation: bool | None = None
    user: str | None = None


def _dialect(body: Any) -> str:
    """Return the format of a re-ranking request: "cohere" if the request has the member
    `documents`, else "tei".
    """
    has_documents = isinstance(body, dict) and "documents" in body
    return "cohere" if has_documents else "tei"


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


# A document of at most this many digits is a row id. Such row ids are below
# `_MAX_ROW_ID`.
_MAX_DIGITS = 15
# number of bytes in each piece of a photo that is sent
_PIECE_BYTES = 1 << 16
# Encoding one image with the vision tower takes about as long as scoring this many
# pairs with the joint encoder.
_PAIRS_PER_IMAGE = 16


class Threads:
    """A fixed number of threads that run functions for requests.

    A request that is cancelled stops waiting for its function, but a running function
    cannot be stopped. Its thread counts as busy until the function returns.
    """

    def __init__(self, count: int, name: str) -> None:
        self._free = asyncio.Semaphore(count)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, function: Callable[..., _Item], *arguments: Any) -> _Item:
        """Call `function` on one of the threads as soon as a thread is free."""
        # The queue of the pool would keep the arguments of a cancelled request, such as
        # images, until a thread is free. A cancelled request leaves this queue at once.
        await self._free.acquire()
        running = asyncio.get_running_loop().run_in_executor(
            self._pool, function, *arguments
        )
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)


@dataclass
class ServiceState:
    """The state that all routes share.

    Attributes:
        index: the open index. After a change of the index, a new object replaces it.
        name: name of the index in requests and responses.
        limits: limits on the size and duration of requests.
        metrics: metrics for Prometheus.
        batcher: queue of requests for the model.
        files: the threads that read files.
        image_requests: limiter for the number of requests whose images are decoded or
            encoded at the same time. The limit is two, so that the model is free for
            searches most of the time.
        photos: limiter for the number of photos that are sent at the same time, because
            a photo takes up to 64 MB of memory. `files` limits the number of photos
            that are read for requests that have been cancelled.
        decoding: the thread that decodes the images of requests, one after the other,
            because decoding an image takes up to 400 MB of memory.
    """

    index: TokenIndex
    name: str
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    files: Threads = field(default_factory=lambda: Threads(4, "files"))
    image_requests: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(2)
    )
    photos: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    decoding: Threads = field(default_factory=lambda: Threads(1, "decoding"))

    async def opened(self, precision: str | None) -> TokenIndex:
        """Return the index, opened with the tokens of `precision`. None means the
        default precision.
        """
        return (
            self.index
            if precision is None
            else await self.files.run(self.index.with_precision, precision)
        )

    def check_query(self, *texts: str) -> None:
        """Raise HTTPException if a text is blank or too long."""
        for text in texts:
            if not text.strip():
                raise HTTPException(422, "the query is empty; send a text")
            _check_count(len(text), self.limits.query_letters, "characters in a text")

    async def on_images(
        self,
        index: TokenIndex,
        images: Sequence[bytes],
        run: Callable[[list[Image.Image]], Sequence[Any]],
        pairs: int = 0,
    ) -> tuple[list[Any], Timing]:
        """Decode images, and return the results of `run` for them, with the times of
        the last batch.

        Args:
            index: index whose vision tower encodes the images.
            images: image files of one request.
            run: function that the thread of the model calls. It takes images in the
                size that the vision tower reads, and returns one result per image.
            pairs: number of (text, image) pairs that `run` scores per image.

        Raises:
            HTTPException: an image cannot be read, the images are too large, or the
                queue refuses the work.
        """
        encoder = index.model.image_encoder
        limits = self.limits

        def decode(data: bytes) -> Image.Image:
            """Decode an image, in the size that the vision tower reads."""
            return encoder.preprocess.resize(decode_rgb(data, limits.image_pixels))

        small = []
        pixels = await self.files.run(
            lambda: [declared_pixels(data) for data in images]
        )
        if max(pixels) > limits.image_pixels or sum(pixels) > limits.request_pixels:
            raise HTTPException(
                413,
                f"send smaller or fewer images: {max(pixels)} pixels in one and"
                f" {sum(pixels)} in all are over the limits of {limits.image_pixels}"
                f" and {limits.request_pixels}",
            )
        async with self.image_requests:
            for data in images:
                try:
                    small.append(await self.decoding.run(decode, data))
                except ImageError as error:
                    status = 413 if error.reason == "too-many-pixels" else 422
                    raise HTTPException(
                        status, f"cannot read an image: {error}"
                    ) from error
            # On a CPU, encoding one image takes about 0.3 s. Each image is therefore
            # submitted alone, so that searches can run between two images.
            at_once = 1 if encoder.device.type == "cpu" else len(small)
            results: list[Any] = []
            for start in range(0, len(small), at_once):
                part = small[start : start + at_once]
                cost = len(part) * (pairs + _PAIRS_PER_IMAGE)
                values, timing = await self.batcher.submit(
                    part,
                    lambda parts: [run(part) for part in parts],
                    cost=cost * index.manifest.spec.block_shape[0],
                )
                results += values
        return results, timing


def _check_count(
    count: int,
    limit: int,
    what: str,
) -> None:
    if count > limit:
        raise HTTPException(
            413, f"send fewer {what}: {count} are over the limit of {limit}"
        )


def _image_bytes(text: str) -> bytes:
    """Return the bytes of an image file that a client sent as base64, alone or in a
    data URI.
    """
    header = text[:200].partition(",")[0]
    is_data = header[:5].lower() == "data:" and header[-7:].lower() == ";base64"
    if ":" in header and not is_data:
        raise HTTPException(
            422,
            "send an image as base64 or as a data URI with base64; URLs are not"
            " fetched",
        )
    try:
        return base64.b64decode(
            text[len(header) + 1 if is_data else 0 :], validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise HTTPException(
            422,
            "an image is not valid base64; send the bytes of the image file as base64",
        ) from error


def _state(request: Request) -> ServiceState:
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


router = APIRouter(
    responses={status: {"description": code} for status, code in CODES.items()}
)
State = Annotated[ServiceState, Depends(_state)]
PathRowId = Annotated[int, Path(ge=0, lt=_MAX_ROW_ID)]


@router.get("/healthz")
async def health() -> dict[str, str]:
    """Return status 200 once the index is open."""
    return {"status": "ok"}


@router.get("/info")
async def info(state: State) -> Json:
    """Return the index with its precisions and scores, and the limits on requests."""
    index = state.index
    limits = state.limits
    manifest = index.manifest
    model = index.model
    weights = model.weights(TEXT_TO_IMAGE)
    dtype = str(model.joint.compute_dtype).removeprefix("torch.")
    described = {
        "name": state.name,
        "rows": manifest.spec.rows,
        "indexed": manifest.counts.indexed,
        "deleted": manifest.snapshot.deleted_rows,
        "block_shape": list(manifest.spec.block_shape),
        "embed_dim": manifest.spec.embed_dim,
        "precisions": list(manifest.spec.precisions),
        "precision": index.precision,
        "columns": {field.name: type_name(field.type) for field in index.rows.schema},
        "encoder_fingerprint": model.info.encoder_fingerprint,
        "bundle_fingerprint": model.info.fingerprint,
        "trained": model.info.trained,
        "dtype": dtype,
        "pool": index.default_pool,
        "score": weights.described(),
        "weights": {
            part: weight for part, weight in weights.by_part().items() if weight
        },
    }
    return {
        "version": __version__,
        "indexes": [described],
        "limits": asdict(limits),
        # The members below are for clients of text-embeddings-inference.
        "sha": None,
        "docker_label": None,
        "model_id": state.name,
        "model_sha": model.info.fingerprint,
        "model_dtype": dtype,
        "model_type": {
            "reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        },
        "max_concurrent_requests": limits.waiting,
        "max_input_length": limits.query_letters,
        "max_batch_tokens": limits.batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.documents,
        "tokenization_workers": 1,
    }


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(state: State) -> Response:
    """Return the metrics in the Prometheus text format."""
    text = generate_latest(state.metrics.registry)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/search")
async def search(state: State, body: SearchRequest) -> Json:
    """Search by text, by an image or the image of a row, or by text and image."""
    index = await state.opened(body.precision)
    where = body.where
    tokens = index.manifest.spec.block_shape[0]
    weights = index.model.weights(TEXT_TO_IMAGE, body.score or "bundle").by_part()
    is_reranked = any(weight for part, weight in weights.items() if part != EMBEDDING)
    # A thread for files evaluates the filter now, and the result is cached. The thread
    # of the model therefore need not read rows.
    if where is not None:
        await state.files.run(
            index.rows.passing, where, time.monotonic() + state.limits.deadline_seconds
        )
    candidates = body.pool or max(body.k, index.default_pool)
    k = body.skip + (candidates if body.embedding_order else body.k)
    pool = body.skip + candidates
    cost = tokens * (pool if is_reranked and body.query is not None else 1)
    options: Json = {"score": body.score, "where": where}
    if body.query is not None:
        state.check_query(body.query)

    def search_texts(payloads: Sequence[tuple[str, int]]) -> list[Any]:
        texts = [text for text, _ in payloads]
        counts = [count for _, count in payloads]
        hits_of_each = index.search(texts, max(counts), pool, **options)
        return [
            hits.first(count) for hits, count in zip(hits_of_each, counts, strict=True)
        ]

    def search_images(images: Sequence[Any]) -> list[Any]:
        if body.query is None:
            return [index.search_image(image, k, where=where) for image in images]
        return [
            index.search(body.query, k, pool, image=image, **options)
            for image in images
        ]

    if body.image is not None:
        (hits,), timing = await state.on_images(
            index, [_image_bytes(body.image)], search_images, cost // tokens
        )
    elif body.row_id is not None:
        hits, timing = await state.batcher.submit(body.row_id, search_images, cost=cost)
    else:
        kind = ("search", index.store, pool, *options.values())
        hits, timing = await state.batcher.submit(
            (body.query, k), search_texts, cost=cost, kind=kind
        )
    del hits[: body.skip]
    if body.columns is not None:
        row_ids = np.array([hit.row_id for hit in hits], dtype=np.int64)
        described = await state.files.run(index.rows.described, row_ids, body.columns)
        hits[:] = [
            replace(hit, columns=columns)
            for hit, (_, columns) in zip(hits, described, strict=True)
        ]
    # Ranks also count the hits that `skip` and `min_relevance` leave out.
    best = [
        {**vars(hit), "rank": body.skip + rank, "embedding_rank": embedding_rank}
        for hit, rank, embedding_rank in rank_hits(hits)
        if (hit.relevance or 0.0) >= body.min_relevance
    ]
    by_embedding = None
    if body.query is not None and body.embedding_order and is_reranked and best:
        by_embedding = sorted(best, key=lambda hit: hit["embedding_rank"])[: body.k]
    else:
        best = [{**hit, "embedding_rank": None} for hit in best]
    return {
        "precision": index.precision,
        "hits": best[: body.k],
        "by_embedding": by_embedding,
        "weights": {part: weight for part, weight in weights.items() if weight},
        # Milliseconds that the request waited in the queue, that its batch took, and
        # that each stage of the batch took.
        "timing": {
            "waited_ms": 1000 * timing.waited,
            "computed_ms": 1000 * timing.computed,
            "batch": timing.batch,
            "stages_ms": {
                stage: 1000 * seconds for stage, seconds in hits.stages.items()
            },
        },
    }


@router.post("/search/texts")
async def search_texts(state: State, body: TextSearchRequest) -> Json:
    """Return the texts that best describe an image or the image of a row."""
    texts = body.texts
    _check_count(len(texts), state.limits.documents, "texts")
    state.check_query(*texts)
    index = await state.opened(body.precision)

    def run(queries: Sequence[Any]) -> list[Any]:
        return [
            index.search_texts(query, texts, body.k, body.pool, score=body.score)
            for query in queries
        ]

    # Encoding a text with the text tower takes about as long as scoring a pair with the
    # joint encoder. Each text therefore counts as one more pair.
    pool = body.pool or max(body.k, index.default_pool)
    pairs = min(pool, len(texts)) + len(texts)
    if body.image is None:
        cost = pairs * index.manifest.spec.block_shape[0]
        hits, _ = await state.batcher.submit(body.row_id, run, cost=cost)
    else:
        (hits,), _ = await state.on_images(
            index, [_image_bytes(body.image)], run, pairs
        )
    weights = index.model.weights(IMAGE_TO_TEXT, body.score or "bundle").by_part()
    return {
        "precision": index.precision,
        "hits": [vars(hit) for hit in hits],
        "weights": {part: weight for part, weight in weights.items() if weight},
    }


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
    _check_count(len(documents), state.limits.documents, "documents")
    values = [
        _document(document, position) for position, document in enumerate(documents)
    ]
    images = [value for value in values if isinstance(value, bytes)]
    _check_count(len(images), state.limits.images, "images")
    rows = [value for value in values if not isinstance(value, bytes)]
    is_image = np.array([isinstance(value, bytes) for value in values], dtype=bool)
    scores = np.empty(len(values))
    tokens = index.manifest.spec.block_shape[0]
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
            cost=len(unique) * tokens,
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
            return _image_bytes(document.image)
        document = document.text
    if isinstance(document, int):
        return document
    if document[:5].lower() == "data:":
        return _image_bytes(document)
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
        _image_bytes(value.image) for value in inputs if isinstance(value, ImageInput)
    ]
    _check_count(len(inputs), state.limits.documents, "texts")
    _check_count(len(images), state.limits.images, "images")
    if texts and images:
        raise HTTPException(
            422, "a request cannot mix texts and images; send either texts or images"
        )
    state.check_query(*texts)
    index = state.index
    model = index.model
    tokens = index.manifest.spec.block_shape[0]
    embeddings: list[list[float]] = []
    if texts:

        def embed_texts(payloads: Sequence[Sequence[str]]) -> list[Any]:
            every = iter(
                model.text.encode(
                    [text for texts in payloads for text in texts]
                ).tolist()
            )
            return [list(islice(every, len(texts))) for texts in payloads]

        # Encoding a text with the text tower takes about as long as scoring a pair with
        # the joint encoder. Each text therefore costs as much as one pair.
        embeddings, _ = await state.batcher.submit(
            texts,
            embed_texts,
            cost=len(texts) * tokens,
            kind=("embed", index.store),
        )
    elif images:
        embeddings, _ = await state.on_images(
            index,
            images,
            lambda part: encode_images(model.image_encoder, part)[1].tolist(),
        )
    return embeddings


async def _photo_row(
    state: ServiceState,
    request: Request,
    row_id: int,
) -> tuple[Json | None, dict[str, str]]:
    """Return a row, and the headers of a response with its photo. The row is None if
    the client already has the photo, as the header If-None-Match of the request says.
    """
    try:
        rows = await state.files.run(
            read_index_rows, state.index.committed, [row_id], PHOTO_COLUMNS
        )
    except RowIdError as error:
        raise HTTPException(404, str(error)) from error
    (row,) = rows.to_pylist()
    # The ETag depends on the content of the photo, because another index may later be
    # served at this address, with other photos under the same row ids.
    etag = f'"{row["content_hash"]}"'
    headers = {"Cache-Control": "private, no-cache", "ETag": etag}
    is_kept = etag in request.headers.get("If-None-Match", "")
    return None if is_kept else row, headers


@router.get(
    "/thumbnails/{row_id}",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}}}},
)
async def thumbnail(
    state: State,
    request: Request,
    row_id: PathRowId,
    side: int = Query(256, ge=16, le=2048),
) -> Response:
    """Return a JPEG of the image of a row, whose longer side has at most `side` pixels.
    Return status 404 if the image cannot be read.
    """
    row, headers = await _photo_row(state, request, row_id)
    if row is None:
        return Response(status_code=304, headers=headers)
    result = await state.files.run(thumbnail_of, row_id, row, side)
    if result.jpeg is None:
        raise HTTPException(404, f"row {row_id} has no thumbnail: {result.problem}")
    return Response(result.jpeg, media_type="image/jpeg", headers=headers)


@router.get(
    "/photos/{row_id}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def photo(state: State, request: Request, row_id: PathRowId) -> Response:
    """Return the image file of a row, with the bytes that were indexed. Return status
    404 if these bytes cannot be read.
    """
    row, headers = await _photo_row(state, request, row_id)
    if row is None:
        return Response(status_code=304, headers=headers)

    async def content() -> AsyncIterator[bytes]:
        async with state.photos:
            data = await state.files.run(read_photo, row)
            yield b""
            for start in range(0, len(data), _PIECE_BYTES):
                yield data[start : start + _PIECE_BYTES]

    pieces = content()
    try:
        # Run `content` up to its first `yield`, which comes after the photo is read. If
        # reading fails, the response has not begun and can still have status 404.
        await anext(pieces)
    except PHOTO_ERRORS as error:
        raise HTTPException(
            404, f"row {row_id} cannot be sent: {describe_photo_error(error)}"
        ) from error
    return StreamingResponse(
        pieces, media_type="application/octet-stream", headers=headers
    )
