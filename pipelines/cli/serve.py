"""The command `edje-index serve`."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import click

from pipelines.cli.options import FILE, PATH, device_option, dtype_option, model_option
from pipelines.cli.output import note, print_line
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra

_KEYS_VARIABLE = "EDJE_API_KEYS"
_MIN_KEY_LETTERS = 16
_MAX_KEYS_BYTES = 1 << 20


@click.command()
@click.argument("indexes", metavar="INDEX...", type=PATH, nargs=-1, required=True)
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
    "--api-keys",
    "key_file",
    type=FILE,
    help=f"File of API keys, one per line. The environment variable {_KEYS_VARIABLE} can be used instead.",
)
@click.option(
    "--allowed-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="Additional host name that clients may use for the service; repeatable.",
)
@click.option("--insecure", is_flag=True, help="Listen on an address that other machines can reach without API keys.")
@click.option(
    "--queue",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    help="Maximum number of waiting requests; further requests fail with HTTP status 429.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=30.0,
    show_default=True,
    help="Maximum seconds per request; slower requests fail with HTTP status 504.",
)
def serve(
    indexes: tuple[Path, ...],
    host: str,
    port: int,
    model: Path | None,
    device: str,
    dtype: str,
    key_file: Path | None,
    hosts: tuple[str, ...],
    insecure: bool,
    queue: int,
    deadline: float,
) -> None:
    """Serve search and re-ranking of every INDEX over HTTP, with a search page for browsers.

    The command prints the address of the service when the service is ready. On SIGTERM or Ctrl-C, the service answers
    the requests that have arrived, then exits. docs/serve.md and /openapi.json describe all requests.

    Without API keys, anyone who can reach the address can search and see thumbnails. On a network, use API keys and a
    proxy with TLS.

    \b
    Examples:
      edje-index serve photos.edje
      edje-index serve photos.edje art.edje --port 9000
      edje-index serve photos.edje --host 0.0.0.0 --api-keys keys.txt --allowed-host photos.example.org
    """
    keys = _api_keys(key_file)
    is_local = host == "localhost" or _is_loopback_address(host)
    if not (is_local or keys or insecure):
        raise UsageError(
            f"every machine that can reach {host} could search and see thumbnails: give --api-keys, or --insecure"
        )
    allowed = [] if not is_local and not hosts else ["localhost", "127.0.0.1", "[::1]", host, *hosts]
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.indexes import open_indexes
        from pipelines.service.server import address_of, listen, run_service

    limits = Limits(waiting=queue, deadline_seconds=deadline)
    with listen(host, port) as listener:
        note(f"loading {', '.join(map(str, indexes))}")
        opened = open_indexes(indexes, model, device=device, dtype=dtype)
        run_service(opened, limits, listener, lambda: print_line(address_of(listener)), keys, allowed)


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _api_keys(path: Path | None) -> list[str]:
    """Read API keys, on separate lines or separated by commas. An error message never contains a key."""
    text, source = os.environ.get(_KEYS_VARIABLE), _KEYS_VARIABLE
    if path is not None:
        if text is not None:
            raise UsageError(f"give --api-keys or {_KEYS_VARIABLE}, not both")
        source = str(path)
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_KEYS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read API keys from {path}: {reason}; check the path and permissions") from error
    if text is None:
        return []
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{source} contains no API key; write one key per line")
    if any(len(key) < _MIN_KEY_LETTERS or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(
            f"{source} contains an invalid API key; a key must have at least {_MIN_KEY_LETTERS} printable ASCII "
            "characters and no spaces"
        )
    return keys
