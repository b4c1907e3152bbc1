"""Opens the served indexes again when they change."""

from __future__ import annotations

import asyncio
import logging

from anyio import to_thread

from pipelines.service.indexes import ServedIndex
from pipelines.service.state import ServiceState
from storage_formats.errors import EdjeError

logger = logging.getLogger("edje_index.service")

WATCH_SECONDS = 2.0
"""Seconds between two reads of the manifest of each index."""


async def follow_changes(state: ServiceState) -> None:
    """Check the indexes regularly, and open each changed index again. Runs until the task is cancelled."""
    reported: dict[str, str] = {}
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for index in state.indexes:
            problem = await to_thread.run_sync(_refresh, index, limiter=state.file_threads)
            if problem and reported.get(index.name) != problem:
                logger.warning("the service keeps using the earlier snapshot of %s: %s", index.name, problem)
            reported[index.name] = problem


def _refresh(index: ServedIndex) -> str:
    """Open the index again if it has changed. Return the error message, or an empty text on success."""
    try:
        index.refresh()
    except (EdjeError, OSError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""
