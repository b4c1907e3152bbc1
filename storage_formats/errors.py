"""Errors that a user of an index can meet, grouped by what a handler would do about them.

Every message says what is wrong and what to do. The command line prints the message on one line and exits with
`exit_code`.
"""

from __future__ import annotations


class EdjeError(Exception):
    """Base class of all expected errors: something outside the program is wrong. Exit code 1."""

    exit_code = 1


class UsageError(EdjeError):
    """The request is invalid: a wrong argument, a plan that cannot be carried out, a path without an index.

    Exit code 2.

    Attributes:
        parameter: name of the wrong parameter, if there is one. The command line adds its option to the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class RowIdError(UsageError, IndexError):
    """A row id is out of range. This error is also an `IndexError`."""


class IncompleteIndexError(EdjeError):
    """The build of the index has not finished. The same build command resumes it."""


class CorruptIndexError(EdjeError):
    """Bytes on disk contradict the manifest or the format."""
