"""Counts and lists the images that cannot be read during a training run, although they were readable before."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

from edje_index.filesystem import read_json_lines
from edje_index.images.decode import ImageError
from storage_formats.errors import EdjeError

_PATTERN = "unreadable-*.jsonl"


class UnreadableImages:
    """The images that one worker could not read.

    Args:
        run_dir: run folder. Each image gets one line in the file `unreadable-RANK.jsonl`.
        rank: rank of the worker.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._path = run_dir / _PATTERN.replace("*", str(rank))
        self._uris: set[str] = set()
        self._lock = threading.Lock()

    def add(self, uri: str, error: ImageError) -> None:
        """Record that the image `uri` cannot be read. Only the first call for an image has an effect."""
        with self._lock:
            if uri not in self._uris:
                self._uris.add(uri)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"uri": uri, "reason": error.reason, "detail": error.detail}) + "\n")

    def count(self) -> int:
        """Return the number of images that the workers of the run could not read, also before it was resumed."""
        return sum(unreadable_by_reason(self._run_dir).values())


def unreadable_by_reason(run_dir: Path) -> dict[str, int]:
    """Return the number of images that the workers of a training run could not read, by reason."""
    values = [line.value for path in sorted(run_dir.glob(_PATTERN)) for line in read_json_lines(path)]
    reasons = {value["uri"]: value["reason"] for value in values if value}  # a killed worker may leave half a line
    return dict(sorted(Counter(reasons.values()).items()))


def nothing_readable() -> EdjeError:
    """Return the error for a batch without any image that can be read."""
    return EdjeError(
        "none of the images of a batch can be read any more; restore the image files, and train again to resume. The "
        "files unreadable-*.jsonl in the run folder name the images"
    )
