"""Picks up changes of the indexes: appended and deleted rows, new precisions, rollbacks."""

from __future__ import annotations

import asyncio
import logging

from anyio import to_thread

from pipelines.service.indexes import ServedIndex
from pipelines.service.state import ServiceState
from storage_formats.errors import EdjeError

logger = logging.getLogger("edje_index.service")

WATCH_SECONDS = 2.0
"""Time between two looks at the manifest of each index."""


async def follow_changes(state: ServiceState) -> None:
    """Open each index again whenever a change of it has been committed, until cancelled."""
    reported: dict[str, str] = {}
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for index in state.indexes:
            problem = await to_thread.run_sync(_refresh, index, limiter=state.file_threads)
            if problem and reported.get(index.name) != problem:
                logger.warning("the service stays at the earlier state of %s: %s", index.name, problem)
            reported[index.name] = problem


def _refresh(index: ServedIndex) -> str:
    """Why the index cannot be opened again; empty if it can, or has not changed."""
    try:
        index.refresh()
    except (EdjeError, OSError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
