"""What all routes of the service share: the state, the base of requests, and checks."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from edje_index.images.decode import ImageError, declared_pixels, decode_rgb
from pipelines.service.batching import Batcher, Timing
from pipelines.service.guard import CODES, Limits, Metrics
from storage_formats.arguments import did_you_mean

if TYPE_CHECKING:
    from PIL import Image

    from edje_index.search.token_index import TokenIndex


# the largest integer that every JSON reader keeps exactly
MAX_ROW_ID = 1 << 53
_Item = TypeVar("_Item")

RowId = Annotated[int, Field(ge=0, lt=MAX_ROW_ID)]
Text = Annotated[str, Field(min_length=1, max_length=1 << 24)]
# Validation blocks all other requests, and each error takes a kilobyte of memory.
# Validation therefore ends at the first error, and refuses a list that is far too long.
# The routes check lower limits on the number of items, with better messages.
Items = Annotated[list[_Item], Field(max_length=10_000, fail_fast=True)]


class JsonRequest(BaseModel):
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
        self._new_pool = partial(ThreadPoolExecutor, count, name)
        self._pool = self._new_pool()

    async def run(self, function: Callable[..., _Item], *arguments: Any) -> _Item:
        """Call `function` on one of the threads as soon as a thread is free."""
        # The queue of the pool would keep the arguments of a cancelled request, such as
        # images, until a thread is free. A cancelled request leaves this queue at once.
        await self._free.acquire()
        try:
            running = asyncio.get_running_loop().run_in_executor(
                self._pool, function, *arguments
            )
        except RuntimeError:
            # The system allows no further thread. The pool has queued the call
            # nevertheless, and would later start too few threads.
            self._pool = self._new_pool()
            self._free.release()
            raise
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
        filters: the threads that evaluate filters, which may take seconds. A known
            filter takes no time, so it does not wait for another one.
        image_requests: limiter for the number of requests whose images are decoded or
            encoded at the same time. The limit is two, so that the model is free for
            searches most of the time.
        photos: limiter for the number of photos that are sent at the same time, because
            a photo takes up to 64 MB of memory. `files` limits the number of photos
            that are read for requests that have been cancelled.
        decoding: the thread that decodes the images of requests, one after the other,
            because decoding an image takes up to 400 MB of memory.
        problem: why the service cannot follow the index any more; empty if it can.
    """

    index: TokenIndex
    name: str
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    files: Threads = field(default_factory=lambda: Threads(4, "files"))
    filters: Threads = field(default_factory=lambda: Threads(4, "filters"))
    image_requests: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(2)
    )
    photos: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    decoding: Threads = field(default_factory=lambda: Threads(1, "decoding"))
    problem: str = ""

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
            check_count(len(text), self.limits.query_letters, "characters in a text")

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
                values, timing = await self.batcher.submit(
                    part,
                    lambda parts: [run(part) for part in parts],
                    pairs=len(part) * (pairs + _PAIRS_PER_IMAGE),
                )
                results += values
        return results, timing


def check_count(
    count: int,
    limit: int,
    what: str,
) -> None:
    """Raise HTTPException if a request has more than `limit` of `what`, a plural."""
    if count > limit:
        raise HTTPException(
            413, f"send fewer {what}: {count} are over the limit of {limit}"
        )


def image_bytes(text: str) -> bytes:
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


def new_router() -> APIRouter:
    """Return a router whose routes describe the errors of the service."""
    return APIRouter(
        responses={status: {"description": code} for status, code in CODES.items()}
    )


State = Annotated[ServiceState, Depends(_state)]
PathRowId = Annotated[int, Path(ge=0, lt=MAX_ROW_ID)]
