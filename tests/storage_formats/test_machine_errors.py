"""Trouble of the machine is named as such, never as damage of the index."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from storage_formats import TokenStore, verify_index
from storage_formats.errors import MachineError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import REPO
from tests.storage_formats.reading_cases import SPEC, linux

TROUBLES = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EAGAIN, errno.ESTALE]


@linux
@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
@pytest.mark.parametrize("folder", ["tokens", "checksums", "embeddings", "shards"])
def test_a_file_that_cannot_be_opened_is_not_called_damaged(built, monkeypatch, number, folder):
    index, store = CommittedIndex.open(built[0]), TokenStore.open(built[0])
    real = os.open

    def refuse(path, *rest, **named):
        if f"/{folder}" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=rf"cannot read .*{folder}.*: {os.strerror(number)}; "):
        read_embeddings(index, np.arange(SPEC.rows)) if folder == "embeddings" else store.fetch([1, 70])


_FEW_DESCRIPTORS = """
import resource, sys
from storage_formats import EdjeError, TokenStore, verify_index
store = TokenStore.open(sys.argv[1])
import pyarrow.parquet, storage_formats.verify
held = [open(sys.argv[1] + "/index.json") for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 1, 64))
for call in (lambda: store.fetch(range(300)), lambda: verify_index(sys.argv[1])):
    try:
        print(call())
    except EdjeError as error:
        print(type(error).__name__, error)
"""


@linux
@pytest.mark.slow  # starts a process
def test_too_few_descriptors_are_named(built):
    done = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS, str(built[0])], capture_output=True, text=True, cwd=REPO, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert line.startswith("MachineError cannot read ")
        assert "raise the limit on open files (ulimit -n)" in line
    assert len(done.stdout.splitlines()) == 2
    assert verify_index(built[0]) == []
