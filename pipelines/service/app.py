"""Makes the ASGI application of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.types import ASGIApp

from edje_index import __version__
from pipelines.service.batching import Batcher
from pipelines.service.errors import add_error_handlers
from pipelines.service.guard import Guard
from pipelines.service.indexes import ServedIndexes
from pipelines.service.metrics import Metrics
from pipelines.service.routes import router
from pipelines.service.settings import ServiceSettings
from pipelines.service.snapshots import follow_changes
from pipelines.service.state import ServiceState

_STATIC = Path(__file__).parent / "static"
_FILES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css", "/favicon.svg": "favicon.svg"}


def create_app(indexes: ServedIndexes, settings: ServiceSettings) -> ASGIApp:
    """Return the service as an ASGI application.

    Args:
        indexes: the open indexes.
        settings: limits, API keys and accepted host names.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher = Batcher(settings.limits, metrics.count_batch)
        metrics.watch_queue(lambda: batcher.waiting)
        app.state.service = ServiceState(indexes, settings.limits, metrics, batcher)
        await batcher.start()
        watch = asyncio.create_task(follow_changes(app.state.service))
        yield
        watch.cancel()
        await batcher.stop()

    # The documentation pages of FastAPI load scripts from a CDN, so they are off; /openapi.json describes the routes.
    app = FastAPI(title="edje-index", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(router)
    for path, name in _FILES.items():
        _add_file(app, path, name)
    add_error_handlers(app)
    return Guard(app, settings, metrics)


def _add_file(app: FastAPI, path: str, name: str) -> None:
    async def file() -> FileResponse:
        return FileResponse(_STATIC / name)

    app.get(path, include_in_schema=False)(file)
