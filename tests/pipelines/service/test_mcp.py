"""`edje-index serve --mcp`, asked by the client of the official SDK."""

import asyncio
import base64
import io
import math
import shutil

import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from PIL import Image

from edje_index import TokenIndex, delete_rows
from tests.command_line import command, environment
from tests.pipelines.service.conftest import HOLE, ROWS

SEARCHES = (
    ("search_by_text", {"query": "a red canoe", "k": 3}),
    ("search_by_image", {"row_id": 3, "k": 2, "where": "row_id < 8"}),
    ("describe_row", {"row_id": 3}),
    ("show_thumbnail", {"row_id": 3, "side": 32}),
)
REFUSALS = (
    ("search_by_text", {"query": " "}),
    ("search_by_text", {"query": "a dog", "where": "colour = 'red'"}),
    ("search_by_text", {"query": "a dog", "k": 0}),
    ("search_by_text", {"query": "a dog", "limit": 3}),
    ("describe_row", {"row_id": ROWS}),
    ("show_thumbnail", {"row_id": HOLE}),
)
ALL_ROWS = ("search_by_text", {"query": "a red canoe", "k": ROWS})


@pytest.fixture(scope="module")
def conversation(index, tmp_path_factory):
    """What one server answers: the schemas of its tools, and the results of `SEARCHES`,
    of `REFUSALS`, and of `ALL_ROWS` before and after the first hit is deleted.
    """
    copy = tmp_path_factory.mktemp("mcp") / "photos.edje"
    shutil.copytree(index, copy)
    program, *arguments = command("serve", copy, "--mcp")
    server = StdioServerParameters(command=program, args=arguments, env=environment())

    async def converse():
        async with Client(stdio_client(server)) as client:
            schemas = [tool.input_schema for tool in (await client.list_tools()).tools]
            searches = [await client.call_tool(*call) for call in SEARCHES]
            refusals = [await client.call_tool(*call) for call in REFUSALS]
            before = await client.call_tool(*ALL_ROWS)
            best = before.structured_content["result"][0]["row_id"]
            delete_rows(copy, rows=[best])
            after = await client.call_tool(*ALL_ROWS)
            return schemas, searches, refusals, best, after

    return asyncio.run(converse())


def test_an_assistant_searches_like_the_library(index, conversation):
    by_text, by_image, row, photo = conversation[1]
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


def test_an_assistant_gets_the_message_of_a_refusal_and_knows_all_arguments(
    conversation,
):
    schemas, _, results, *_ = conversation
    assert [schema["additionalProperties"] for schema in schemas] == [False] * 4
    for (name, given), result in zip(REFUSALS, results, strict=True):
        text = result.content[0].text
        assert result.is_error, (name, given)
        assert len(text) > 20, text
        assert "Traceback" not in text
        assert ("limit\n" in text) == ("limit" in given), "an unknown argument"


def test_an_assistant_sees_the_current_snapshot(conversation):
    best, after = conversation[-2:]
    later = [hit["row_id"] for hit in after.structured_content["result"]]
    assert len(later) == ROWS - 2
    assert best not in later
