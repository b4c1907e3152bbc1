"""Access to the Hugging Face hub, without long retries if the hub cannot be reached.

The client of the hub retries for most of a minute. This module first tries one connection. If the connection fails, the
client uses only the local cache.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from edje_index.errors import HubUnreachableError, ModelError

PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
CONNECT_SECONDS = 5.0
# Parts of the error messages that the libraries give if a download fails.
_OFFLINE_SIGNS = (
    "Failed to download", "Failed initial config", "couldn't connect", "Can't load", "Max retries", "offline",
    "urlopen error", "Name or service not known", "name resolution", "Connection", "LocalEntryNotFound",
)  # fmt: skip
_REFUSED_SIGNS = ("401", "403", "404")  # HTTP status codes: the hub was reached
_MESSAGE_LENGTH = 200


@contextmanager
def hub_access(*, local_only: bool = False) -> Iterator[None]:
    """Context manager for calls that may download from the hub. Not thread-safe.

    Args:
        local_only: if True, nothing is downloaded.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    disabled = logging.root.manager.disable
    handler = logging.NullHandler()
    # open_clip logs through the root logger, which would otherwise add a handler that prints.
    logging.root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    constants.HF_HUB_OFFLINE = offline or local_only or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(disabled)
        logging.root.removeHandler(handler)


def loading_error(name: str, error: Exception) -> ModelError:
    """Convert `error`, raised while the model `name` was loaded, to the error that a user sees."""
    message = " ".join(str(error).split())
    excerpt = message[:_MESSAGE_LENGTH]
    if any(sign in message for sign in _OFFLINE_SIGNS) and not any(sign in message for sign in _REFUSED_SIGNS):
        return HubUnreachableError(
            f"cannot download {name}: the model hub is not reachable from this machine [{excerpt}]. Give local weights "
            "as NAME:/path/to/weights or local-dir:FOLDER. Alternatively, download the model on a machine that reaches "
            "the hub, and copy its cache directory HF_HOME to this machine"
        )
    return ModelError(f"cannot load {name}: {excerpt}; check the name and the files of the model")


def _answers(endpoint: str) -> bool:
    """Return True if the hub accepts a connection. Behind a proxy, return True without a test."""
    if any(os.environ.get(name) for name in PROXY_VARIABLES):
        return True
    address = urlsplit(endpoint)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
