"""The exceptions that all packages of this project use. Errors with a cause outside
the program are subclasses of `EdjeError`.

The message of such an error says what is wrong and what to do. The command line prints
the message on one line and exits with the `exit_code` of the exception class.
"""

from __future__ import annotations

import errno


class EdjeError(Exception):
    """Base class of all errors with a cause outside the program, for example a missing
    file. Exit code 1.

    Attributes:
        parameter: name of the parameter with the wrong value. None if no single
            parameter is wrong. The command line adds the name of the matching option to
            the message.
        remedy: a word that tells a program what to do. "verify": call `verify_index`,
            which lists all damage. "ann": call `add_ann`, which builds the missing
            nearest-neighbour index. "discard": call `remove_snapshots`, which discards
            the unfinished change. "upgrade": call `upgrade_index`. None if the message
            itself says what to do. The command line adds the matching command to the
            message; `pipelines.cli.main` lists all words.
        row_ids: row ids to which the error applies, for example those of damaged blocks
            that the failed operation has found. Others may have the same problem. Empty
            if the error is not one of single rows.

    Examples:
        >>> from storage_formats import EdjeError, TokenStore
        >>> try:
        ...     TokenStore.open("nowhere.edje")
        ... except EdjeError as error:
        ...     print(error)
        there is no index at nowhere.edje
    """

    exit_code = 1
    remedy: str | None = None

    def __init__(
        self,
        *arguments: object,
        parameter: str | None = None,
        remedy: str | None = None,
        row_ids: tuple[int, ...] = (),
    ) -> None:
        # Unpickling calls the class with the arguments of this call, and then sets the
        # attributes.
        super().__init__(*arguments)
        self.parameter = parameter
        self.remedy = remedy or self.remedy
        self.row_ids = row_ids


class UsageError(EdjeError):
    """The request is not possible, for example because an argument is wrong. The same
    request would fail again.

    Therefore a job that fails with this error does not offer to be resumed, the service
    answers with an HTTP status from 400 to 499, and the exit code is 2. Errors after
    which the same request may succeed are other subclasses of `EdjeError`.

    Examples:
        >>> from storage_formats import UsageError, codec
        >>> try:
        ...     codec("fp7")
        ... except UsageError as error:
        ...     print(error)
        unknown precision 'fp7'...
    """

    exit_code = 2


class RemovedPrecisionError(UsageError):
    """The index has a precision that this version of edje-index does not read."""


class RowIdError(UsageError, IndexError):
    """A row id is out of range or belongs to no input. This error is also an
    `IndexError`.

    Examples:
        >>> from storage_formats import RowIdError, TokenStore
        >>> try:
        ...     TokenStore.open("photos.edje").fetch([6])
        ... except RowIdError as error:
        ...     print(error)
        row id 6 is out of range; the index has the row ids 0 to 5
    """


class DeletedRowError(RowIdError):
    """A requested row was deleted. This error is also an `IndexError`. Its `row_ids`
    are those of all requested rows that are deleted.

    Examples:
        >>> from edje_index import delete_rows
        >>> from storage_formats import DeletedRowError, TokenStore
        >>> _ = delete_rows("pages.edje", rows=[2])
        >>> try:
        ...     TokenStore.open("pages.edje").fetch([1, 2])
        ... except DeletedRowError as error:
        ...     print(error)
        row 2 was deleted; an earlier snapshot of the index may still hold it
    """


class IncompleteIndexError(EdjeError):
    """The index is not finished.

    To resume an interrupted build, run the same build command again. An `IndexWriter`
    cannot resume: write the index again from the start.

    Examples:
        >>> from storage_formats import IncompleteIndexError, IndexWriter, TokenStore
        >>> writer = IndexWriter.create("begun.edje", block_shape=(4, 16), embed_dim=8)
        >>> try:
        ...     TokenStore.open("begun.edje")
        ... except IncompleteIndexError:
        ...     print("not finished")
        not finished
        >>> writer.abort()
    """


class CorruptIndexError(EdjeError):
    """A file of the index is missing, damaged, or inconsistent with the manifest.

    Examples:
        >>> from pathlib import Path
        >>> from storage_formats import CorruptIndexError, TokenStore
        >>> _ = Path("photos.edje/index.json").write_text("damaged")
        >>> try:
        ...     TokenStore.open("photos.edje")
        ... except CorruptIndexError:
        ...     print("damaged")
        damaged
    """


class TaskInterrupted(Exception):
    """A task on a shard has stopped early, because its `should_stop()` returned
    True.
    """


class LinkError(OSError):
    """A symbolic link leads out of the directory of an index or a model bundle."""


class MachineError(EdjeError):
    """This machine cannot read a file of the index at the moment, for example because
    too many files are open. The file itself may be undamaged.
    """


# If reading a file of the index fails with one of these values of errno, the file is
# missing or damaged. All other values mean a problem of the machine.
_DAMAGED = frozenset(
    {
        errno.EFBIG,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTSUP,
    }
)

_REMEDIES = {
    errno.EACCES: (
        "give this user the right to read the file and to enter the folders above it"
    ),
    errno.EPERM: "give this user, or this sandbox, the right to read the file",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: (
        "all programs together have too many open files; raise the limit (sysctl"
        " fs.file-max)"
    ),
    errno.ENOMEM: "free some memory",
    errno.EIO: "check the device; if it is sound again, verify the index",
    errno.EAGAIN: "try again",
    errno.ESTALE: (
        "the network file system has lost the file; check its server, then open the"
        " index again"
    ),
}


def cannot_read(path: object, error: Exception, advice: str = "") -> EdjeError:
    """Return the exception to raise if `error` prevents the reading of a file of the
    index.

    The errno of `error` selects the exception. If the errno means a problem of the
    machine, for example too many open files, the result is a `MachineError` whose
    message says what to do. Otherwise the file is missing or damaged, and the result is
    a `CorruptIndexError`. Its message ends with `advice`. Without `advice`, its
    attribute `remedy` is "verify". The message of a `LinkError` is its own advice.
    """
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    message = f"cannot read {path}: {reason}"
    if isinstance(error, LinkError):
        return CorruptIndexError(message)
    if number is not None and number not in _DAMAGED:
        remedy = _REMEDIES.get(number, "check the file system, then try again")
        return MachineError(f"{message}; {remedy}")
    if advice:
        return CorruptIndexError(f"{message}; {advice}")
    return CorruptIndexError(message, remedy="verify")
