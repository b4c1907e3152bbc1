"""A real service and a real client: every answer is compared with the library's."""

from __future__ import annotations

import base64
import csv
import io
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from edje_index import Client, ServiceError, TokenIndex
from edje_index.inputs.thumbnails import read_thumbnails
from storage_formats import UsageError
from storage_formats.reading.embeddings import read_embeddings
from tests.pipelines.service.conftest import HOLE, ROWS
from tests.pipelines.service.server import resident_bytes

# the tiny model's scores of two photos differ by some 4e-5
_CLOSE = 5e-6


@pytest.fixture(scope="module")
def library(index):
    return TokenIndex.open(index)


@pytest.fixture
def client(service):
    with Client(service.url) as client:
        yield client


def photo(index, row: int) -> bytes:
    return (index.parent / "photos" / f"{row:02d}.jpg").read_bytes()


def same_hits(left, right) -> bool:
    """Whether the rows are the same and the scores agree to float32 rounding."""
    return [hit.row_id for hit in left] == [
        hit.row_id for hit in right
    ] and np.allclose(
        [[hit.score, hit.embedding_score] for hit in left],
        [[hit.score, hit.embedding_score] for hit in right],
        atol=_CLOSE,
    )


def test_search_gives_the_hits_of_the_library(client, library):
    hits = client.search("a red canoe", k=4, pool=8)
    expected = library.search("a red canoe", 4, 8)
    assert same_hits(hits, expected)
    assert [asdict(hit).keys() for hit in hits] == [
        asdict(hit).keys() for hit in expected
    ]
    assert [hit.uri for hit in hits] == [hit.uri for hit in expected]
    assert same_hits(
        client.search("a red canoe", score="embedding"),
        library.search("a red canoe", score="embedding"),
    )
    rough = library.with_precision("nvfp4").search("a red canoe", 5)
    assert same_hits(client.search("a red canoe", 5, precision="nvfp4"), rough)
    assert not same_hits(client.search("a red canoe", 5), rough)


def test_search_by_image_and_by_row(client, library, index, http):
    assert same_hits(
        client.search(photo(index, 7), k=3), library.search_image(photo(index, 7), 3)
    )
    answer = http.post("/search", json={"row_id": 7, "k": 3, "skip": 2}).json()
    assert [hit["row_id"] for hit in answer["hits"]] == [
        hit.row_id for hit in library.search_image(7, 5)
    ][2:]
    assert [hit["rank"] for hit in answer["hits"]] == [3, 4, 5]
    assert {hit["relevance"] for hit in answer["hits"]} == {None}
    refused = http.post("/search", json={"row_id": 7, "min_relevance": 0.5})
    assert refused.status_code == 422
    assert "min_relevance needs a query" in refused.text
    both = library.search("a dog", 4, image=7)
    expected = (
        library.model.text.encode(["a dog"])[0]
        + read_embeddings(library.committed, [7])[0]
    )
    cosines = (
        read_embeddings(library.committed, [hit.row_id for hit in both])
        @ expected
        / np.linalg.norm(expected)
    )
    np.testing.assert_allclose(
        [hit.embedding_score for hit in both], cosines, atol=_CLOSE
    )
    answer = http.post("/search", json={"query": "a dog", "row_id": 7, "k": 4}).json()
    assert [hit["row_id"] for hit in answer["hits"]] == [hit.row_id for hit in both]


TEXTS = ["a red canoe", "two dogs", "snow", "a man on a bicycle", "a red canoe"]


def test_texts_for_an_image_and_for_a_row(client, library, index, http):
    for image in (7, photo(index, 7)):
        expected = library.with_precision("nvfp4").search_texts(
            image, TEXTS, k=2, pool=2
        )
        hits = client.search_texts(image, TEXTS, k=2, pool=2, precision="nvfp4")
        assert [(hit.position, hit.text) for hit in hits] == [
            (hit.position, hit.text) for hit in expected
        ]
        assert np.allclose(
            [hit.score for hit in hits], [hit.score for hit in expected], atol=_CLOSE
        )
    answer = http.post(
        "/search/texts", json={"row_id": 7, "texts": TEXTS, "score": "embedding"}
    ).json()
    expected = library.search_texts(7, TEXTS, score="embedding")
    assert [hit["position"] for hit in answer["hits"]] == [
        hit.position for hit in expected
    ]
    assert answer["weights"] == {"embedding": 1.0}


def test_a_search_with_a_filter(client, library, http):
    where = "row_id > 3 and uri like '%.jpg'"
    assert same_hits(
        client.search("a dog", 4, where=where), library.search("a dog", 4, where=where)
    )
    by_row = http.post(
        "/search", json={"row_id": 7, "k": 20, "pool": 20, "where": where}
    ).json()["hits"]
    assert {hit["row_id"] for hit in by_row} == {4, 6, 8, 9, 10, 11}
    assert (
        http.post("/search", json={"query": "a dog", "where": "width > 9999"}).json()[
            "hits"
        ]
        == []
    )
    assert http.get("/info").json()["indexes"][0]["columns"]["width"] == "int32"


def test_hits_bring_captions_or_the_chosen_columns(client, library):
    of_row = {3: ["a red canoe", "<b>two</b> dogs"]}
    for hits in (
        client.search("a dog", 11),
        library.search("a dog", 11),
        library.search_image(0, 11),
    ):
        assert [hit.columns for hit in hits] == [
            {"captions": of_row.get(hit.row_id)} for hit in hits
        ]
    (hit,) = client.search("a dog", where="row_id = 3", columns=["author", "width"])
    assert hit.columns == {"author": "Ada", "width": 64}
    with pytest.raises(
        ServiceError, match="the rows have no column x; choose from: author"
    ):
        client.search("a dog", columns=["x"])


def test_hits_as_a_table(http, library):
    body = {"query": "a dog", "k": 11}
    hits = http.post("/search", json=body).json()["hits"]
    table = http.post("/search", json={**body, "format": "csv"})
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = [*csv.DictReader(io.StringIO(table.content.decode("utf-8-sig")))]
    assert [int(row["row_id"]) for row in rows] == [hit["row_id"] for hit in hits]
    assert {row["captions"] for row in rows} == {"", "a red canoe; <b>two</b> dogs"}
    parquet = http.post("/search", json={**body, "format": "parquet"}).content
    expected = library.search("a dog", 11).to_arrow()
    assert pq.read_table(io.BytesIO(parquet)).column_names == expected.column_names
    empty = {**body, "where": "width > 9999", "format": "csv"}
    assert len(http.post("/search", json=empty).text.splitlines()) == 1


def test_search_returns_both_orders(http, library):
    answer = http.post(
        "/search", json={"query": "a dog", "k": 4, "pool": 9, "embedding_order": True}
    ).json()
    before = library.search("a dog", 4, score="embedding")
    assert [hit["row_id"] for hit in answer["by_embedding"]] == [
        hit.row_id for hit in before
    ]
    assert [hit["embedding_rank"] for hit in answer["by_embedding"]] == [1, 2, 3, 4]
    assert [hit["row_id"] for hit in answer["hits"]] == [
        hit.row_id for hit in library.search("a dog", 4, 9)
    ]
    assert [hit["rank"] for hit in answer["hits"]] == [1, 2, 3, 4]
    few = http.post(
        "/search",
        json={
            "query": "a dog",
            "k": 9,
            "pool": 9,
            "embedding_order": True,
            "min_relevance": answer["hits"][1]["relevance"],
        },
    ).json()
    ranks = [
        [(hit["row_id"], hit["rank"], hit["embedding_rank"]) for hit in hits]
        for hits in (answer["hits"][:2], few["hits"], few["by_embedding"])
    ]
    assert ranks[1] == ranks[0], "hits that are left out have ranks"
    assert ranks[2] == sorted(ranks[0], key=lambda hit: hit[2])
    assert answer["weights"] == {"logit": 1.0}
    stages = answer["timing"]["stages_ms"]
    assert list(stages) == [
        "text_tower",
        "nearest",
        "fetch",
        "joint_encoder",
        "hits",
        "total",
    ]
    assert (
        sum(stages.values()) - stages["total"]
        <= stages["total"]
        <= answer["timing"]["computed_ms"]
    )


def test_a_long_list_of_wrong_items_costs_little(service, http):
    before = resident_bytes(service.process.pid)
    for path, member, item in (
        ("rerank", "texts", None),
        ("rerank", "documents", {}),
        ("embed", "inputs", None),
    ):
        answer = http.post(f"/{path}", json={"query": "a", member: [item] * 300_000})
        assert answer.status_code == 422
        assert len(answer.text) < 2000
    assert resident_bytes(service.process.pid) - before < 150 << 20


def test_the_dialects_of_tei_and_cohere(http, library):
    rows = [3, 0, library.search("x", 1)[0].row_id]
    texts = ["3", "0", library.search("x", 1)[0].uri]
    expected = library.rerank("a dog", rows)
    answer = http.post(
        "/rerank", json={"query": "a dog", "texts": texts, "return_text": True}
    ).json()
    assert [rows[item["index"]] for item in answer] == [hit.row_id for hit in expected]
    assert [item["score"] for item in answer] == pytest.approx(
        [hit.relevance for hit in expected], abs=_CLOSE
    )
    raw = http.post(
        "/rerank", json={"query": "a dog", "texts": texts, "raw_scores": True}
    ).json()
    assert [item["score"] for item in raw] == pytest.approx(
        [hit.score for hit in expected], abs=_CLOSE
    )
    assert [item["text"] for item in answer] == [
        texts[item["index"]] for item in answer
    ]
    body = {
        "model": "any",
        "query": "a dog",
        "documents": texts,
        "top_n": 2,
        "return_documents": True,
    }
    without = http.post("/rerank", json={**body, "return_documents": None}).json()
    assert not any("document" in result for result in without["results"])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = http.post(path, json=body).json()["results"]
        scores = [(result["index"], result["relevance_score"]) for result in results]
        assert scores == [
            (item["index"], pytest.approx(item["score"], abs=_CLOSE))
            for item in answer[:2]
        ]
        assert [result["score"] for result in results] == [
            pytest.approx(hit.score) for hit in expected[:2]
        ]
        assert [result["document"]["text"] for result in results] == [
            item["text"] for item in answer[:2]
        ]


def test_rows_and_images_are_scored_together(client, library, index):
    expected = {hit.row_id: hit.relevance for hit in library.rerank("a dog", [3, 7, 9])}
    scores = dict(
        client.rerank(
            "a dog", [3, photo(index, 7), str(index.parent / "photos" / "09.jpg")]
        )
    )
    assert scores == {
        position: pytest.approx(expected[row], abs=_CLOSE)
        for position, row in enumerate((3, 7, 9))
    }
    assert abs(expected[3] - expected[7]) > _CLOSE


def read_image_tokens(http) -> float:
    text = http.get("/metrics").text
    return float(re.search(r"^edje_image_tokens_total (\S+)$", text, re.MULTILINE)[1])


def test_every_spelling_of_an_image(http, index, library):
    data = base64.b64encode(photo(index, 7)).decode()
    uri = f"data:image/jpeg;base64,{data}"
    documents = [uri, {"image": data}, {"image": uri}, {"text": uri}]
    before = read_image_tokens(http)
    results = http.post(
        "/rerank", json={"query": "a dog", "documents": documents}
    ).json()["results"]
    assert len(results) == len(documents)
    # An image costs as much as 16 pairs, and is in one pair.
    tokens = len(documents) * 17 * library.manifest.spec.block_shape[0]
    assert read_image_tokens(http) - before == tokens
    assert len({round(result["relevance_score"], 3) for result in results}) == 1


def test_embed_texts_and_images(client, library, index, http):
    one, many = (
        http.post("/embed", json={"inputs": inputs}).json()
        for inputs in ("a dog", ["a dog"])
    )
    assert one == many
    assert http.post("/embed", json={"inputs": []}).json() == []
    np.testing.assert_allclose(
        client.embed(["a dog", "b"]),
        library.model.text.encode(["a dog", "b"]),
        atol=1e-5,
    )
    embedding = client.embed([photo(index, 7)])[0]
    assert library.search_image(7, 1)
    np.testing.assert_allclose(
        library.search_image(photo(index, 7), 1)[0].embedding_score,
        embedding @ embedding,
        atol=1e-5,
    )


def test_thumbnails_are_those_of_the_rows(client, index, http):
    assert client.thumbnail(3) == read_thumbnails(index, [3])[0].jpeg
    assert http.get("/thumbnails/3").headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(http.get("/thumbnails/3?side=16").content)).size == (
        16,
        12,
    )
    assert http.get("/photos/3").content == photo(index, 3)
    for path in ("thumbnails", "photos"):
        hole = http.get(f"/{path}/{HOLE}")
        assert hole.status_code == 404
        assert "not-an-image" in hole.json()["error"]["message"]
    for row in (
        "99",
        "-1",
        "1e3",
        "..%2F..%2Fetc%2Fpasswd",
        "%00",
        "3/../../etc/passwd",
        "9" * 400,
    ):
        for path in ("thumbnails", "photos"):
            answer = http.get(f"/{path}/{row}")
            assert answer.status_code in ({404} if row == "99" else {404, 422})
            assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", ["thumbnails", "photos"])
def test_a_browser_keeps_a_photo_and_asks_whether_it_is_the_same(http, path):
    """Another index at the same address has other photos."""
    first = http.get(f"/{path}/3")
    assert first.headers["cache-control"] == "private, no-cache"
    tag = first.headers["etag"]
    for sent in (tag, f"W/{tag}", f'"x", {tag}'):
        same = http.get(f"/{path}/3", headers={"If-None-Match": sent})
        assert (same.status_code, same.content) == (304, b"")
        assert (same.headers["etag"], same.headers["cache-control"]) == (
            tag,
            "private, no-cache",
        )
    other = http.get(f"/{path}/4", headers={"If-None-Match": tag})
    assert (other.status_code, other.headers["etag"] == tag) == (200, False)


def test_info_describes_the_index_and_the_limits(client, library):
    value = client.info()
    (index,) = value["indexes"]
    assert (index["name"], index["rows"], index["indexed"]) == (
        "photos",
        ROWS,
        ROWS - 1,
    )
    assert index["precisions"] == ["bf16", "nvfp4"]
    assert index["bundle_fingerprint"] == library.model.info.fingerprint
    assert value["limits"]["documents"] == 1000


HEADER = {
    "image": (
        "iVBORw0KGgoAAAANSUhEUgAAGJwAABicAQAAAADixwjHAAAS50lEQVR4nO3BMQE"
        "AAADCoPVPbQlPoAAA"
    )
}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "/search",
            {"query": "a", "skip": 1},
            422,
            "skip with a query needs the score embedding",
        ),
        ("/search", {}, 422, "give query or image or row_id"),
        ("/search", {"query": " "}, 422, "the query is empty"),
        *(
            ("/search", {"query": "a", name: value}, 422, f"{name}:")
            for name, value in (
                *(("k", value) for value in (0, 1.5, 3.0, True, "3")),
                *(("row_id", value) for value in (True, -1, "1", 2**70)),
                ("pool", 10**9),
                ("where", "x" * 5000),
                ("min_relevance", True),
                ("min_relevance", "0.2"),
                ("embedding_order", 1),
            )
        ),
        (
            "/search",
            {"query": "a", "k": 20, "pool": 10},
            422,
            "pool must be at least k",
        ),
        ("/search", {"query": "a", "wher": "x"}, 422, "wher (did you mean where?);"),
        ("/search", {"query": "a" * 2001}, 413, "over the limit of 2000"),
        ("/search", {"query": "a", "score": "beauty"}, 422, "unknown part 'beauty'"),
        (
            "/search",
            {"query": "a", "precision": "fp2"},
            422,
            "does not have precision 'fp2'",
        ),
        ("/search", {"row_id": HOLE}, 422, "has no tokens"),
        ("/search", {"image": "file:///etc/passwd"}, 422, "URLs are not fetched"),
        ("/search", {"image": "/etc/passwd"}, 422, "not valid base64"),
        (
            "/search",
            {"image": "bm8gaW1hZ2U="},
            422,
            "cannot read an image: not-an-image",
        ),
        ("/search", {"image": "data:image/png;base64,!"}, 422, "not valid base64"),
        (
            "/search",
            {"query": "a", "where": "licence = 1"},
            422,
            "the columns are author",
        ),
        (
            "/search/texts",
            {"row_id": 7, "image": "AAAA", "texts": ["a"]},
            422,
            "give only one of image and row_id",
        ),
        ("/search/texts", {"row_id": 7, "texts": []}, 422, "texts"),
        (
            "/search/texts",
            {"row_id": 7, "texts": ["a", "  "]},
            422,
            "the query is empty",
        ),
        (
            "/search/texts",
            {"row_id": 7, "texts": ["a"] * 1001},
            413,
            "over the limit of 1000",
        ),
        (
            "/rerank",
            {"query": "a", "documents": [0], "top_n": "1"},
            422,
            "top_n: Input should be a valid integer",
        ),
        ("/rerank", {"query": "a"}, 422, "Field required"),
        # only the errors of the format of the request
        (
            "/rerank",
            {"documents": [0]},
            422,
            "cohere.query: Field required",
        ),
        (
            "/rerank",
            {"query": "a", "texts": ["https://x/y.jpg"]},
            422,
            "URLs are not fetched",
        ),
        ("/rerank", {"query": "a", "texts": ["99"]}, 422, "out of range"),
        (
            "/rerank",
            {"query": "a", "texts": ["no.jpg"]},
            422,
            "no row has the uri 'no.jpg'",
        ),
        (
            "/rerank",
            {"query": "a", "texts": ["0"] * 1001},
            413,
            "send fewer documents: 1001 are over",
        ),
        ("/rerank", {"query": "a", "documents": [{}]}, 422, "document 0 is empty"),
        (
            "/rerank",
            {"query": "a", "documents": [{"image": "http://x"}]},
            422,
            "URLs are not fetched",
        ),
        (
            "/rerank",
            {"query": "a", "documents": [{"image": "AAAA"}] * 17},
            413,
            "send fewer images: 17 are",
        ),
        ("/embed", {"inputs": [3]}, 422, "inputs"),
        ("/embed", {"inputs": ["a", {"image": "AAAA"}]}, 422, "either texts or images"),
        # HEADER is the start of a PNG of 6,300 x 6,300 pixels; pixels are counted
        # before anything is decoded.
        (
            "/embed",
            {"inputs": [HEADER] * 3},
            413,
            "119070000 in all are over the limits",
        ),
        ("/embed", {"inputs": [HEADER] * 2}, 422, "cannot read an image: truncated"),
        ("/embed", {"inputs": ["a"] * 1001}, 413, "send fewer texts: 1001 are"),
    ],
)
def test_invalid_requests_have_one_shape(http, index, path, body, status, message):
    answer = http.post(path, json=body)
    (error,) = answer.json().values()
    assert (answer.status_code, *answer.json(), *sorted(error)) == (
        status,
        "error",
        "code",
        "message",
    ), answer.text
    assert message in error["message"]
    assert error["message"].count("Field required") <= 1
    assert str(index.parent) not in answer.text, "a path of the server"


def test_malformed_bodies_are_refused(http):
    bodies = (
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"query": NaN}',
        b'"a"',
        b"",
        b'{"query": "\\ud800"}',
    )
    for body in (*bodies, b'{"query": "a", "k": ' + b"9" * 5000 + b"}"):
        for path in ("/search", "/rerank", "/embed"):
            answer = http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 422), (path, answer.text)
            assert set(answer.json()) == {"error"}


def test_concurrent_requests_share_batches_and_get_their_own_answers(service, library):
    queries = [f"{number} red canoes" for number in range(12)]
    with Client(service.url) as client, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda query: client.search(query, 3, 9), queries))
        reranked = list(
            pool.map(lambda query: client.rerank(query, [3, 7, 9]), queries)
        )
    for query, hits, pairs in zip(queries, found, reranked, strict=True):
        assert same_hits(hits, library.search(query, 3, 9))
        expected = [hit.row_id for hit in library.rerank(query, [3, 7, 9])]
        assert [[3, 7, 9][position] for position, _ in pairs] == expected
    text = httpx.get(f"{service.url}/metrics").text
    batches, requests = (
        float(re.search(rf"^edje_batch_requests_{name} (\S+)$", text, re.MULTILINE)[1])
        for name in ("count", "sum")
    )
    assert requests >= 24
    assert batches < requests, "no two requests shared a batch"


def test_metrics_cannot_be_flooded_with_labels(http):
    for number in range(3):
        http.get(f"/unknown-{number}")
        http.get(f"/thumbnails/{number}")
        http.request(f"X{number}", "/search")
    text = http.get("/metrics").text
    assert 'route="/thumbnails/{row_id}"' in text
    assert "unknown-" not in text


def test_pages_are_offline_and_cannot_be_embedded(http):
    assert "/docs.js" in http.get("/docs").text
    for path in ("/redoc", "/nothing"):
        assert http.get(path).json()["error"]["code"] == "not_found"
    assert http.delete("/search").json()["error"]["code"] == "method_not_allowed"
    paths = http.get("/openapi.json").json()["paths"]
    assert {
        "/search",
        "/rerank",
        "/embed",
        "/thumbnails/{row_id}",
        "/healthz",
        "/info",
        "/metrics",
    } <= set(paths)
    headers = http.get("/").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_other_sites_get_no_access(http):
    answer = http.get("/info", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (
        http.options("/search", headers={"Origin": "https://evil.example"}).status_code
        == 405
    )
    plain = http.post(
        "/search", content=b'{"query": "a"}', headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 415, "a form of another site can send no search"


def test_a_name_that_resolves_to_loopback_is_not_answered(http):
    for host in (
        "evil.example",
        "127.0.0.1.evil.example:80",
        "[",
        "localhost#x",
        "user@localhost",
    ):
        assert http.get("/info", headers={"Host": host}).status_code == 400
    for host in ("localhost:1", "LOCALHOST", "[::1]:9", "127.0.0.1"):
        assert http.get("/info", headers={"Host": host}).status_code == 200


def test_the_client_reports_what_the_service_says(client, monkeypatch):
    with pytest.raises(ServiceError, match="does not have precision") as caught:
        client.search("a", precision="fp2")
    assert caught.value.status == 422
    for wrong in (object(), "a \ud800 dog", float("nan")):
        with pytest.raises(UsageError, match="cannot be sent as JSON"):
            client.search(wrong)
    monkeypatch.setenv("SSL_CERT_DIR", "/etc")
    with (
        Client("http://127.0.0.1:9") as nobody,
        pytest.raises(ServiceError, match="cannot reach") as unreachable,
    ):
        nobody.info()
    assert unreachable.value.status is None
    assert "SSL_CERT" not in str(unreachable.value)


def test_the_client_refuses_addresses_and_keys_that_cannot_be_sent(service):
    for url in ("http://[::1", "http://host:port", None, b"http://host"):
        with pytest.raises(UsageError, match=r"URL|url must be a string"):
            Client(url)
    for key in ("secret\u2013key", "secret\nkey", b"secret"):
        with pytest.raises(UsageError, match="api_key") as refused:
            Client(service.url, key)
        assert isinstance(key, bytes) or "secret" not in str(refused.value)
    with Client(service.url, "a-key-from-a-file\n") as client:
        assert client.info()["indexes"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("ALL_PROXY", "ftp://127.0.0.1:1"),
        ("no_proxy", "[::1]"),
        ("SSL_CERT_FILE", "/nonexistent.pem"),
        ("HTTP_PROXY", "http://user:secret@127.0.0.1:1"),
    ],
)
def test_the_client_names_variables_of_the_environment(
    service, monkeypatch, variable, value
):
    for name in (name for name in os.environ if "proxy" in name.lower()):
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    with (
        pytest.raises((UsageError, ServiceError), match=variable) as caught,
        Client(service.url) as client,
    ):
        client.info()
    assert "secret" not in str(caught.value)


GETS = ["/healthz", "/info", "/metrics", "/thumbnails/0", "/photos/0", "/"]
POSTS = ["/search", "/search/texts", "/rerank", "/v1/rerank", "/v2/rerank", "/embed"]


@pytest.mark.parametrize("path", [*GETS, "/nowhere", "/thumbnails/99999"])
def test_head_is_get_without_a_body(http, path):
    full = http.get(path)
    head = http.head(path)
    assert head.status_code == full.status_code
    assert head.headers["content-type"] == full.headers["content-type"]
    assert head.content == b""


@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_a_wrong_method_is_named_so(http, path):
    for method in ["PUT", "DELETE", "GET" if path in POSTS else "POST"]:
        answer = http.request(
            method, path, content=b"{}", headers={"content-type": "application/json"}
        )
        assert (answer.status_code, method) == (405, method)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data"])
def test_a_body_of_another_type_names_the_header(http, path, kind):
    request = http.build_request("POST", path, content=b'{"query": "a"}')
    request.headers.pop("content-type", None)
    if kind is not None:
        request.headers["content-type"] = kind
    answer = http.send(request)
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("/embed", {"inputs": "a"}, "dimensions"),
        ("/embed", {"inputs": "a"}, "encoding_format"),
        ("/search", {"query": "a"}, "filter"),
        ("/rerank", {"query": "a", "texts": [0]}, "top_k"),
        ("/v1/rerank", {"query": "a", "documents": [0]}, "rank_fields"),
    ],
)
def test_a_member_that_could_change_the_answer_is_refused(http, path, body, member):
    assert http.post(path, json=body).status_code == 200
    answer = http.post(path, json={**body, member: 128})
    assert answer.status_code == 422
    assert member in answer.text
