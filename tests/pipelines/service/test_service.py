"""A real service and a real client: every answer is compared with the library's."""

import base64
import csv
import io
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from edje_index import Client, ServiceError, TokenIndex
from edje_index.inputs.thumbnails import read_thumbnails
from storage_formats import UsageError
from storage_formats.reading.embeddings import read_embeddings
from tests.pipelines.service.conftest import HOLE
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


@pytest.fixture
def post(http):
    """The JSON answer to a request."""

    def ask(path, **body):
        return http.post(path, json=body).json()

    return ask


def photo(index, row):
    return (index.parent / "photos" / f"{row:02d}.jpg").read_bytes()


def ids(hits):
    """The rows of hits of the library or of the service."""
    return [hit["row_id"] if isinstance(hit, dict) else hit.row_id for hit in hits]


def same_hits(left, right):
    """Whether the rows are the same and the scores agree to float32 rounding."""
    return ids(left) == ids(right) and np.allclose(
        [[hit.score, hit.embedding_score] for hit in left],
        [[hit.score, hit.embedding_score] for hit in right],
        atol=_CLOSE,
    )


def test_search_gives_the_hits_of_the_library(client, library):
    hits = client.search("a red canoe", k=4, pool=8)
    expected = library.search("a red canoe", 4, 8)
    assert same_hits(hits, expected)
    assert asdict(hits[0]).keys() == asdict(expected[0]).keys()
    assert [hit.uri for hit in hits] == [hit.uri for hit in expected]
    assert same_hits(
        client.search("a red canoe", score="embedding"),
        library.search("a red canoe", score="embedding"),
    )
    rough = library.with_precision("nvfp4").search("a red canoe", 5)
    assert same_hits(client.search("a red canoe", 5, precision="nvfp4"), rough)
    assert not same_hits(client.search("a red canoe", 5), rough)


def test_search_by_image_and_by_row(client, library, index, post):
    image = photo(index, 7)
    assert same_hits(client.search(image, k=3), library.search_image(image, 3))
    hits = post("/search", row_id=7, k=3, skip=2)["hits"]
    assert ids(hits) == ids(library.search_image(7, 5))[2:]
    assert [hit["rank"] for hit in hits] == [3, 4, 5]
    assert {hit["relevance"] for hit in hits} == {None}
    both = library.search("a dog", 4, image=7)
    row = read_embeddings(library.committed, [7])[0]
    expected = library.model.text.encode(["a dog"])[0] + row
    embeddings = read_embeddings(library.committed, ids(both))
    np.testing.assert_allclose(
        [hit.embedding_score for hit in both],
        embeddings @ expected / np.linalg.norm(expected),
        atol=_CLOSE,
    )
    assert ids(post("/search", query="a dog", row_id=7, k=4)["hits"]) == ids(both)


TEXTS = ["a red canoe", "two dogs", "snow", "a man on a bicycle", "a red canoe"]


def test_texts_for_an_image_and_for_a_row(client, library, index, post):
    rough = library.with_precision("nvfp4")
    for image in (7, photo(index, 7)):
        expected = rough.search_texts(image, TEXTS, k=2, pool=2)
        hits = client.search_texts(image, TEXTS, k=2, pool=2, precision="nvfp4")
        for hit, other in zip(hits, expected, strict=True):
            assert (hit.position, hit.text) == (other.position, other.text)
            assert hit.score == pytest.approx(other.score, abs=_CLOSE)
    answer = post("/search/texts", row_id=7, texts=TEXTS, score="embedding")
    expected = library.search_texts(7, TEXTS, score="embedding")
    positions = [hit["position"] for hit in answer["hits"]]
    assert positions == [hit.position for hit in expected]
    assert answer["weights"] == {"embedding": 1.0}


def test_a_search_with_a_filter(client, library, http, post):
    where = "row_id > 3 and uri like '%.jpg'"
    assert same_hits(
        client.search("a dog", 4, where=where), library.search("a dog", 4, where=where)
    )
    by_row = post("/search", row_id=7, k=20, pool=20, where=where)["hits"]
    assert {*ids(by_row)} == {4, 6, 8, 9, 10, 11}
    assert post("/search", query="a dog", where="width > 9999")["hits"] == []
    assert http.get("/info").json()["indexes"][0]["columns"]["width"] == "int32"


def test_hits_bring_captions_or_the_chosen_columns(client, library):
    of_row = {3: ["a red canoe", "<b>two</b> dogs"]}
    for hits in (client.search("a dog", 11), library.search_image(0, 11)):
        for hit in hits:
            assert hit.columns == {"captions": of_row.get(hit.row_id)}
    (hit,) = client.search("a dog", where="row_id = 3", columns=["author", "width"])
    assert hit.columns == {"author": "Ada", "width": 64}
    with pytest.raises(ServiceError, match="no column x; choose from: author"):
        client.search("a dog", columns=["x"])


def test_hits_as_a_table(http, library):
    body = {"query": "a dog", "k": 11}
    expected = library.search("a dog", 11)
    table = http.post("/search", json={**body, "format": "csv"})
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = [*csv.DictReader(io.StringIO(table.content.decode("utf-8-sig")))]
    assert [int(row["row_id"]) for row in rows] == ids(expected)
    parquet = http.post("/search", json={**body, "format": "parquet"}).content
    names = pq.read_table(io.BytesIO(parquet)).column_names
    assert names == expected.to_arrow().column_names


def test_search_returns_both_orders(post, library):
    def ranks(hits):
        return [(hit["row_id"], hit["rank"], hit["embedding_rank"]) for hit in hits]

    answer = post("/search", query="a dog", k=4, pool=9, embedding_order=True)
    before = answer["by_embedding"]
    assert ids(before) == ids(library.search("a dog", 4, score="embedding"))
    assert [hit["embedding_rank"] for hit in before] == [1, 2, 3, 4]
    hits = answer["hits"]
    assert ids(hits) == ids(library.search("a dog", 4, 9))
    assert [hit["rank"] for hit in hits] == [1, 2, 3, 4]
    few = post(
        "/search",
        query="a dog",
        k=9,
        pool=9,
        embedding_order=True,
        min_relevance=hits[1]["relevance"],
    )
    # hits that are left out have ranks
    assert ranks(few["hits"]) == ranks(hits[:2])
    assert ranks(few["by_embedding"]) == sorted(ranks(hits[:2]), key=lambda hit: hit[2])
    assert answer["weights"] == {"logit": 1.0}
    stages = answer["timing"]["stages_ms"]
    total = stages.pop("total")
    assert 0 < sum(stages.values()) <= total <= answer["timing"]["computed_ms"]


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


def test_the_dialects_of_tei_and_cohere(post, library):
    best = library.search("x", 1)[0]
    rows = [3, 0, best.row_id]
    texts = ["3", "0", best.uri]
    expected = library.rerank("a dog", rows)
    answer = post("/rerank", query="a dog", texts=texts, return_text=True)
    raw = post("/rerank", query="a dog", texts=texts, raw_scores=True)
    for item, score, hit in zip(answer, raw, expected, strict=True):
        assert rows[item["index"]] == hit.row_id
        assert item["score"] == pytest.approx(hit.relevance, abs=_CLOSE)
        assert score["score"] == pytest.approx(hit.score, abs=_CLOSE)
        assert item["text"] == texts[item["index"]]
    body = {"model": "any", "query": "a dog", "documents": texts, "top_n": 2}
    without = post("/rerank", **body, return_documents=None)
    assert not any("document" in result for result in without["results"])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = post(path, **body, return_documents=True)["results"]
        for result, item, hit in zip(results, answer, expected[:2], strict=False):
            assert (result["index"], result["document"]["text"]) == (
                item["index"],
                item["text"],
            )
            assert result["relevance_score"] == pytest.approx(item["score"], abs=_CLOSE)
            assert result["score"] == pytest.approx(hit.score)
        assert len(results) == 2


def test_rows_and_images_are_scored_together(client, library, index):
    expected = {hit.row_id: hit.relevance for hit in library.rerank("a dog", [3, 7, 9])}
    path = str(index.parent / "photos" / "09.jpg")
    scores = dict(client.rerank("a dog", [3, photo(index, 7), path]))
    for position, row in enumerate((3, 7, 9)):
        assert scores[position] == pytest.approx(expected[row], abs=_CLOSE)
    assert abs(expected[3] - expected[7]) > _CLOSE


def read_image_tokens(http):
    text = http.get("/metrics").text
    return float(re.search(r"^edje_image_tokens_total (\S+)$", text, re.MULTILINE)[1])


def test_every_spelling_of_an_image(http, post, index, library):
    data = base64.b64encode(photo(index, 7)).decode()
    uri = f"data:image/jpeg;base64,{data}"
    documents = [uri, {"image": data}, {"image": uri}, {"text": uri}]
    before = read_image_tokens(http)
    results = post("/rerank", query="a dog", documents=documents)["results"]
    assert len(results) == len(documents)
    # An image costs as much as 16 pairs, and is in one pair.
    tokens = len(documents) * 17 * library.manifest.spec.block_shape[0]
    assert read_image_tokens(http) - before == tokens
    assert len({round(result["relevance_score"], 3) for result in results}) == 1


def test_embed_texts_and_images(client, library, index, post):
    assert post("/embed", inputs="a dog") == post("/embed", inputs=["a dog"])
    assert post("/embed", inputs=[]) == []
    texts = ["a dog", "b"]
    expected = library.model.text.encode(texts)
    np.testing.assert_allclose(client.embed(texts), expected, atol=1e-5)
    embedding = client.embed([photo(index, 7)])[0]
    (hit,) = library.search_image(photo(index, 7), 1)
    assert hit.embedding_score == pytest.approx(embedding @ embedding, abs=1e-5)


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


HEADER = {
    "image": (
        "iVBORw0KGgoAAAANSUhEUgAAGJwAABicAQAAAADixwjHAAAS50lEQVR4nO3BMQE"
        "AAADCoPVPbQlPoAAA"
    )
}


# wrong requests by status, with a part of the message
REFUSED = {
    422: [
        ("/search", {"query": "a", "skip": 1}, "score embedding"),
        ("/search", {"row_id": 7, "min_relevance": 0.5}, "needs a query"),
        ("/search", {}, "give query or image or row_id"),
        ("/search", {"query": " "}, "empty"),
        *(
            ("/search", {"query": "a", name: value}, f"{name}:")
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
        ("/search", {"query": "a", "k": 20, "pool": 10}, "at least k"),
        ("/search", {"query": "a", "wher": "x"}, "(did you mean where?)"),
        ("/search", {"row_id": HOLE}, "has no tokens"),
        ("/search", {"image": "file:///etc/passwd"}, "URLs are not fetched"),
        ("/search", {"image": "/etc/passwd"}, "base64"),
        ("/search", {"image": "bm8gaW1hZ2U="}, "not-an-image"),
        ("/search/texts", {"row_id": 7, "image": "AAAA", "texts": ["a"]}, "only one"),
        ("/search/texts", {"row_id": 7, "texts": []}, "texts"),
        ("/rerank", {"query": "a", "documents": [0], "top_n": "1"}, "top_n: "),
        ("/rerank", {"query": "a"}, "Field required"),
        # only the errors of the format of the request
        ("/rerank", {"documents": [0]}, "cohere.query: Field required"),
        ("/rerank", {"query": "a", "texts": ["https://x/y.jpg"]}, "not fetched"),
        ("/rerank", {"query": "a", "texts": ["99"]}, "out of range"),
        ("/rerank", {"query": "a", "documents": [{}]}, "document 0 is empty"),
        ("/embed", {"inputs": [3]}, "inputs"),
        ("/embed", {"inputs": ["a", {"image": "AAAA"}]}, "texts or images"),
        ("/embed", {"inputs": [HEADER] * 2}, "truncated"),
        # members of other services that would change the answer
        ("/embed", {"inputs": "a", "dimensions": 128}, "dimensions"),
        ("/search", {"query": "a", "filter": 128}, "filter"),
        ("/rerank", {"query": "a", "texts": [0], "top_k": 128}, "top_k"),
        ("/v1/rerank", {"query": "a", "documents": [0], "rank_fields": 1}, "rank_fi"),
    ],
    413: [
        ("/search", {"query": "a" * 2001}, "2000"),
        ("/search/texts", {"row_id": 7, "texts": ["a"] * 1001}, "1000"),
        ("/rerank", {"query": "a", "texts": ["0"] * 1001}, "1001"),
        ("/rerank", {"query": "a", "documents": [{"image": "AAAA"}] * 17}, "17"),
        # HEADER is the start of a PNG of 6,300 x 6,300 pixels; pixels are counted
        # before anything is decoded.
        ("/embed", {"inputs": [HEADER] * 3}, "119070000"),
        ("/embed", {"inputs": ["a"] * 1001}, "1001"),
    ],
}


@pytest.mark.parametrize("status", REFUSED)
def test_invalid_requests_have_one_shape(http, index, status):
    for path, body, message in REFUSED[status]:
        answer = http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert answer.json().keys() == {"error"}
        error = answer.json()["error"]
        assert error.keys() == {"code", "message"}
        assert message in error["message"]
        assert error["message"].count("Field required") <= 1
        # no path of the server
        assert str(index.parent) not in answer.text


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
    # some requests shared a batch
    assert batches < requests


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
    assert http.get("/openapi.json").json()["paths"].keys() >= {*GETS[:3], *POSTS}
    page = http.get("/")
    assert page.text.count('dir="auto"') == 7
    headers = page.headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_other_sites_get_no_access(http):
    headers = {"Origin": "https://evil.example"}
    answer = http.get("/info", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    # a form of another site can send no search either: see the test of body types
    assert http.options("/search", headers=headers).status_code == 405


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


@pytest.mark.parametrize(
    "body", [b"<html>log in</html>", b'{"hits": [{}]}', b"null", b"\xff", b"[" * 99999]
)
def test_another_server_is_no_service(body):
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever).start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            for ask in (
                lambda: client.search("a"),
                lambda: client.search_texts(1, ["a"]),
                lambda: client.rerank("a", [1]),
                lambda: client.embed(["a"]),
                lambda: client.thumbnail(1),
            ):
                with pytest.raises(ServiceError, match="does not answer like"):
                    ask()
        server.shutdown()


def test_the_client_refuses_addresses_and_keys_that_cannot_be_sent(service):
    for url in ("http://[::1", "http://host:port", None, b"http://host"):
        with pytest.raises(UsageError, match=r"URL|url must be a string"):
            Client(url)
    for key in ("secret\u2013key", "secret\nkey", b"secret"):
        with pytest.raises(UsageError, match="api_key") as refused:
            Client(service.url, key)
        assert isinstance(key, bytes) or "secret" not in str(refused.value)
    with Client(service.url, "a-key-from-a-file\n") as client:
        (index,) = client.info()["indexes"]
    assert (index["name"], index["rows"], index["indexed"]) == ("photos", 12, 11)
    assert index["precisions"] == ["bf16", "nvfp4"]


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


def test_head_is_get_without_a_body(http):
    for path in [*GETS, "/nowhere", "/thumbnails/99999"]:
        full = http.get(path)
        head = http.head(path)
        assert head.status_code == full.status_code
        assert head.headers["content-type"] == full.headers["content-type"]
        assert head.content == b""


def test_a_wrong_method_is_named_so(http):
    for path in [*GETS, *POSTS]:
        for method in ["PUT", "DELETE", "GET" if path in POSTS else "POST"]:
            answer = http.request(method, path, json={})
            assert answer.status_code == 405, (path, method)
            assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data"])
def test_a_body_of_another_type_names_the_header(http, kind):
    for path in POSTS:
        request = http.build_request("POST", path, content=b'{"query": "a"}')
        request.headers.pop("content-type", None)
        if kind is not None:
            request.headers["content-type"] = kind
        answer = http.send(request)
        assert answer.status_code == 415, path
        assert "Content-Type: application/json" in answer.text
