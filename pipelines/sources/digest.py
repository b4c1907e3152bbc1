"""Computes the digest of a list of inputs. A different digest shows that the sources have changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from edje_index.images.inputs import InputRef, metadata_text
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShouldStop

_REPORT_SECONDS = 0.5  # at least between two progress events


def digested(refs: Iterable[InputRef], digest: Any, on_event: OnEvent, should_stop: ShouldStop) -> Iterator[InputRef]:
    """Yield `refs` unchanged, add each input to `digest`, and report the progress.

    Args:
        refs: inputs.
        digest: `hashlib` hash object to update.
        on_event: called with each progress event.
        should_stop: called before each input and after the last input; the listing stops once `should_stop()` returns
            True.

    Raises:
        JobStopped: `should_stop()` returned True.
    """
    reported_at = time.monotonic()
    for number, ref in enumerate(refs, 1):
        _stop_if(should_stop)
        digest.update(b"%d %a %d\0" % (ref.offset, ref.size, ref.member) + ref.path + b"\0\n")
        if ref.container is not None:
            digest.update(str(ref.container).encode())
        if ref.metadata is not None:
            digest.update(metadata_text(ref.metadata).encode())
        if time.monotonic() - reported_at >= _REPORT_SECONDS:
            reported_at = time.monotonic()
            on_event(Progress("listing the sources", number))
        yield ref
    _stop_if(should_stop)  # Ctrl-C also ends the program that writes a list to standard input, so the list may be cut


def _stop_if(should_stop: ShouldStop) -> None:
    if should_stop():
        raise JobStopped("stopped while listing the sources")
