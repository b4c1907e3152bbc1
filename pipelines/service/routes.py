"""The routes of the service."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from anyio import CapacityLimiter, fail_after, to_thread
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse

from edje_index.search.hits import Hit
from edje_index.search.ranks import RankedHit, embedding_order, rank_hits
from pipelines.service import works
from pipelines.service.arrow import ARROW_TYPE, blocks_as_arrow
from pipelines.service.batching import Timing, Work
from pipelines.service.documents import Documents, read_documents, resolve_rows
from pipelines.service.errors import ServiceError, overloaded
from pipelines.service.images import image_bytes
from pipelines.service.indexes import ServedIndex
from pipelines.service.schemas import (
    CohereAnswer,
    CohereRerankRequest,
    CohereResult,
    Document,
    EmbedRequest,
    ErrorAnswer,
    FetchRequest,
    HitAnswer,
    ImageInput,
    SearchAnswer,
    SearchRequest,
    TeiRerankRequest,
    TeiResult,
    TextHitAnswer,
    TextSearchAnswer,
    TextSearchRequest,
    TimingAnswer,
)
from pipelines.service.state import ServiceState

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 408, 413, 421, 422, 429, 503, 504)
}
_MAX_ROW_ID = (1 << 53) - 1
_THUMBNAIL_SECONDS = 3600  # in the browser's cache; the photo of a row does not change

router = APIRouter(responses=_ERRORS)


def _state(request: Request) -> ServiceState:
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


@router.get("/healthz")
async def health() -> dict[str, str]:
    """Return status 200 once the indexes are open."""
    return {"status": "ok"}


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """Return the indexes with their precisions and scores, and the limits on requests."""
    return _state(request).description


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    return Response(_state(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/search")
async def search(request: Request, body: SearchRequest) -> SearchAnswer:
    """Search by text, or search for images that are similar to an image or to a row."""
    state = _state(request)
    served = state.indexes.get(body.index)
    index = await _in_thread(state, served.at, body.precision)
    if body.where is not None:  # the rows are read before the model is busy with the request
        until = time.monotonic() + state.limits.deadline_seconds
        await _in_thread(state, index.filters.passing, body.where, until)
    hits, timing = await state.batcher.submit(_search_work(state, index, body))
    ranked: list[RankedHit] | None = None
    if body.query is not None and body.rerank and body.embedding_order:
        ranked = rank_hits(hits)
    weights = index.model.weights("t2i", body.score or "bundle").by_part()
    return SearchAnswer(
        index=served.name,
        precision=index.precision,
        hits=[_ranked(hit) for hit in ranked[: body.k]] if ranked else _plain(hits),
        by_embedding=[_ranked(hit) for hit in embedding_order(ranked)[: body.k]] if ranked else None,
        weights={part: weight for part, weight in weights.items() if weight},
        timing=_timing(timing, hits.stages),
    )


def _search_work(state: ServiceState, index: Any, body: SearchRequest) -> Work:
    if body.row_id is not None:
        return works.search_row(index, body.row_id, body.k, body.where)
    if body.image is not None:
        how = works.ImageOptions(body.k, state.limits.image_pixels, body.where)
        return works.search_image(index, image_bytes(body.image), how)
    assert body.query is not None
    _check_query(state, body.query)
    _check_pool(state, body.pool)
    wanted = body.pool if body.embedding_order and body.rerank else body.k
    options = works.ScoreOptions(body.pool, body.rerank, body.score, body.where, body.joint_pool)
    return works.search_text(index, body.query, wanted, options)


@router.post("/search/texts")
async def search_texts(request: Request, body: TextSearchRequest) -> TextSearchAnswer:
    """Search for the texts that describe an image, or the image of a row, best."""
    state = _state(request)
    if len(body.texts) > state.limits.documents:
        raise ServiceError(413, f"send fewer texts: {len(body.texts)} are over the limit of {state.limits.documents}")
    for text in body.texts:
        _check_query(state, text)
    _check_pool(state, body.pool)
    served = state.indexes.get(body.index)
    index = await _in_thread(state, served.at, body.precision)
    image = body.row_id if body.image is None else image_bytes(body.image)
    assert image is not None
    options = works.TextOptions(body.k, body.pool, body.score, state.limits.image_pixels)
    hits, _ = await state.batcher.submit(works.search_texts(index, image, body.texts, options))
    weights = index.model.weights("i2t", body.score or "bundle").by_part()
    return TextSearchAnswer(
        index=served.name,
        precision=index.precision,
        hits=[TextHitAnswer(**asdict(hit)) for hit in hits],
        weights={part: weight for part, weight in weights.items() if weight},
    )


@router.post("/rerank", response_model=list[TeiResult] | CohereAnswer, response_model_exclude_none=True)
@router.post("/v1/rerank", response_model=list[TeiResult] | CohereAnswer, response_model_exclude_none=True)
@router.post("/v2/rerank", response_model=list[TeiResult] | CohereAnswer, response_model_exclude_none=True)
async def rerank(request: Request, body: TeiRerankRequest | CohereRerankRequest) -> list[TeiResult] | CohereAnswer:
    """Score documents for a query, best first.

    Requests and responses have the format of text-embeddings-inference, or the common format of Cohere, Jina and vLLM.
    A document is an image, or the row id or uri of a row of the index. Scores are final scores of the bundle. Scores
    can only be compared within one query, and are not limited to the range from 0 to 1.
    """
    state = _state(request)
    if isinstance(body, TeiRerankRequest):
        scores = await _rerank(state, state.indexes.default, body.query, body.texts)
        texts = [text if isinstance(text, str) else None for text in body.texts]
        return [
            TeiResult(index=position, score=score, text=texts[position] if body.return_text else None)
            for position, score in scores
        ]
    served = state.indexes.named_or_default(body.model)
    scores = await _rerank(state, served, body.query, body.documents)
    return CohereAnswer(
        id=str(uuid.uuid4()),
        model=served.name,
        results=[
            CohereResult(
                index=position,
                relevance_score=score,
                document={"text": body.documents[position]}
                if body.return_documents and isinstance(body.documents[position], str)
                else None,
            )
            for position, score in scores[: body.top_n]
        ],
    )


async def _rerank(
    state: ServiceState, served: ServedIndex, query: str, documents: list[Document]
) -> list[tuple[int, float]]:
    """Return (position, score) of each document, best first."""
    _check_query(state, query)
    index = served.at(None)
    parsed: Documents = await _in_thread(state, read_documents, documents, state.limits)
    scores: dict[int, float] = {}
    if parsed.rows:
        row_ids = await _in_thread(state, resolve_rows, index.committed, parsed)
        hits, _ = await state.batcher.submit(works.rerank_rows(index, query, sorted(set(row_ids.values()))))
        of_row = {hit.row_id: hit.score for hit in hits}
        scores |= {position: of_row[row_id] for position, row_id in row_ids.items()}
    if parsed.images:
        images = list(parsed.images.values())
        work = works.score_images(index, query, images, state.limits.image_pixels)
        values, _ = await state.batcher.submit(work)
        scores |= dict(zip(parsed.images, values, strict=True))
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> list[list[float]]:
    """Return embeddings of unit length, one per text or image."""
    state = _state(request)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    texts = [value for value in inputs if isinstance(value, str)]
    images = [image_bytes(value.image) for value in inputs if isinstance(value, ImageInput)]
    if len(inputs) > state.limits.documents or len(images) > state.limits.images:
        raise ServiceError(
            413,
            f"{len(inputs)} inputs: send at most {state.limits.documents} texts or {state.limits.images} images",
        )
    if texts and images:
        raise ServiceError(422, "a request cannot mix texts and images; send either texts or images")
    for text in texts:
        _check_query(state, text)
    if not inputs:
        return []
    index = state.indexes.get(body.index).at(None)
    work = works.embed_texts(index, texts)
    if images:
        work = works.embed_images(index, images, state.limits.image_pixels)
    embeddings, _ = await state.batcher.submit(work)
    assert isinstance(embeddings, list)
    return embeddings


@router.post("/fetch", response_class=Response, responses={200: {"content": {ARROW_TYPE: {}}}})
async def fetch(request: Request, body: FetchRequest) -> Response:
    """Return token blocks as an Arrow stream with the columns `row_id` and `block`.

    A block is the values [m, d] as little-endian bfloat16. The block of a hole is null.
    """
    state = _state(request)
    if len(body.row_ids) > state.limits.blocks:
        raise ServiceError(
            413, f"{len(body.row_ids)} blocks are over the limit of {state.limits.blocks}; send fewer row ids"
        )
    served = state.indexes.get(body.index)
    index = await _in_thread(state, served.at, body.precision)
    return Response(await _in_thread(state, blocks_as_arrow, index, body.row_ids), media_type=ARROW_TYPE)


@router.get("/thumbnails/{row_id}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
async def thumbnail(
    request: Request,
    row_id: int = Path(ge=0, le=_MAX_ROW_ID),
    index: str | None = Query(None, min_length=1, max_length=255),
) -> Response:
    """Return a small JPEG of the image of a row, or status 404 with the reason if there is no image."""
    state = _state(request)
    row_thumbnail = await _in_thread(state, state.indexes.get(index).thumbnail, row_id)
    if row_thumbnail.jpeg is None:
        raise ServiceError(404, f"row {row_id} has no thumbnail: {row_thumbnail.problem}")
    caching = {"Cache-Control": f"private, max-age={_THUMBNAIL_SECONDS}"}
    return Response(row_thumbnail.jpeg, media_type="image/jpeg", headers=caching)


def _check_query(state: ServiceState, text: str) -> None:
    if not text.strip():
        raise ServiceError(422, "the query is empty; send a text")
    if len(text) > state.limits.query_letters:
        raise ServiceError(
            413,
            f"a text has {len(text)} characters, over the limit of {state.limits.query_letters}; send a shorter text",
        )


def _check_pool(state: ServiceState, pool: int) -> None:
    if pool > state.limits.pool:
        raise ServiceError(422, f"pool {pool} is over the limit of {state.limits.pool}; set a smaller pool")


async def _in_thread(state: ServiceState, function: Any, *arguments: Any) -> Any:
    """Call `function`, which reads files, on another thread. The number of threads is limited."""
    limiter: CapacityLimiter = state.file_threads
    if limiter.statistics().tasks_waiting >= state.limits.waiting:
        raise overloaded("too many requests are reading files; try again later", 1)
    try:
        with fail_after(state.limits.deadline_seconds):
            return await to_thread.run_sync(function, *arguments, limiter=limiter)
    except TimeoutError:
        raise ServiceError(504, "no thread was free before the deadline; try again later") from None


def _plain(hits: list[Hit]) -> list[HitAnswer]:
    return [_answer(hit, rank, None) for rank, hit in enumerate(hits, 1)]


def _ranked(ranked: RankedHit) -> HitAnswer:
    return _answer(ranked.hit, ranked.rank, ranked.embedding_rank)


def _answer(hit: Hit, rank: int, embedding_rank: int | None) -> HitAnswer:
    return HitAnswer(
        row_id=hit.row_id,
        uri=hit.uri,
        score=hit.score,
        embedding_score=hit.embedding_score,
        joint_score=hit.joint_score,
        parts=dict(hit.parts),
        rank=rank,
        embedding_rank=embedding_rank,
    )


def _timing(timing: Timing, stages: Mapping[str, float]) -> TimingAnswer:
    return TimingAnswer(
        waited_ms=1000 * timing.waited,
        computed_ms=1000 * timing.computed,
        batch=timing.batch,
        stages_ms={stage: 1000 * seconds for stage, seconds in stages.items()},
    )
