"""Settings and limits of the service."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storage_formats.errors import UsageError

MIN_KEY_LETTERS = 16
_MAX_KEYS_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a request may cost. A request over a limit is refused before the memory or time is spent.

    Attributes:
        body_bytes: length of a request's body.
        bodies_bytes: length of all bodies that are in memory at the same time.
        body_seconds: time a client may take to send a request's header, and then its body.
        send_seconds: time a client may take to receive each part of an answer.
        connections: open connections; more are refused.
        query_letters: characters in a query.
        documents: rows, pictures or texts in one request.
        images: pictures in one request, because each takes one pass of the vision tower.
        image_pixels: pixels of a picture.
        pool: candidates of a search.
        blocks: token blocks in one answer.
        waiting: requests that wait for the model; further ones are refused with status 429.
        batch_tokens: image tokens that share a batch, over all its requests.
        deadline_seconds: time from the arrival of a request to its answer.
    """

    body_bytes: int = 12 << 20
    bodies_bytes: int = 128 << 20
    body_seconds: float = 10.0
    send_seconds: float = 30.0
    connections: int = 512
    query_letters: int = 2000
    documents: int = 1000
    images: int = 16
    image_pixels: int = 40_000_000
    pool: int = 1000
    blocks: int = 1000
    waiting: int = 64
    batch_tokens: int = 32_768
    deadline_seconds: float = 30.0


@dataclass(frozen=True)
class ServiceSettings:
    """Limits, API keys and accepted hosts of the service.

    Attributes:
        limits: limits of a request.
        api_keys: a request must send one of these keys; empty for a service without keys.
        allowed_hosts: values of the Host header that are answered; empty for any. This stops pages of other sites from
            reaching a service on loopback through a name that resolves to it.
    """

    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_to_answer(host: str, also: Sequence[str]) -> tuple[str, ...]:
    """Host headers to answer: loopback, `host`, `also`. Empty (any) if `host` is not loopback and `also` is empty."""
    if not is_loopback(host) and not also:
        return ()
    return tuple(dict.fromkeys(["localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in also)]))


def read_api_keys(text: str, source: str) -> tuple[str, ...]:
    """The keys in `text`: one per line, or separated by commas. Empty lines and lines that begin with # are skipped.

    Raises:
        UsageError: there is no key, or one is too short or has characters that no header can hold. `source` says where
            the text came from; the message never holds a key.
    """
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise UsageError(f"{source} holds no API key: write one per line")
    if any(len(key) < MIN_KEY_LETTERS or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(
            f"{source} holds an invalid API key: a key has at least {MIN_KEY_LETTERS} printable ASCII characters "
            "and no space"
        )
    return keys


def read_api_key_file(path: Path) -> tuple[str, ...]:
    """The keys in the file at `path`, see `read_api_keys`.

    Raises:
        UsageError: the file cannot be read or holds no valid key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_KEYS_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read API keys from {path}: {getattr(error, 'strerror', None) or error}") from error
    return read_api_keys(text, str(path))
