"""The command `edje-index serve`."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

import click

from pipelines.cli.options import PATH, device_option, dtype_option, model_option
from pipelines.cli.output import note, print_line
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra

_KEYS_VARIABLE = "EDJE_API_KEYS"
_MIN_KEY_LETTERS = 16


@click.command()
@click.argument("index", type=PATH)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 chooses a free port.",
)
@model_option
@device_option
@dtype_option
@click.option(
    "--allowed-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="Additional host name that clients may use for the service; repeatable.",
)
@click.option("--insecure", is_flag=True, help="Listen on an address that other machines can reach without API keys.")
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=30.0,
    show_default=True,
    help="Maximum seconds per request; slower requests fail with HTTP status 504.",
)
def serve(
    index: Path,
    host: str,
    port: int,
    model: Path | None,
    device: str,
    dtype: str,
    hosts: tuple[str, ...],
    insecure: bool,
    deadline: float,
) -> None:
    """Serve search and re-ranking of INDEX over HTTP, with a search page for browsers.

    The command prints the address of the service when the service is ready. On SIGTERM or Ctrl-C, the service answers
    the requests that have arrived, then exits. docs/serve.md and /openapi.json describe all requests.

    The environment variable EDJE_API_KEYS holds API keys, separated by commas or lines. Without API keys, anyone who
    can reach the address can search and see thumbnails. On a network, use API keys and a proxy with TLS.

    \b
    Examples:
      edje-index serve photos.edje
      edje-index serve photos.edje --port 9000
      edje-index serve photos.edje --host 0.0.0.0 --allowed-host photos.example.org
    """
    text = os.environ.get(_KEYS_VARIABLE)
    keys = [] if text is None else [key for key in re.split(r"[,\s]+", text) if key]
    if text is not None and not keys:
        raise UsageError(f"{_KEYS_VARIABLE} contains no API key; give one, or unset the variable")
    if any(len(key) < _MIN_KEY_LETTERS or not key.isascii() or not key.isprintable() for key in keys):
        raise UsageError(
            f"{_KEYS_VARIABLE} contains an invalid API key; a key has at least {_MIN_KEY_LETTERS} printable ASCII "
            "characters"
        )
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_local = False
    if not (is_local or keys or insecure):
        raise UsageError(
            f"every machine that can reach {host} could search and see thumbnails: set {_KEYS_VARIABLE}, or give "
            "--insecure"
        )
    allowed = [] if not is_local and not hosts else ["localhost", "127.0.0.1", "[::1]", host, *hosts]
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.server import address_of, listen, open_warm, run_service

    limits = Limits(deadline_seconds=deadline)
    with listen(host, port) as listener:
        note(f"loading {index}")
        opened = open_warm(index, model, device=device, dtype=dtype)
        run_service(opened, limits, listener, lambda: print_line(address_of(listener)), keys, allowed)
