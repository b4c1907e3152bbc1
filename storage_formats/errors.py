"""Errors that a user of an index can meet, grouped by what a handler would do about them.

Every message says what is wrong and what to do next. The command line prints the message alone and
ends with ``exit_code``.
"""

from __future__ import annotations


class EdjeError(Exception):
    """Base of every expected error: something outside the program is wrong. Exit code 1."""

    exit_code = 1


class UsageError(EdjeError):
    """The request cannot be served as it was made: a wrong option, a refused plan, not an index. Exit code 2.

    Attributes:
        parameter: name of the parameter that is wrong, if it is one; the command line adds the option to the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class IncompleteIndexError(EdjeError):
    """The index was begun and not finished; running the same build again resumes it."""


class CorruptIndexError(EdjeError):
    """Bytes on disk contradict the manifest or the format."""
