"""The commands `edje-index serve` and `edje-index show`."""

from __future__ import annotations

import ipaddress
import os
import re
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from pipelines.cli.command import command
from pipelines.cli.output import note, print_line, run_job
from storage_formats.arguments import as_number
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra

_KEYS_VARIABLE = "EDJE_API_KEYS"
_MIN_KEY_LETTERS = 16
_OF_HTTP = ("host", "port", "hosts", "insecure", "deadline")
_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


@command(hosts="--allowed-host", is_mcp="--mcp")
def serve(
    index: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model: Path | None = None,
    device: str = "auto",
    hosts: Sequence[str] = (),
    insecure: bool = False,
    deadline: float = 30.0,
    is_mcp: bool = False,
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

    Args:
        host: address to listen on.
        port: port to listen on; 0 chooses a free port.
        model: directory of the model bundle. None selects the bundle that built INDEX.
        device: device that runs the model. auto uses cuda if a CUDA device is
            available.
        hosts: additional host name that clients may use for the service; repeatable.
        insecure: allow an address that other machines can reach, although no API keys
            are set.
        deadline: maximum seconds per request; slower requests fail with HTTP status
            504.
        is_mcp: serve one assistant through the Model Context Protocol on standard input
            and output, instead of HTTP. It needs no address and no API keys.
    """
    if is_mcp:
        for name in _OF_HTTP:
            source = click.get_current_context().get_parameter_source(name)
            if source is click.core.ParameterSource.COMMANDLINE:
                raise UsageError("no effect with --mcp: leave it out", parameter=name)
        if _KEYS_VARIABLE in os.environ:
            note(f"note: {_KEYS_VARIABLE} has no effect with --mcp")
        with name_missing_extra("mcp"):
            from edje_index.search.token_index import TokenIndex
            from pipelines.service.mcp import mcp_server
        mcp_server(TokenIndex.open(index, model, device=device)).run()
        return
    deadline = as_number(deadline, "deadline", 0.1, 3600)
    text = os.environ.get(_KEYS_VARIABLE)
    keys = re.findall(r"[^,\s]+", text or "")
    if (text is not None and not keys) or any(
        len(key) < _MIN_KEY_LETTERS or not key.isascii() or not key.isprintable()
        for key in keys
    ):
        raise UsageError(
            f"{_KEYS_VARIABLE} must hold API keys of at least {_MIN_KEY_LETTERS}"
            " printable ASCII characters; change it, or unset it"
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
    for name in hosts:
        if not re.fullmatch(r"\*|(\*\.)?[^*/:\s]+|\[[0-9a-fA-F:.]+\]", name):
            raise UsageError(
                f"--allowed-host {name} is no host name: leave out the scheme and the"
                " port, as in photos.example.org or *.example.org"
            )
    # An empty list allows every name. It is the default if other machines can reach the
    # service, because it is not known by which names they address this machine.
    allowed = [] if not is_local and not hosts else [*_LOCAL_NAMES, host, *hosts]
    # PyTorch keeps compiled products of up to 1,024 shapes, and so does its library
    # oneDNN. The first of these caches saves no time, and takes up to 0.5 GB.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.server import address_of, listen, open_warm, run_service

    limits = Limits(deadline_seconds=deadline)
    with listen(host, port) as listener:
        note(f"loading {index}")
        opened = open_warm(index, model, device=device)
        run_service(
            opened,
            limits,
            listener,
            lambda: print_line(address_of(listener)),
            keys,
            allowed,
        )


@command()
def show(folder: Path, *, model: str | None = None) -> None:
    """Index the photos in FOLDER, and open a page in the browser that searches them.

    The index is FOLDER.edje. The first run downloads the model, as 'model get' does:
    'demo' (174 MB) needs no Hugging Face Hub, and --model edje is the model of the EDJE
    paper's authors, on the Hub. Later runs index only new and changed photos. A stopped
    run continues where it stopped.

    \b
    Examples:
      edje-index show photos
      edje-index show photos --model edje

    Args:
        model: directory of the model bundle, or a model of 'model get', which is kept
            in the user's cache. None selects demo.
    """
    with name_missing_extra("serve"):
        from pipelines.service.guard import Limits
        from pipelines.service.server import address_of, listen, open_warm, run_service
    from pipelines.jobs.build import build_index
    from pipelines.jobs.hub import DEMO, find_model
    from pipelines.jobs.update import update_index
    from pipelines.sources import open_sources
    from storage_formats.format.layout import Layout

    path = folder.resolve()
    if not path.name:
        raise UsageError(
            f"{folder} has no folder beside it for the index: give a folder in it, or"
            " use 'build' with --out"
        )
    root = path.with_name(f"{path.name}.edje")
    is_built = Layout(root).manifest.exists()
    if not is_built:
        # Wrong paths are refused here, before the download of the model.
        open_sources([str(folder)])
        model = model or DEMO
    bundle = None if model is None else find_model(model, note)
    if is_built:
        run_job(update_index, root, model=bundle, engine="inline", resume=True)
    else:
        run_job(build_index, folder, root, str(bundle), engine="inline", resume=True)
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
