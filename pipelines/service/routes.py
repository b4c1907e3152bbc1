"""The routes of the service: searches and the images of rows, and the schemas of their
requests.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException

from edje_index import __version__
from edje_index.inputs.thumbnails import (
    PHOTO_COLUMNS,
    PHOTO_ERRORS,
    describe_photo_error,
    read_photo,
    thumbnail_of,
)
from edje_index.scoring.weights import EMBEDDING, IMAGE_TO_TEXT, TEXT_TO_IMAGE
from edje_index.search.hits import rank_hits, table_bytes
from pipelines.service.state import (
    Items,
    JsonRequest,
    PathRowId,
    RowId,
    ServiceState,
    State,
    Text,
    check_count,
    image_bytes,
    new_router,
)
from storage_formats.atomic import Json
from storage_formats.errors import RowIdError
from storage_formats.format.rows import read_index_rows, type_name
from storage_formats.format.source_columns import MAX_COLUMNS

router = new_router()
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=1, le=1000)]


class _Search(JsonRequest):
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
    format: Literal["json", "csv", "parquet"] = "json"
    """csv and parquet return the hits as a table for spreadsheets, not as JSON."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.skip and self.query is not None and self.score != "embedding":
            raise ValueError("skip with a query needs the score embedding")
        if self.min_relevance and self.query is None:
            raise ValueError("min_relevance needs a query: images have no relevance")
        return self


class TextSearchRequest(_Search):
    """A search for the texts that describe an image best. Exactly one of `image`
    and `row_id` is set.
    """

    texts: Items[Text] = Field(min_length=1)
    """The texts to choose from."""


_TABLE_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}


@router.get("/healthz")
async def health(state: State) -> dict[str, str]:
    """Return status 200 once the index is open, and 503 if another index has replaced
    it, so that the service must be started again.
    """
    if state.problem:
        raise HTTPException(503, state.problem)
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
        "weights": weights.by_part(),
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
async def search(state: State, body: SearchRequest) -> Any:
    """Search by text, by an image or the image of a row, or by text and image."""
    index = await state.opened(body.precision)
    where = body.where
    weights = index.model.weights(TEXT_TO_IMAGE, body.score or "bundle")
    is_reranked = weights.parts != (EMBEDDING,)
    # A thread for filters evaluates the filter now, and the result is cached. So the
    # thread of the model need not read rows, and photos and other files do not wait.
    if where is not None:
        await state.filters.run(
            index.rows.passing, where, time.monotonic() + state.limits.deadline_seconds
        )
    candidates = body.pool or max(body.k, index.default_pool)
    k = body.skip + (candidates if body.embedding_order else body.k)
    pool = body.skip + candidates
    pairs = pool if is_reranked and body.query is not None else 1
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
            index, [image_bytes(body.image)], search_images, pairs
        )
    elif body.row_id is not None:
        hits, timing = await state.batcher.submit(
            body.row_id, search_images, pairs=pairs
        )
    else:
        kind = ("search", index.store, pool, *options.values())
        hits, timing = await state.batcher.submit(
            (body.query, k), search_texts, pairs=pairs, kind=kind
        )
    del hits[: body.skip]
    if body.columns is not None:
        row_ids = np.array([hit.row_id for hit in hits], dtype=np.int64)
        described = await state.files.run(index.rows.described, row_ids, body.columns)
        hits[:] = [
            replace(hit, columns=columns)
            for hit, (_, columns) in zip(hits, described, strict=True)
        ]
    if body.format != "json":
        table = hits.at_least(body.min_relevance).first(body.k).to_arrow()
        data = await state.files.run(table_bytes, table, f".{body.format}")
        return Response(data, media_type=_TABLE_TYPES[body.format])
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
        "damaged_rows": hits.damaged,
        "weights": weights.by_part(),
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
    check_count(len(texts), state.limits.documents, "texts")
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
        hits, _ = await state.batcher.submit(body.row_id, run, pairs=pairs)
    else:
        (hits,), _ = await state.on_images(index, [image_bytes(body.image)], run, pairs)
    weights = index.model.weights(IMAGE_TO_TEXT, body.score or "bundle")
    return {
        "precision": index.precision,
        "hits": [vars(hit) for hit in hits],
        "weights": weights.by_part(),
    }


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


async def _turn(state: State) -> AsyncIterator[None]:
    """Wait until few enough photos are sent. FastAPI resumes this generator when the
    response has been sent.
    """
    async with state.photos:
        yield


@router.get(
    "/photos/{row_id}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
    dependencies=[Depends(_turn)],
)
async def photo(state: State, request: Request, row_id: PathRowId) -> Response:
    """Return the image file of a row, with the bytes that were indexed. Return status
    404 if these bytes cannot be read.
    """
    row, headers = await _photo_row(state, request, row_id)
    if row is None:
        return Response(status_code=304, headers=headers)

    try:
        data = await state.files.run(read_photo, row)
    except PHOTO_ERRORS as error:
        raise HTTPException(
            404, f"row {row_id} cannot be sent: {describe_photo_error(error)}"
        ) from error
    return Response(data, media_type="application/octet-stream", headers=headers)
