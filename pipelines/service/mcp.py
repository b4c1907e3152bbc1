"""A server of the Model Context Protocol, through which assistants search an index.

The tools read the index and the photos of its rows, and change nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool

from edje_index import __version__
from edje_index.inputs.thumbnails import read_thumbnails
from edje_index.search.token_index import TokenIndex
from storage_formats.atomic import Json
from storage_formats.errors import EdjeError
from storage_formats.format.rows import read_index_rows

_MAX_HITS = 100
_INSTRUCTIONS = (
    "Search photos by a description or by a photo of the index. A hit has a row id,"
    " with which the other tools describe the photo or show a thumbnail of it."
)


def mcp_server(index: TokenIndex) -> MCPServer[Any]:
    """Return a server whose tools search `index`. After a change of the index, they
    search its current snapshot.
    """
    # The lock lets only one tool run at a time. A single search uses all processors, so
    # parallel searches would gain nothing.
    turn = threading.Lock()

    @contextlib.contextmanager
    def opened() -> Iterator[TokenIndex]:
        nonlocal index
        try:
            with turn:
                index = index.at_current_snapshot()
                yield index
        except (EdjeError, OSError, MemoryError) as error:
            # The assistant gets the message, which says what to do.
            raise ToolError(str(error) or type(error).__name__) from error

    def search_by_text(
        query: str,
        k: int = 10,
        where: str | None = None,
    ) -> list[Json]:
        """Return the k photos that match a description best, best first.

        Args:
            query: what the photo shows, for example "a red canoe on a lake".
            k: number of hits, at most 100.
            where: filter on columns, for example "width > 800 and licence = 'cc0'".
        """
        with opened() as current:
            hits = current.search(query, k=min(k, _MAX_HITS), where=where)
            return [hit.metadata() for hit in hits]

    def search_by_image(
        row_id: int,
        k: int = 10,
        where: str | None = None,
    ) -> list[Json]:
        """Return the k other photos that resemble the photo of a row, best first."""
        with opened() as current:
            hits = current.search_image(row_id, k=min(k, _MAX_HITS), where=where)
            return [hit.metadata() for hit in hits]

    def describe_row(row_id: int) -> Json:
        """Return all that the index knows of a row: path, size, captions and others."""
        with opened() as current:
            row = read_index_rows(current.committed, [row_id]).to_pylist()[0]
            return {
                name: value
                for name, value in row.items()
                if value is not None and not isinstance(value, bytes)
            }

    def show_thumbnail(row_id: int, side: int = 256) -> Image:
        """Return the photo of a row as a JPEG whose longer side has `side` pixels, at
        least 16 and at most 1,024.
        """
        with opened() as current:
            side = min(max(side, 16), 1024)
            thumbnail = read_thumbnails(current.committed, [row_id], side)[0]
            if thumbnail.jpeg is None:
                raise ToolError(f"row {row_id} has no photo: {thumbnail.problem}")
            return Image(data=thumbnail.jpeg, format="jpeg")

    tools = [
        Tool.from_function(function)
        for function in (search_by_text, search_by_image, describe_row, show_thumbnail)
    ]
    for tool in tools:
        # Refuse unknown arguments. If a misspelt filter were ignored, for example, the
        # assistant would get an answer to another request.
        model = tool.fn_metadata.arg_model
        model.model_config["extra"] = "forbid"
        model.model_rebuild(force=True)
        tool.parameters["additionalProperties"] = False
    return MCPServer(
        "edje-index", instructions=_INSTRUCTIONS, version=__version__, tools=tools
    )
