"""The command `edje-index serve`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipelines.cli.options import FILE, PATH, device_option, dtype_option, model_option
from pipelines.cli.output import note, print_line
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra

_KEYS_VARIABLE = "EDJE_API_KEYS"


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
    queue: int,
    deadline: float,
) -> None:
    """Serve search and re-ranking of every INDEX over HTTP, with a search page for browsers.

    The command prints the address of the service when the service is ready. On SIGTERM or Ctrl-C, the service answers
    the requests that have arrived, then exits. docs/serve.md and /openapi.json describe all requests.

    Anyone who can reach the address can search and see thumbnails. On a network, use API keys and a proxy with TLS.

    \b
    Examples:
      edje-index serve photos.edje
      edje-index serve photos.edje art.edje --port 9000
      edje-index serve photos.edje --host 0.0.0.0 --api-keys keys.txt --allowed-host photos.example.org
    """
    with name_missing_extra("serve"):
        from pipelines.service.indexes import open_indexes
        from pipelines.service.server import address_of, listen, run_service
    from pipelines.service.settings import Limits, ServiceSettings, hosts_to_answer, is_loopback

    keys = _api_keys(key_file)
    if not is_loopback(host) and not keys:
        note(f"warning: every machine that can reach {host} can search and see thumbnails: use --api-keys")
    settings = ServiceSettings(Limits(waiting=queue, deadline_seconds=deadline), keys, hosts_to_answer(host, hosts))
    listener = listen(host, port)
    with listener:
        note(f"loading {', '.join(map(str, indexes))}")
        opened = open_indexes(indexes, model, device=device, dtype=dtype)
        run_service(opened, settings, listener, lambda: print_line(address_of(listener)))


def _api_keys(path: Path | None) -> tuple[str, ...]:
    from pipelines.service.settings import read_api_key_file, read_api_keys

    text = os.environ.get(_KEYS_VARIABLE)
    if path is not None and text is not None:
        raise UsageError(f"give --api-keys or {_KEYS_VARIABLE}, not both")
    if path is not None:
        return read_api_key_file(path)
    return () if text is None else read_api_keys(text, _KEYS_VARIABLE)
