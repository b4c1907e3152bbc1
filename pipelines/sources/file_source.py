"""The fields of all sources that are one file, directory or URL."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelines.sources.selection import Ignored
from pipelines.sources.specs import absolute_path


@dataclass
class FileSource:
    """Fields of a source that is one file, directory or URL. See `pipelines.sources.base.Source`.

    Attributes:
        clips: True if video files are inputs, too. Otherwise they are ignored, unless a list names them.
    """

    spec: str
    path: bytes = field(init=False)
    ignored: Ignored = field(init=False, default_factory=Ignored)
    clips: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.path = absolute_path(self.spec)
