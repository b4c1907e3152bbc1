"""The error for archives that are damaged."""

from __future__ import annotations


class ArchiveDamage(Exception):
    """An archive is damaged, and further members cannot be read.

    Attributes:
        reason: one of `edje_index.images.decode.REASONS`, such as "truncated-archive".
        detail: description of the damage.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
