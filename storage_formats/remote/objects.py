"""Reads and writes the objects below a URL of an object store, through the library
obstore.

Repositories of the Hugging Face Hub, `hf://[datasets/]OWNER/NAME[@REVISION]`, are read
as folders on the web server of the Hub.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from storage_formats.atomic import Json
from storage_formats.errors import EdjeError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.remote.urls import (
    HUB_CREDENTIALS,
    HUB_SCHEME,
    scheme_of,
    web_address,
    without_credentials,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore


# Number of bytes per request. A longer request could exceed the time-out if the
# connection is slow.
CHUNK_BYTES = 8 << 20

_REQUEST_TIMEOUT = timedelta(seconds=60)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The environment variables that can name another server than that of S3."""
_ACCOUNTS = {
    "s3": "AWS_ACCESS_KEY_ID",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME",
}
"""For each scheme of a URL, an environment variable that identifies the account."""
_READ_TIMEOUT = timedelta(seconds=20)
_RETRY_TIMEOUT = timedelta(seconds=60)
_RETRIES = 6
# Number of attempts of `ObjectFolder`, in addition to the retries of obstore. obstore
# never retries conditional writes, and does not retry all requests whose response ends
# early.
_ATTEMPTS = 4
# seconds between the first two attempts; each further pause is twice as long
_FIRST_WAIT = 0.1
# maximum number of parts of an upload; S3 accepts 10,000
_MAX_PARTS = 9_000
# number of parts that are uploaded at a time; each part takes memory
_PARTS_AT_ONCE = 4
# maximum number of keys in one request
_KEYS_PER_DELETION = 1_000

_Result = TypeVar("_Result")
Chunk = bytes | memoryview


class ObjectStoreError(EdjeError):
    """An object store refused a request, or did not respond in several attempts."""


class AccessDeniedError(ObjectStoreError):
    """An object store refused a request because of its credentials."""


class ObjectChangedError(EdjeError):
    """A conditional request was refused, because another writer changed the object."""


class UncertainWriteError(ObjectStoreError):
    """A conditional write got no response, and it is not known whether the object was
    written, because the object cannot be read.
    """


@dataclass(frozen=True)
class ObjectVersion:
    """One version of an object.

    Attributes:
        data: the contents.
        marks: the argument `mode` of `obstore.put` with which a write fails unless this
            version is still current. It has the ETag, for S3 and Azure, and on Google
            Cloud Storage the generation number.
    """

    data: bytes
    marks: Mapping[str, str]


@dataclass(frozen=True)
class ObjectInfo:
    """Length in bytes, metadata and ETag of an object."""

    size: int
    metadata: Mapping[str, str]
    etag: str | None


@dataclass(frozen=True)
class ObjectFolder:
    """The objects below a URL. Keys are relative to the URL. Thread-safe.

    Requests that fail are repeated for up to a minute. The methods `read`, `read_range`
    and `chunks` raise `FileNotFoundError` if the object does not exist. All methods
    raise `ObjectStoreError` if the store refuses a request or cannot be reached.

    Attributes:
        url: the URL, without a slash at its end.
    """

    url: str
    store: ObjectStore

    @classmethod
    def open(cls, url: str) -> ObjectFolder:
        """Return the folder at `url`. This method sends no request.

        Raises:
            UsageError: the URL is not valid, or the environment lacks a setting that
                the store needs.
        """
        url = url.rstrip("/")
        return cls(url, _open_store(url))

    def __reduce__(self) -> tuple[object, ...]:
        # A connection cannot be sent to another process, so a copy opens its own.
        return type(self).open, (self.url,)

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def read_range(
        self, key: str, start: int, stop: int, *, etag: str | None = None
    ) -> memoryview:
        """Return bytes [start, stop) of an object.

        Args:
            etag: ETag of the version to read; None reads the current version.

        Raises:
            EOFError: the object ends before `stop`.
            ObjectChangedError: the object has another ETag.
        """
        try:
            view = self._repeated(key, lambda: self._get_range(key, start, stop, etag))
        except ObjectStoreError:
            # some stores refuse a range beyond the end of the object
            info = self.info(key)
            if info is None or info.size >= stop:
                raise
            view = memoryview(b"")
        if len(view) != stop - start:
            raise EOFError(f"{self.url_of(key)} ends before byte {stop}")
        return view

    def _get_range(
        self, key: str, start: int, stop: int, etag: str | None
    ) -> memoryview:
        import obstore
        from obstore.exceptions import PreconditionError

        options: Any = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = etag
        try:
            result = obstore.get(self.store, key, options=options)
        except PreconditionError as error:
            raise ObjectChangedError(f"{self.url_of(key)} has changed") from error
        # some servers ignore the condition
        if etag is not None and result.meta["e_tag"] not in (None, etag):
            raise ObjectChangedError(f"{self.url_of(key)} has changed")
        return memoryview(result.bytes())

    def read(self, key: str, max_bytes: int) -> ObjectVersion:
        """Return a small object. Raises OSError if the object is longer than
        `max_bytes`.
        """
        import obstore

        def get() -> ObjectVersion:
            result = obstore.get(self.store, key)
            if result.meta["size"] > max_bytes:
                reason = (
                    f"the object has {result.meta['size']} bytes, but at most"
                    f" {max_bytes} are expected"
                )
                raise OSError(errno.EFBIG, reason, self.url_of(key))
            return ObjectVersion(bytes(result.bytes()), _marks(result.meta))

        return self._repeated(key, get)

    def chunks(self, key: str, length: int) -> Iterator[memoryview]:
        """Yield the contents of an object of `length` bytes in pieces. Raises
        EOFError if the object is shorter.
        """
        for start in range(0, length, CHUNK_BYTES):
            yield self.read_range(key, start, min(length, start + CHUNK_BYTES))

    def info(self, key: str) -> ObjectInfo | None:
        """Return the length, the metadata and the ETag of an object; None if there is
        no such object.
        """
        import obstore

        def get() -> ObjectInfo:
            result = obstore.get(self.store, key, options={"head": True})
            metadata = {str(name): value for name, value in result.attributes.items()}
            return ObjectInfo(result.meta["size"], metadata, result.meta["e_tag"])

        try:
            return self._repeated(key, get)
        except FileNotFoundError:
            return None

    def list_sizes(self, below: str | None = None) -> dict[str, int]:
        """Return the length of each object in bytes, by key. If `below` is not None,
        list only the objects in this folder.
        """
        import obstore

        return self._repeated(
            below or "",
            lambda: {
                each["path"]: each["size"]
                for page in obstore.list(self.store, below)
                for each in page
            },
        )

    def list_folder(self, key: str) -> tuple[dict[str, int], list[str]]:
        """List the objects and folders directly below `key`.

        Returns:
            (length of each object in bytes by name, names of the folders).
        """
        import obstore

        listed = self._repeated(
            key, lambda: obstore.list_with_delimiter(self.store, key or None)
        )
        sizes = {
            each["path"].rpartition("/")[2]: each["size"] for each in listed["objects"]
        }
        folders = [
            prefix.rstrip("/").rpartition("/")[2]
            for prefix in listed["common_prefixes"]
        ]
        return sizes, folders

    def put(
        self,
        key: str,
        contents: Callable[[], Iterable[Chunk]],
        *,
        length: int,
        metadata: Mapping[str, str],
    ) -> None:
        """Write an object.

        If `contents` raises an exception, nothing is written, and an existing object
        does not change.

        Args:
            contents: function that yields the contents in pieces. If the request is
                repeated, the function is called again.
            length: length of the contents in bytes. The length determines how large the
                parts of an upload are.
        """
        import obstore

        def put() -> None:
            # contents of at most one piece are written with one request
            chunks = iter(contents())
            first = list(itertools.islice(chunks, 2))
            is_long = len(first) > 1
            parts = map(bytes, itertools.chain(first, chunks))
            obstore.put(
                self.store,
                key,
                parts if is_long else b"".join(first),
                attributes=dict(metadata),
                use_multipart=is_long,
                chunk_size=max(CHUNK_BYTES, -(-length // _MAX_PARTS)),
                max_concurrency=_PARTS_AT_ONCE,
            )

        self._repeated(key, put)

    def replace(
        self, key: str, data: bytes, expected: ObjectVersion | None
    ) -> ObjectVersion:
        """Write a small object if `expected` is still its current version. Return the
        new version.

        If `expected` is None, the object is written only if no such object exists.

        Raises:
            ObjectChangedError: another writer has changed the object.
            UncertainWriteError: it is not known whether the object was written.
        """
        import obstore
        from obstore.exceptions import (
            AlreadyExistsError,
            NotFoundError,
            PreconditionError,
        )

        mode: Any = "create" if expected is None else expected.marks
        try:
            result = self._repeated(
                key,
                lambda: obstore.put(
                    self.store, key, data, mode=mode, use_multipart=False
                ),
            )
        except AccessDeniedError:
            raise
        except (
            AlreadyExistsError,
            PreconditionError,
            NotFoundError,
            FileNotFoundError,
            ObjectStoreError,
        ) as error:
            # If an earlier attempt has written the object but its response was lost,
            # the store refuses the next attempt. The object then already contains
            # `data`.
            longest = max(len(data), len(expected.data) if expected else 0)
            current = self._read_after(error, key, longest)
            if current is not None and current.data == data:
                return current
            if isinstance(error, ObjectStoreError) and (current and current.data) == (
                expected and expected.data
            ):
                raise
            raise ObjectChangedError(
                f"another writer changed {self.url_of(key)}"
            ) from error
        return ObjectVersion(data, _marks(result))

    def copy(self, key: str, target: str) -> None:
        """Copy an object of this folder to the key `target`, within the server."""
        import obstore

        self._repeated(key, lambda: obstore.copy(self.store, key, target))

    def delete(self, keys: list[str]) -> None:
        """Delete objects. Objects that do not exist are skipped."""
        import obstore

        for start in range(0, len(keys), _KEYS_PER_DELETION):
            batch = keys[start : start + _KEYS_PER_DELETION]
            try:
                self._repeated(
                    batch[0], functools.partial(obstore.delete, self.store, batch)
                )
            except FileNotFoundError:
                # If one object does not exist, some stores do not delete the rest of
                # the batch either. So the objects are deleted one by one.
                for key in batch:
                    with contextlib.suppress(FileNotFoundError):
                        self._repeated(
                            key, functools.partial(obstore.delete, self.store, key)
                        )

    def _read_after(
        self, error: Exception, key: str, max_bytes: int
    ) -> ObjectVersion | None:
        """Read an object whose conditional write ended with `error`; None if there is
        no such object.

        If the object is longer than `max_bytes`, the result has no data.
        """
        try:
            return self.read(key, max_bytes)
        except FileNotFoundError:
            return None
        except OSError:
            return ObjectVersion(b"", {})
        except ObjectStoreError as unreadable:
            raise UncertainWriteError(
                f"it is not known whether {self.url_of(key)} was written, because its"
                f" store does not respond ({unreadable})"
            ) from error

    def _repeated(self, key: str, request: Callable[[], _Result]) -> _Result:
        """Call `request` and return the result. If no complete response arrives, call
        `request` again.
        """
        from obstore.exceptions import GenericError

        started = time.monotonic()
        with self._translated(key):
            for attempt in range(_ATTEMPTS - 1):
                try:
                    return request()
                except GenericError:
                    if time.monotonic() - started > _RETRY_TIMEOUT.total_seconds():
                        raise
                time.sleep(_FIRST_WAIT * 2**attempt)
            return request()

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Context manager that converts exceptions of obstore to FileNotFoundError or
        ObjectStoreError.

        The exceptions of a refused conditional write are not converted.
        """
        from obstore import exceptions as refused

        try:
            yield
        except (refused.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), self.url_of(key)
            ) from error
        except (refused.AlreadyExistsError, refused.PreconditionError):
            raise
        except refused.BaseError as error:
            reason = _reason(error)
            if "ConnectionRefused" in str(error):
                reason = re.sub(
                    r".* (https?://[^/ ]+).*", r"nothing answers at \1", reason
                )
            advice = (
                "check the URL, the network, and the credentials in the environment"
            )
            if scheme_of(self.url) == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ:
                advice += (
                    ": AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE for a"
                    " profile of ~/.aws, or AWS_SKIP_SIGNATURE=true for a public bucket"
                )
            failure = ObjectStoreError
            if isinstance(
                error, (refused.PermissionDeniedError, refused.UnauthenticatedError)
            ):
                failure = AccessDeniedError
                reason = "access denied"
                if scheme_of(self.url) == HUB_SCHEME:
                    reason = "there is no such repository, or it is private"
                    advice = f"check the URL; {HUB_CREDENTIALS}"
            raise failure(
                f"a request for {self.url_of(key)} failed: {reason}; {advice}, then try"
                " again"
            ) from error


def _marks(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return `ObjectVersion.marks` of the version that an answer of a store names."""
    marks = {name: answer[name] for name in ("e_tag", "version")}
    return {name: value for name, value in marks.items() if value is not None}


def _reason(error: Exception) -> str:
    """Return the first line of an error of obstore, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return without_credentials(line.partition(": <?xml")[0])[:300]


def _open_store(url: str) -> ObjectStore:
    with name_missing_extra("remote"):
        import obstore.store
        from obstore.exceptions import BaseError
    scheme = scheme_of(url) or ""
    host = re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]
    if not host:
        raise UsageError(
            f"the URL {url} names no bucket; give a URL such as s3://bucket/photos.edje"
        )
    # A URL with credentials is refused, because messages and results show the URL.
    if "@" in host:
        place = f"{scheme}://{host.rpartition('@')[2]}"
        raise UsageError(
            f"the URL at {place} contains a user name or a password; put credentials in"
            " the environment"
        )
    settings = _aws_profile() if scheme == "s3" else {}
    client: Any = {
        "timeout": _REQUEST_TIMEOUT,
        "read_timeout": _READ_TIMEOUT,
    }
    retry: Any = {
        "max_retries": _RETRIES,
        "retry_timeout": _RETRY_TIMEOUT,
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_WAIT),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    try:
        address, client["default_headers"] = web_address(url)
        # The environment may name a server without encryption for the other schemes.
        client["allow_http"] = scheme_of(address) != "https"
        return obstore.store.from_url(
            address, client_options=client, retry_config=retry, **settings
        )
    except (BaseError, ValueError) as error:
        raise UsageError(
            f"cannot use the URL {url}: {_reason(error)}; check the URL, and the"
            " variables of the environment, such as"
            f" {_ACCOUNTS.get(scheme, 'HTTPS_PROXY')}"
        ) from error


def _aws_profile() -> Json:
    """Return arguments of `obstore.store.from_url` for a store on S3: the credentials
    that boto3 finds, for example those of the profile that `AWS_PROFILE` names, and the
    region and the server of this profile.

    They are empty if `AWS_ACCESS_KEY_ID` or `AWS_SKIP_SIGNATURE` is set, because
    obstore reads these variables itself, or if there is no file of the AWS tools.
    """
    files = (
        ("AWS_CONFIG_FILE", "~/.aws/config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    )
    is_set = any(map(os.environ.get, ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")))
    if is_set or not any(
        os.path.isfile(os.path.expanduser(os.environ.get(variable) or path))
        for variable, path in files
    ):
        return {}
    with name_missing_extra("aws"):
        import botocore.session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    session = botocore.session.Session()
    try:
        provider = Boto3CredentialProvider(session)
        profile = session.get_scoped_config()
    except (BotoCoreError, ValueError) as error:
        raise UsageError(
            f"cannot use the profile in ~/.aws: {error}; correct AWS_PROFILE or the"
            " profile, or set AWS_ACCESS_KEY_ID"
        ) from error
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    settings: Json = {"credential_provider": provider}
    if region:
        settings["region"] = region
    endpoint = profile.get("endpoint_url")
    # obstore reads these variables itself
    if endpoint and not any(map(os.environ.get, _ENDPOINTS)):
        settings["endpoint"] = endpoint
    return settings
