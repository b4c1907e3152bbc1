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
    """Upper limits on the size and duration of requests.

    Attributes:
        body_bytes: number of bytes in the body of a request.
        bodies_bytes: number of bytes of all bodies in memory at the same time.
        body_seconds: seconds to receive the headers of a request, and the same number of seconds to receive the body.
        send_seconds: seconds in which a client must receive each part of a response.
        connections: number of open connections.
        query_letters: number of characters in a query or text.
        documents: number of rows, images or texts in one request.
        images: number of images in one request.
        image_pixels: number of pixels of an image.
        pool: number of candidates of a search.
        blocks: number of token blocks in one response.
        waiting: number of requests that wait for the model.
        batch_tokens: number of image tokens of all requests in one batch.
        deadline_seconds: seconds from the arrival of a request to the response.
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
    """Limits, API keys and accepted host names of the service.

    Attributes:
        limits: limits on the size and duration of requests.
        api_keys: valid API keys. Each request must send one of these keys. If empty, requests need no key.
        allowed_hosts: host names that the Host header may contain; if empty, any host name is accepted.
    """

    # Checking the Host header protects a service on loopback from DNS rebinding.
    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """Return True if `host` is an address that only programs on this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_to_answer(host: str, also: Sequence[str]) -> tuple[str, ...]:
    """Return the host names to accept in the Host header: the loopback names, `host`, and the names in `also`.

    Return an empty tuple, which means any host name, if `host` is not a loopback address and `also` is empty.
    """
    if not is_loopback(host) and not also:
        return ()
    return tuple(dict.fromkeys(["localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in also)]))


def read_api_keys(text: str, source: str) -> tuple[str, ...]:
    """Read API keys from a text, on separate lines or separated by commas.

    Args:
        text: the text with the keys.
        source: name of the file or variable that contains the text, for error messages.

    Raises:
        UsageError: there is no key, a key is too short, or a key has characters that are not allowed in a header. The
            message never contains a key.
    """
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise UsageError(f"{source} contains no API key; write one key per line")
    if any(len(key) < MIN_KEY_LETTERS or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(
            f"{source} contains an invalid API key; a key must have at least {MIN_KEY_LETTERS} printable "
            "ASCII characters and no spaces"
        )
    return keys


def read_api_key_file(path: Path) -> tuple[str, ...]:
    """Read API keys from the file at `path`. `read_api_keys` describes the format.

    Raises:
        UsageError: the file cannot be read, has no key, or has an invalid key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_KEYS_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read API keys from {path}: {getattr(error, 'strerror', None) or error}; check the "
            "path and the permissions"
        ) from error
    return read_api_keys(text, str(path))
