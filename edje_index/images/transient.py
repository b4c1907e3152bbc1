"""Retries reads and decodes that fail because of the machine: a failing disk or
network, or too little memory.

If the error persists, `retry` raises `TransientInputError`. The caller must then not
mark the input as failed, because the input itself may be good.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from edje_index.images.decode import ImageError
from edje_index.images.decode_limits import can_allocate
from storage_formats.errors import EdjeError

_T = TypeVar("_T")

PAUSES = (0.5, 1.5, 4.0)
"""Seconds to wait before the second, the third and the fourth attempt."""

_NETWORK = {
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOLINK,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
}
# (values of `errno` for transient errors, advice to the user)
_ADVICE = (
    (
        {errno.EMFILE, errno.ENFILE},
        "raise the limit of open files, or use fewer workers",
    ),
    (
        {errno.ENOMEM, errno.ENOBUFS},
        "free some memory, or use fewer workers or threads",
    ),
    (
        {errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN},
        "check that the file system of the input is mounted",
    ),
    (_NETWORK, "check the disk or network that holds the input"),
    (
        {errno.EIO},
        (
            "check the disk or network that holds the input; if only this file is"
            " unreadable, move it away"
        ),
    ),
)


class TransientInputError(EdjeError):
    """An input cannot be read or decoded at present. The cause is a problem of the
    machine, not of the input.

    A later attempt may succeed.
    """


def is_transient(error: OSError) -> bool:
    """Return True if the error may be temporary."""
    return any(error.errno in numbers for numbers, _ in _ADVICE)


def transient_error(uri: str, error: OSError) -> TransientInputError:
    """Return the exception to raise if the transient `error` persists for the input
    `uri`.
    """
    advice = next(advice for numbers, advice in _ADVICE if error.errno in numbers)
    return TransientInputError(f"cannot read {uri}: {error.strerror}; {advice}")


def retry(read: Callable[[], _T], uri: str, enough_bytes: int = 1 << 30) -> _T:
    """Return the result of `read()`. After a transient OSError or a MemoryError, wait
    and call `read` again.

    The pauses between the calls are `PAUSES`. All other exceptions are raised at once.

    Args:
        uri: the input, for the error message.
        enough_bytes: bytes of memory that suffice for any valid input.

    Raises:
        TransientInputError: the transient OSError or the MemoryError persists.
        ImageError: the MemoryError persists, but `enough_bytes` can be allocated. The
            input therefore needs too much memory, and the reason is "too-expensive".
    """
    # None stands for the last attempt, after which there is no pause.
    for pause in (*PAUSES, None):
        try:
            return read()
        except OSError as error:
            if not is_transient(error):
                raise
            if pause is None:
                raise transient_error(uri, error) from error
        except MemoryError as error:
            if pause is None and can_allocate(enough_bytes):
                raise ImageError(
                    "too-expensive",
                    f"it needs more than {enough_bytes} bytes of memory",
                ) from error
            if pause is None:
                advice = (
                    "free some memory, or use fewer workers, fewer threads or a lower"
                    " limit on the pixels"
                )
                raise TransientInputError(
                    f"cannot decode {uri}: too little memory; {advice}"
                ) from error
        time.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")
