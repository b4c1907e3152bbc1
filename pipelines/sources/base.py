"""Code that all kinds of sources share: their interface, the rules by which files are
inputs, and inputs that are whole files.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edje_index.images.clips import clip_format
from edje_index.images.decode import HEAD_BYTES, ImageError, image_format
from edje_index.images.transient import (
    TransientInputError,
    is_transient,
    transient_error,
)
from edje_index.inputs.containers import split_uri
from edje_index.inputs.names import (
    filled,
    has_input_suffix,
    is_hidden,
    parse_sidecars,
)
from edje_index.inputs.ranges import PointerError
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tables import STANDARD_INPUT, UNREADABLE
from pipelines.metadata import Ignored, source_values
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.source_columns import Value
from storage_formats.remote.files import (
    ChangedFileError,
    FileVersion,
    read_remote_range,
    remote_version,
    require_libraries,
)
from storage_formats.remote.objects import ObjectStoreError
from storage_formats.remote.urls import WEB_SCHEMES, has_credentials, is_url, scheme_of

# Control characters and lone surrogates cannot be part of a URL, and whitespace cannot
# be part of the name of a server or bucket. A request encodes all other characters.
_URL = re.compile(
    r"[^:]+://[^/\s\0-\x1f\x7f-\x9f\ud800-\udfff]*(/[^\0-\x1f\x7f-\x9f\ud800-\udfff]*)?"
)


class Patterns:
    """Patterns in the syntax of .gitignore that select the inputs to use. Thread-safe.

    Args:
        include: only inputs that match are used; empty for all.
        exclude: inputs that match are not used.

    Attributes:
        unmatched: patterns that no input has matched so far, compiled.

    Raises:
        UsageError: a pattern is not valid.
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.unmatched: dict[str, Any] = {}
        self._include: Any = None
        self._exclude: Any = None
        if not include and not exclude:
            return
        with name_missing_extra("build"):
            from pathspec import GitIgnoreSpec
        try:
            self._include = GitIgnoreSpec.from_lines(include) if include else None
            self._exclude = GitIgnoreSpec.from_lines(exclude)
            for pattern in (*include, *exclude):
                spec = GitIgnoreSpec.from_lines([pattern.removeprefix("!")])
                self.unmatched[pattern] = spec
        except ValueError as error:
            raise UsageError(
                f"a pattern is not valid: {error}; write patterns as in .gitignore",
                parameter="exclude",
            ) from error

    def __bool__(self) -> bool:
        return self._exclude is not None

    def select(self, path: str) -> bool:
        """Return True if the input with this path in its source is used. There must be
        patterns.
        """
        for pattern, spec in list(self.unmatched.items()):
            if spec.match_file(path):
                # Another thread may have removed it.
                self.unmatched.pop(pattern, None)
        is_included = self._include is None or self._include.match_file(path)
        return bool(is_included and not self._exclude.match_file(path))


class Source(ABC):
    """A source of images and clips.

    Args:
        spec: the source as the user named it: a path, a URL, or "-" for standard input.
        is_directory: True for a directory.
        column: name of the column of images in tables and Parquet files; None selects
            one, see `edje_index.inputs.tables.Table`.
        clips: True if video files are inputs, too. Otherwise they are ignored, unless a
            list names them.

    Attributes:
        path: absolute path of the directory or file, or its URL; "-" for standard
            input.
        ignored: number of entries that are not inputs, in the latest pass over the
            source. Keys are suffixes (".txt") or reasons ("(hidden)").
        inputs: number of inputs in the latest pass.
        patterns: which inputs are used; the others are ignored.
        unread: uris of the inputs with metadata that could not be read.
        hidden: paths that the latest pass ignored although there may be inputs, such as
            archives in a directory with images. The values are the reasons.
    """

    def __init__(
        self,
        spec: str,
        is_directory: bool = False,
        column: str | None = None,
        *,
        clips: bool = False,
    ) -> None:
        self.spec = spec
        self.is_directory = is_directory
        self.column = column
        self.clips = clips
        self.path = absolute_path(spec)
        self.ignored = Ignored()
        self.inputs = 0
        self.patterns = Patterns()
        self.unread: set[str] = set()
        self.hidden: dict[str, str] = {}

    def iter_inputs(self) -> Iterator[InputRef]:
        """Yield every input once, always in the same order.

        An entry that cannot be read becomes an input with a `problem`.
        """
        self.ignored.clear()
        self.inputs = 0
        self.hidden.clear()
        for ref in self._iter_inputs():
            if self._is_selected(ref.uri):
                self.inputs += 1
                yield ref
            else:
                self.ignored.count("(excluded)")

    def _metadata(
        self,
        uri: str,
        contents: Mapping[str, bytes | None],
        values: Mapping[Any, Any],
    ) -> dict[str, Value] | None:
        """Return the metadata of an input by column name; None if there is none.

        `contents` has the contents of its metadata files, see `parse_sidecars`.
        `values` has values from other places, such as the columns of a list. For equal
        names, the metadata files win. If a value cannot be read, `unread` gets `uri`.
        """
        damaged = self.ignored.get(UNREADABLE, 0)
        sidecar_values, unreadable = parse_sidecars(contents)
        if unreadable:
            self.ignored.count(UNREADABLE, len(unreadable))
        # Each side is cleaned before they are merged, so that a value that cannot be
        # stored does not replace one that can.
        metadata = filled(
            source_values(sidecar_values, self.ignored) or {},
            source_values(values, self.ignored) or {},
        )
        if self.ignored.get(UNREADABLE, 0) > damaged:
            self.unread.add(uri)
        return metadata or None

    def _is_selected(self, uri: str) -> bool:
        return not self.patterns or self.patterns.select(self._path_in_source(uri))

    def _path_in_source(self, uri: str) -> str:
        """Return the path of an input that patterns are compared with. The path is
        relative to the directory or archive of the source. For a list or a single file,
        the path is relative to the directory of this file.
        """
        source = display_path(self.path).rstrip("/")
        for start in (source, os.path.dirname(source)):
            if uri.startswith((f"{start}/", f"{start}!")):
                uri = uri[len(start) :]
                break
        parts = split_uri(uri)
        return uri.lstrip("/!") if parts is None else "/".join(parts).lstrip("/")

    @abstractmethod
    def _iter_inputs(self) -> Iterator[InputRef]:
        """Yield every input, before the patterns are applied. Entries that are not
        inputs are counted in `ignored`.
        """


class SourceError(UsageError):
    """A source cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, parameter="sources")


def unreadable(spec: str, error: Exception) -> SourceError:
    """Return the error to raise for a source that cannot be read because of `error`."""
    reason = getattr(error, "strerror", None) or error
    # The message of an object store says itself what to do.
    if isinstance(error.__cause__, ObjectStoreError):
        return SourceError(f"cannot read {spec}: {reason}")
    advice = "the file, its permissions and its format"
    if is_url(spec):
        advice = "the URL and the credentials"
    return SourceError(f"cannot read {spec}: {reason}; check {advice}")


def absolute_path(spec: str) -> bytes:
    """Return the absolute path of a source, or its URL. The name `-` of standard input
    is returned unchanged.
    """
    if spec == STANDARD_INPUT or is_url(spec):
        return os.fsencode(spec)
    return os.path.abspath(os.fsencode(spec))


def absolute_spec(spec: str) -> str:
    """Return a source in the form that the index records, see `absolute_path`."""
    return os.fsdecode(absolute_path(spec))


def holds_inputs(names: Iterable[bytes], clips: bool) -> bool:
    """Return True if `names` contains the name of an image file. If `clips` is True,
    the name of a video file counts, too. Hidden files do not count.
    """
    return any(
        has_input_suffix(name, clips) and not name.startswith(b".") for name in names
    )


def is_input(head: bytes, clips: bool) -> bool:
    """Return True if `head` is the beginning of an image file or, if `clips` is True,
    of a clip. `head` has `HEAD_BYTES` bytes, or fewer for a shorter file.
    """
    return image_format(head) is not None or (clips and clip_format(head) is not None)


def ignored_as(
    name: bytes,
    read_head: Callable[[], bytes],
    *,
    clips: bool,
) -> str | None:
    """Return the key under which `Ignored` counts a regular file; None if the file is
    an input.

    Args:
        name: name of the file without its directory, or of a member of an archive. The
            names in some zips that Windows programs wrote contain backslashes.
        read_head: function that returns the first bytes of the file or raises OSError.
            It is called only if `name` has no suffix.
        clips: True if video files are inputs, too.
    """
    parts = name.replace(b"\\", b"/").split(b"/")
    parts = [part for part in parts if part not in (b"", b".", b"..")]
    if not parts:
        return "(not a file)"
    if any(map(is_hidden, parts)):
        return "(hidden)"
    if has_input_suffix(name, clips):
        return None
    suffix = os.path.splitext(name)[1].lower()
    if suffix:
        return display_path(suffix)
    return None if is_input(read_head(), clips) else "(no suffix)"


def file_input(
    path: bytes,
    uri: str | None = None,
    *,
    size: int | None = None,
    metadata: Mapping[str, Value] | None = None,
) -> InputRef:
    """Return an input for the file at `path`.

    The input has a `problem` if the file is missing, unreadable or not a regular file.
    A file at a URL is not checked, because no request is sent.

    Args:
        path: path or URL of the file.
        uri: uri of the input; None derives the uri from `path`.
        size: number of bytes of the file at a URL; None if unknown.
        metadata: metadata of the input.
    """
    uri = display_path(path) if uri is None else uri
    if is_url(path):
        require_libraries(os.fsdecode(path))
        return InputRef(uri, path, size=size, metadata=metadata)
    problem = None
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            size = status.st_size
        else:
            problem = "unreadable"
    except (OSError, ValueError) as error:
        problem = problem_of(error)
    return InputRef(uri, path, size=size, problem=problem, metadata=metadata)


def listed_input(value: Any, directory: bytes) -> InputRef | None:
    """Return the input with the path or URL `value`. Return None if `value` is not a
    valid path or URL, or if it is a URL with credentials.

    Args:
        value: path or URL of the input, as read from a list. It is valid only if it is
            a str or bytes.
        directory: directory or URL at which relative paths start. If it is a URL, the
            list is on a server and cannot name local files.
    """
    if isinstance(value, str):
        scheme = scheme_of(value)
        if scheme is not None and scheme != "file":
            url = value.strip()
            # A URL with credentials is not used, because the index would store the
            # password in clear text.
            if not _URL.fullmatch(url) or has_credentials(url):
                return None
            path = os.fsencode(url)
            return (
                file_input(path)
                if is_url(path)
                else InputRef(url, path, problem="not-a-local-path")
            )
        try:
            value = (
                urllib.parse.unquote_to_bytes(value[len("file://") :])
                if scheme
                else os.fsencode(value)
            )
        except UnicodeEncodeError:
            # The path contains a lone surrogate, which an escape in JSON can make.
            return None
        if scheme and is_url(directory):
            return None
    if not isinstance(value, bytes) or not value or b"\0" in value:
        return None
    if is_url(directory):
        is_below = not value.startswith(b"/") and b".." not in value.split(b"/")
        # On a web server, "#" would begin a fragment. Object stores and the Hub use
        # names unchanged.
        if scheme_of(os.fsdecode(directory)) in WEB_SCHEMES:
            value = value.replace(b"#", b"%23")
        return file_input(directory + b"/" + value) if is_below else None
    path = os.path.join(directory, value)
    ref = file_input(path)
    # The names in a list are often in the Unicode form NFC, but those on a disk that
    # macOS has written are in NFD. The other form of a missing name is tried, too.
    if ref.problem == "missing" and not path.isascii():
        for form in ("NFC", "NFD"):
            other = os.fsencode(unicodedata.normalize(form, os.fsdecode(path)))
            if other != path and os.path.isfile(other):
                return file_input(other)
    return ref


def problem_of(error: Exception) -> str:
    """Return the `problem` of an input that could not be read because of `error`.

    Raises:
        TransientInputError: the error has a temporary reason, so a later attempt may
            succeed.
        SourceError: the content of the file is not on this machine.
    """
    if isinstance(error, ImageError):
        return error.reason
    if isinstance(error, ChangedFileError):
        raise TransientInputError(
            f"{error.filename} has changed while it was listed; run the command again"
        ) from error
    if isinstance(error, PointerError):
        name = display_path(error.filename)
        raise SourceError(f"cannot read {name}: {error.strerror}") from error
    if isinstance(error, OSError) and is_transient(error):
        raise transient_error(
            display_path(os.fsencode(error.filename or "a source")), error
        ) from error
    return (
        "missing"
        if isinstance(error, FileNotFoundError | NotADirectoryError)
        else "unreadable"
    )


def lost_file(source: Source, error: Exception) -> InputRef:
    """Return an input with a `problem`. After `error` has ended the listing of an
    archive or Parquet file, this input replaces all inputs that were not listed yet.

    Raises:
        UsageError: a server refuses the file or does not have it, so that all images in
            the file would be lost.
        TransientInputError: as in `problem_of`.
    """
    # An OSError without a number does not come from the system: pyarrow raises it for a
    # damaged file.
    is_reason = isinstance(error, ImageError) or getattr(error, "errno", None)
    problem = problem_of(error) if is_reason else "damaged-archive"
    if is_url(source.path) and problem in ("missing", "unreadable"):
        raise unreadable(source.spec, error) from error
    return InputRef(display_path(source.path), source.path, problem=problem)


def read_head(path: bytes, size: int | None = None) -> bytes:
    """Return the first `HEAD_BYTES` bytes of a regular file or a URL. Raises OSError if
    the file cannot be read.

    `size` is the number of bytes of a file at a URL, if it is known.
    """
    if is_url(path):
        url = os.fsdecode(path)
        version = remote_version(url) if size is None else FileVersion(size)
        length = min(HEAD_BYTES, version.length)
        return read_remote_range(url, length, 0, version) if length else b""
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_BYTES)
