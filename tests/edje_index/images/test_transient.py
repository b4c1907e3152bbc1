"""Trouble that passes is waited for; trouble that stays is no property of the image."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from edje_index.images import transient
from edje_index.images.decode import ImageError
from edje_index.images.transient import TransientInputError, retry
from edje_index.inputs.refs import InputRef, read_bytes

ERRORS = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT")
CONTENT = b"0123456789"


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made; none takes time."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


@pytest.fixture
def ref(tmp_path):
    path = tmp_path / "photos" / "a.jpg"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    (path.parent / "b.jpg").write_bytes(CONTENT)
    return InputRef(str(path), os.fsencode(path), size=len(CONTENT))


def failing(call: Callable, error: Exception, times: int) -> Callable:
    """`call`, but the first `times` calls raise `error`."""
    left = iter(range(times))

    def wrapper(*arguments: object, **options: object) -> object:
        if next(left, None) is not None:
            raise error
        return call(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("call", ["open", "fstat", "pread"])
@pytest.mark.parametrize("name", ERRORS)
def test_passing_trouble_is_waited_for(
    name,
    call,
    ref,
    pauses,
    monkeypatch,
):
    error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    monkeypatch.setattr(os, call, failing(getattr(os, call), error, times=2))
    assert read_bytes(ref) == CONTENT
    assert pauses == list(transient.PAUSES[:2])


def test_a_read_that_ends_early_is_repeated(ref, pauses, monkeypatch):
    pread = os.pread
    left = iter([b"0123", b""])
    monkeypatch.setattr(
        os, "pread", lambda *arguments: next(left, None) or pread(*arguments)
    )
    assert read_bytes(ref) == CONTENT
    monkeypatch.setattr(os, "pread", lambda *arguments: b"")
    with pytest.raises(TransientInputError, match="ended 10 bytes before the end"):
        read_bytes(ref)
    assert pauses == list(transient.PAUSES)


def test_memory_is_waited_for(pauses):
    assert retry(failing(lambda: 7, MemoryError(), times=3), "a.jpg", 1) == 7
    assert pauses == list(transient.PAUSES)
    with pytest.raises(
        TransientInputError, match=r"cannot decode a.jpg: too little memory"
    ):
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1 << 60)
    # more memory than any sound image needs is free
    with pytest.raises(ImageError, match="too-expensive"):
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1)
