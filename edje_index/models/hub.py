"""Access to model hubs that fails at once, and in silence, where no hub can be reached.

Left alone, the hub's client retries for most of a minute and logs every attempt. Here it is first asked
whether the hub answers at all; if not, the client works from its local cache only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
CONNECT_SECONDS = 5.0


@contextmanager
def hub_access() -> Iterator[None]:
    """Context for calls that may download. Not for use from several threads: it changes process-wide settings."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    disabled = logging.root.manager.disable
    handler = logging.NullHandler()
    # open_clip logs through the root logger, which would otherwise set up a handler of its own.
    logging.root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    constants.HF_HUB_OFFLINE = offline or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(disabled)
        logging.root.removeHandler(handler)


def _answers(endpoint: str) -> bool:
    """Whether a connection to the hub can be made; behind a proxy only the attempt itself can tell."""
    if any(os.environ.get(name) for name in PROXY_VARIABLES):
        return True
    address = urlsplit(endpoint)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
