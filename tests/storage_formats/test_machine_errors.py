"""Trouble of the machine is named as such, never as damage of the index."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from storage_formats import TokenStore
from storage_formats.errors import MachineError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.storage_formats.reading_cases import SPEC, linux

TROUBLES = [errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ESTALE]


@linux
@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
@pytest.mark.parametrize("folder", ["tokens", "checksums", "embeddings", "shards"])
def test_a_file_that_cannot_be_opened_is_not_called_damaged(
    built, monkeypatch, number, folder
):
    index = CommittedIndex.open(built[0])
    store = TokenStore.open(built[0])
    real = os.open

    def refuse(path, *rest, **named):
        if f"/{folder}" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **named)

    def read():
        store.fetch([1, 70])
        read_embeddings(index, np.arange(SPEC.rows))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=f"{folder}.*: {os.strerror(number)}; "):
        read()
