"""A client for the HTTP service that `edje-index serve` starts."""

from __future__ import annotations

import base64
import contextlib
import json
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from storage_formats.arguments import (
    as_count,
    as_list,
    as_number,
    as_text,
    refuse_pickle,
    repr_of,
)
from storage_formats.arrays import Floats
from storage_formats.atomic import Json
from storage_formats.errors import EdjeError, UsageError
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from edje_index.search.hits import Hit, TextHit

# environment variables that httpx reads
_VARIABLE = re.compile("(ALL|HTTPS?|NO)_PROXY|SSL_CERT_(DIR|FILE)", re.IGNORECASE)
_JPEG = b"\xff\xd8\xff"
_Answer = TypeVar("_Answer")
Document = int | str | bytes
"""A document to re-rank: a row id, the uri of a row, or the bytes of an image file."""


class ServiceError(EdjeError):
    """The service refused a request, or cannot be reached.

    Attributes:
        status: HTTP status of the response; None if the service cannot be reached.
        retry_after: seconds to wait before sending the request again; None if the
            response does not say how long to wait.

    Examples:
        >>> from edje_index import ServiceError
        >>> ServiceError("64 requests are waiting", status=429, retry_after=2.0).status
        429
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Client:
    """Sends searches and re-ranking requests over HTTP to a service that
    `edje-index serve` has started.

    Several threads may share a client. The end of a `with` block closes the client. A
    method raises `ServiceError` if the service refuses the request or cannot be
    reached, and `UsageError` if an argument cannot be written as JSON.

    Args:
        url: address of the service.
        api_key: API key to send; None to send no key.
        timeout: seconds without a response after which a request fails.

    Raises:
        UsageError: `url` is not a URL, `api_key` has characters other than printable
            ASCII, which an HTTP header cannot contain, or the environment variables for
            proxies and certificates cannot be used.

    Examples:
        >>> from edje_index import Client
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     # client.search("a red canoe", k=5) returns hits if the service runs
        ...     client.url
        'http://127.0.0.1:8000'
    """

    @name_missing_extra("serve")
    def __init__(
        self, url: str, api_key: str | None = None, *, timeout: float = 60.0
    ) -> None:
        import httpx

        key = as_text(api_key or "", "api_key").strip()
        if not key.isascii() or not key.isprintable():
            raise UsageError(
                "api_key has characters that no header can have; give a key of the"
                " service",
                parameter="api_key",
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = as_number(timeout, "timeout", most=threading.TIMEOUT_MAX)
        try:
            base = httpx.URL(as_text(url, "url"))
        except httpx.InvalidURL as error:
            raise UsageError(
                f"{url!r} is not a URL: {error}; give the address of a service, such"
                " as http://127.0.0.1:8000",
                parameter="url",
            ) from error
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            raise UsageError(
                f"no connection is possible: {error}{_variables()}"
            ) from error
        self.url = url.rstrip("/")

    __repr__ = repr_of("url")
    __reduce__ = refuse_pickle("make a client there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the service."""
        self._http.close()

    def info(self) -> Json:
        """Return a description of the service as a JSON object: its index, precisions,
        scores and request limits.
        """
        return self._json("GET", "/info", read=dict)

    def search(
        self,
        query: str | bytes,
        k: int = 10,
        pool: int | None = None,
        *,
        score: str | None = None,
        where: str | None = None,
        precision: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> list[Hit]:
        """Return the `k` best images for `query`, best first.

        Args:
            query: a text, or the bytes of an image file. For an image, the hits are the
                most similar images of the index.
            k: number of hits.
            pool: number of candidates to re-rank, at least `k`; None as in
                `TokenIndex.search`.
            score: as in `TokenIndex.search`.
            where: as in `TokenIndex.search`.
            precision: precision of the tokens to re-rank with; None selects the default
                of the service.
            columns: names of the columns of the rows table whose values are in
                `Hit.columns`; None selects the columns with captions, if there are any.
        """
        from edje_index.search.hits import Hit

        by = _sent(query, "query")
        options = {
            "score": score,
            "where": where,
            "precision": precision,
            "columns": columns,
        }
        body = {**by, "k": k, "pool": pool, **options}
        return self._json("POST", "/search", body, partial(_hits, Hit))

    def search_texts(
        self,
        image: int | bytes,
        texts: Sequence[str],
        k: int = 10,
        pool: int | None = None,
        *,
        precision: str | None = None,
    ) -> list[TextHit]:
        """Return the `k` texts that best describe `image`, best first: image-to-text
        search.

        Args:
            image: row id, or the bytes of an image file.
            texts: texts to choose from.
            k: number of hits.
            pool: number of texts to re-rank, at least `k`; None as in
                `TokenIndex.search_texts`.
            precision: precision in which the tokens of the row are read; None selects
                the default of the service.
        """
        from edje_index.search.hits import TextHit

        body = {
            **_sent(image, "row_id"),
            "texts": as_list(texts, "texts", "strings"),
            "k": k,
            "pool": pool,
            "precision": precision,
        }
        return self._json("POST", "/search/texts", body, partial(_hits, TextHit))

    def rerank(
        self, query: str, documents: Sequence[Document], top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Rate `documents` for `query`. Return (position in `documents`, relevance)
        pairs, best first.

        Args:
            query: text of the query.
            documents: row ids, uris of rows, or bytes of image files.
            top_n: number of pairs to return; None returns one pair per document.
        """
        sent = [
            _sent(document, "uri" if isinstance(document, str) else "row_id")
            for document in as_list(documents, "documents", "row ids, uris and images")
        ]
        body = {"query": query, "documents": sent, "top_n": top_n}
        pair = operator.itemgetter("index", "relevance_score")
        return self._json(
            "POST", "/v2/rerank", body, lambda answer: [*map(pair, answer["results"])]
        )

    def embed(self, inputs: Sequence[str] | Sequence[bytes]) -> Floats:
        """Return the embeddings of texts or images, float32 [n, embed_dim].

        Args:
            inputs: n texts, or the bytes of n image files.
        """
        values = as_list(inputs, "inputs", "texts or images")
        sent = [_sent(value) if isinstance(value, bytes) else value for value in values]
        return self._json(
            "POST",
            "/embed",
            {"inputs": sent},
            lambda rows: np.array([*rows], dtype=np.float32),
        )

    def thumbnail(self, row_id: int) -> bytes:
        """Return a thumbnail of the image of row `row_id`, as the bytes of a JPEG
        file.
        """
        path = f"/thumbnails/{as_count(row_id, 'row_id', least=0)}"
        data = self._send("GET", path)
        with self._reading():
            if not data.startswith(_JPEG):
                raise ValueError("the answer is no JPEG file")
        return data

    def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        read: Callable[[Any], _Answer] = lambda answer: answer,
    ) -> _Answer:
        """Send a request, and return what `read` makes of the JSON of the answer."""
        data = self._send(method, path, body)
        with self._reading():
            return read(json.loads(data))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Context manager that reads an answer, which another server than the service
        may have sent, for example a proxy.
        """
        try:
            yield
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ServiceError(
                f"{self.url} does not answer like 'edje-index serve' ({error!r:.200});"
                " check the address"
            ) from error

    def _send(self, method: str, path: str, body: Any = None) -> bytes:
        import httpx

        try:
            # `json` calls `default` for values that it cannot write.
            # `operator.index` converts NumPy integers to Python integers.
            text = (
                ""
                if body is None
                else json.dumps(
                    body, default=operator.index, ensure_ascii=False, allow_nan=False
                )
            )
            headers = {"Content-Type": "application/json"}
            request = self._http.build_request(
                method, path, content=text.encode(), headers=headers
            )
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"an argument cannot be sent as JSON: {error}; give numbers and texts"
            ) from error
        try:
            answer = self._http.send(request)
        except httpx.HTTPError as error:
            raise ServiceError(
                f"cannot reach the service at {self.url}: {error}; check the address,"
                " and that the service is running"
                f"{_variables(has_tls=self.url.startswith('https:'))}"
            ) from error
        if answer.is_success:
            return answer.content
        wait = answer.headers.get("Retry-After", "")
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            # Another server than the service answered, for example a proxy.
            message = f"HTTP status {answer.status_code}: {answer.text[:200]}"
        raise ServiceError(
            message,
            status=answer.status_code,
            retry_after=float(wait) if wait.isdecimal() else None,
        )


def _variables(has_tls: bool = True) -> str:
    """Return the end of an error message, which names the environment variables that
    httpx reads, with those for certificates if `has_tls` is True. Their values are left
    out, because they can contain passwords.
    """
    variables = sorted(filter(_VARIABLE.fullmatch, os.environ))
    names = ", ".join(name for name in variables if has_tls or "SSL" not in name)
    hint = f"; connections follow the environment variables {names}: correct or unset"
    return f"{hint} them" if names else ""


def _hits(kind: type[_Answer], answer: Any) -> list[_Answer]:
    """Return the hits of an answer as objects of a dataclass. A later version of the
    service may send further members.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return [kind(**{name: hit[name] for name in names}) for hit in answer["hits"]]


def _sent(value: Any, name: str = "") -> Json:
    """Return a JSON object that contains `value`. The bytes of an image become the
    member "image", in base64. For any other value, `name` is the name of the member.
    """
    if isinstance(value, bytes):
        return {"image": base64.b64encode(value).decode()}
    return {name: value}
