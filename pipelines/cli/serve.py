"""The commands `edje-index serve` and `edje-index show`."""

from __future__ import annotations

import ipaddress
import os
import re
import threading
import webbrowser
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipelines.cli.options import (
    command,
    device_option,
    dtype_option,
    local_index_argument,
    model_option,
    option,
)
from pipelines.cli.output import note, print_line, run_job
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra

_KEYS_VARIABLE = "EDJE_API_KEYS"
_MIN_KEY_LETTERS = 16
_OF_HTTP = ("--host", "--port", "--allowed-host", "--insecure", "--deadline")
_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


@command()
@local_index_argument
@option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
)
@option(
    "--port",
    click.IntRange(0, 65535),
    default=8000,
)
@model_option
@device_option
@dtype_option
@option(
    "--allowed-host",
    key="hosts",
    metavar="NAME",
    multiple=True,
)
@option("--insecure", bool)
@option(
    "--deadline",
    click.FloatRange(0.1, 3600),
    default=30.0,
)
@option(
    "--mcp",
    bool,
    key="is_mcp",
)
def serve(
    index: Path,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    insecure: bool,
    deadline: float,
    is_mcp: bool,
    **options: Any,
) -> None:
    """Serve search and re-ranking of INDEX over HTTP, with a search page for browsers.

    The command prints the address of the service when the service is ready. On SIGTERM
    or Ctrl-C, the service answers the requests that have arrived, then exits.
    docs/serve.md and /openapi.json describe all requests.

    The environment variable EDJE_API_KEYS holds API keys, separated by commas or lines.
    Without API keys, anyone who can reach the address can search and see thumbnails. On
    a network, use API keys and a proxy with TLS.

    \b
    Examples:
      edje-index serve photos.edje
      edje-index serve photos.edje --port 9000
      edje-index serve photos.edje --host 0.0.0.0 --allowed-host photos.example.org
      edje-index serve photos.edje --mcp

    Options:
        --host: Address to listen on.
        --port: Port to listen on; 0 chooses a free port.
        --allowed-host: Additional host name that clients may use for the service;
            repeatable.
        --insecure: Allow an address that other machines can reach, although no API keys
            are set.
        --deadline: Maximum seconds per request; slower requests fail with HTTP status
            504.
        --mcp: Serve one assistant through the Model Context Protocol on standard input
            and output, instead of HTTP. It needs no address and no API keys.
    """
    if is_mcp:
        context = click.get_current_context()
        for parameter in context.command.params:
            flag = parameter.opts[0]
            source = context.get_parameter_source(str(parameter.name))
            if flag in _OF_HTTP and source == ParameterSource.COMMANDLINE:
                raise UsageError(f"{flag} has no effect with --mcp: leave out {flag}")
        if _KEYS_VARIABLE in os.environ:
            note(f"note: {_KEYS_VARIABLE} has no effect with --mcp")
        with name_missing_extra("mcp"):
            from edje_index.search.token_index import TokenIndex
            from pipelines.service.mcp import mcp_server
        mcp_server(TokenIndex.open(index, **options)).run()
        return
    text = os.environ.get(_KEYS_VARIABLE)
    keys = re.findall(r"[^,\s]+", text or "")
    if text is not None and not keys:
        raise UsageError(
            f"{_KEYS_VARIABLE} contains no API key; give one, or unset the variable"
        )
    if any(
        len(key) < _MIN_KEY_LETTERS or not key.isascii() or not key.isprintable()
        for key in keys
    ):
        raise UsageError(
            f"{_KEYS_VARIABLE} contains an invalid API key; a key has at least"
            f" {_MIN_KEY_LETTERS} printable ASCII characters"
        )
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        # `host` is a host name, which may belong to any address.
        is_local = False
    if not (is_local or keys or insecure):
        raise UsageError(
            f"every machine that can reach {host} could search and see thumbnails: set"
            f" {_KEYS_VARIABLE}, or give --insecure"
        )
    # An empty list allows every name. It is the default if other machines can reach the
    # service, because it is not known by which names they address this machine.
    allowed = [] if not is_local and not hosts else [*_LOCAL_NAMES, host, *hosts]
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.server import address_of, listen, open_warm, run_service

    limits = Limits(deadline_seconds=deadline)
    with listen(host, port) as listener:
        note(f"loading {index}")
        opened = open_warm(index, **options)
        run_service(
            opened,
            limits,
            listener,
            lambda: print_line(address_of(listener)),
            keys,
            allowed,
        )


@command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option("--model")
def show(folder: Path, model: str | None) -> None:
    """Index the photos in FOLDER, and open a page in the browser that searches them.

    The index is FOLDER.edje. The first run downloads the model, as 'model get' does:
    'demo' (174 MB) needs no Hugging Face Hub, and --model edje is the model of the EDJE
    paper's authors, on the Hub. Later runs index only new and changed photos. A stopped
    run continues where it stopped.

    \b
    Examples:
      edje-index show photos
      edje-index show photos --model edje

    Options:
        --model: Directory of the model bundle, or a model of 'model get', which is kept
            in the user's cache.  [default: demo]
    """
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.server import address_of, listen, open_warm, run_service
    from pipelines import build_index, update_index
    from pipelines.jobs.hub import DEMO, find_model
    from storage_formats.format.layout import Layout

    root = folder.resolve().with_name(f"{folder.resolve().name}.edje")
    is_built = Layout(root).manifest.exists()
    bundle: Path | None = None
    if model is not None or not is_built:
        bundle = find_model(model or DEMO, note)
    if is_built:
        run_job(update_index, root, model=bundle, engine="inline", resume=root)
    else:
        run_job(build_index, folder, root, str(bundle), engine="inline", resume=root)
    with listen("127.0.0.1", 0) as listener:
        print_line(address_of(listener))
        note("opening the page at this address; Ctrl-C ends it")
        opening = threading.Thread(
            target=webbrowser.open, args=(address_of(listener),), daemon=True
        )
        run_service(
            open_warm(root, bundle),
            Limits(),
            listener,
            opening.start,
            allowed_hosts=_LOCAL_NAMES,
        )
