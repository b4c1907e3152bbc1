"""`edje-index serve --mcp`, asked by the client of the official SDK."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import shutil
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from PIL import Image

from edje_index import TokenIndex, delete_rows
from tests.command_line import command, environment
from tests.pipelines.service.conftest import HOLE, ROWS


def connect(index) -> Client:
    """Return a client that starts the command and ends it."""
    program, *arguments = command("serve", index, "--mcp")
    parameters = StdioServerParameters(
        command=program, args=[str(each) for each in arguments], env=environment()
    )
    return Client(stdio_client(parameters))


def ask(index, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Call the tools of one server in turn, and return the results."""

    async def converse() -> list[Any]:
        async with connect(index) as client:
            return [await client.call_tool(name, given) for name, given in calls]

    return asyncio.run(converse())


def test_an_assistant_searches_like_the_library(index):
    by_text, by_image, row, photo = ask(
        index,
        ("search_by_text", {"query": "a red canoe", "k": 3}),
        ("search_by_image", {"row_id": 3, "k": 2, "where": "row_id < 8"}),
        ("describe_row", {"row_id": 3}),
        ("show_thumbnail", {"row_id": 3, "side": 32}),
    )
    library = TokenIndex.open(index)
    expected = library.search("a red canoe", k=3)
    hits = by_text.structured_content["result"]
    assert [hit["row_id"] for hit in hits] == [hit.row_id for hit in expected]
    assert all(
        math.isclose(hit["score"], other.score, abs_tol=1e-4)
        for hit, other in zip(hits, expected, strict=True)
    )
    similar = library.search_image(3, k=2, where="row_id < 8")
    assert [hit["row_id"] for hit in by_image.structured_content["result"]] == [
        hit.row_id for hit in similar
    ]
    assert row.structured_content["captions"] == ["a red canoe", "<b>two</b> dogs"]
    with Image.open(io.BytesIO(base64.b64decode(photo.content[0].data))) as image:
        assert (image.format, max(image.size)) == ("JPEG", 32)


def test_an_assistant_gets_the_message_of_a_refusal_and_knows_all_arguments(index):
    calls = (
        ("search_by_text", {"query": " "}),
        ("search_by_text", {"query": "a dog", "where": "colour = 'red'"}),
        ("search_by_text", {"query": "a dog", "k": 0}),
        ("search_by_text", {"query": "a dog", "limit": 3}),
        ("describe_row", {"row_id": ROWS}),
        ("show_thumbnail", {"row_id": HOLE}),
    )

    async def converse() -> tuple[list[Any], list[Any]]:
        async with connect(index) as client:
            schemas = [tool.input_schema for tool in (await client.list_tools()).tools]
            return schemas, [
                await client.call_tool(name, given) for name, given in calls
            ]

    schemas, results = asyncio.run(converse())
    assert [schema["additionalProperties"] for schema in schemas] == [False] * 4
    for (name, given), result in zip(calls, results, strict=True):
        text = result.content[0].text
        assert result.is_error, (name, given)
        assert len(text) > 20, text
        assert "Traceback" not in text
        assert ("limit\n" in text) == ("limit" in given), "an unknown argument"


def test_an_assistant_sees_the_current_snapshot(index, tmp_path):
    copy = tmp_path / "photos.edje"
    shutil.copytree(index, copy)

    async def converse() -> tuple[int, list[int]]:
        async with connect(copy) as client:
            query = {"query": "a red canoe", "k": ROWS}
            first = (await client.call_tool("search_by_text", query)).structured_content
            best = first["result"][0]["row_id"]
            delete_rows(copy, rows=[best])
            later = (await client.call_tool("search_by_text", query)).structured_content
            return best, [hit["row_id"] for hit in later["result"]]

    best, later = asyncio.run(converse())
    assert len(later) == ROWS - 2
    assert best not in later
