"""The table of `storage_formats.system_calls`: without advice a change goes on, and
without a promise it is refused by name. Both leave an index that every reader accepts.
"""

import errno
import fcntl
import mmap
import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

from edje_index import copy_index, delete_rows
from storage_formats import EdjeError, TokenStore, verify_index
from storage_formats.errors import CorruptIndexError
from storage_formats.reading import engines
from storage_formats.system_calls import MissingCallError
from tests.conftest import REPO, write_arrays

SHAPE = (4, 32)
BLOCKS = np.random.default_rng(0).standard_normal((12, *SHAPE)).astype(np.float32)
LACKS = [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP]


def write(root):
    write_arrays(root, BLOCKS, BLOCKS[:, 0, :8], shard_size=8)


def use_all(folder):
    """Write, change, copy and read an index."""
    root = folder / "i.edje"
    write(root)
    delete_rows(root, rows=[3])
    copy_index(root, folder / "copy.edje")
    for each in (root, folder / "copy.edje"):
        assert not verify_index(each)
        for engine in ("auto", *engines()):
            blocks = TokenStore.open(each, engine=engine).fetch([11, 0, 2])
            np.testing.assert_allclose(
                blocks.astype(np.float32), BLOCKS[[11, 0, 2]], rtol=0.01
            )


def failing(monkeypatch, module, name, number, applies=lambda *_: True):
    """Let `module.name` fail with the error `number` where `applies` is true. Return a
    list that gets an item per failure.
    """
    real = getattr(module, name)
    failures = []

    def call(*arguments, **named):
        if not applies(*arguments):
            return real(*arguments, **named)
        failures.append(number)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, name, call)
    return failures


def is_directory(fd):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


ADVICE = {
    "fadvise": (os, "posix_fadvise", lambda *_: True),
    "copy_file_range": (os, "copy_file_range", lambda *_: True),
    "fsync of a directory": (os, "fsync", is_directory),
    "mmap of a file": (mmap, "mmap", lambda fd, *_: fd >= 0),
    "O_DIRECT": (os, "open", lambda _, flags, *__: bool(flags & os.O_DIRECT)),
}
PROMISES = {
    "flock": (fcntl, "flock", lambda *_: True),
    "fsync": (os, "fsync", lambda fd: not is_directory(fd)),
    "rename": (os, "replace", lambda *_: True),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux")
@pytest.mark.parametrize("number", LACKS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ADVICE)
def test_a_change_goes_on_without_advice(tmp_path, monkeypatch, call, number):
    module, name, applies = ADVICE[call]
    failures = failing(monkeypatch, module, name, number, applies)
    use_all(tmp_path)
    assert failures or call == "O_DIRECT"


@pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux")
def test_a_copy_that_the_kernel_leaves_goes_on(tmp_path, monkeypatch):
    real = os.copy_file_range
    calls = []

    def copy_a_part(source, target, count):
        calls.append(count)
        if len(calls) % 2 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(source, target, min(count, 1000))

    monkeypatch.setattr(os, "copy_file_range", copy_a_part)
    use_all(tmp_path)
    assert calls


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("call", PROMISES)
def test_a_change_is_refused_without_a_promise(tmp_path, monkeypatch, call, number):
    root = tmp_path / "i.edje"
    write(root)
    module, name, applies = PROMISES[call]
    with monkeypatch.context() as faults:
        failing(faults, module, name, number, applies)
        with pytest.raises(MissingCallError, match=f"{call} does not .*i.edje"):
            delete_rows(root, rows=[3])
        with pytest.raises(MissingCallError, match=r"new\.edje"):
            write(tmp_path / "new.edje")
    assert not verify_index(root)
    delete_rows(root, rows=[3])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("part", ["index.json", "rows", "embeddings", "tokens"])
def test_a_file_of_trouble_is_not_called_damaged(tmp_path, monkeypatch, part, number):
    root = tmp_path / "i.edje"
    write(root)
    failing(
        monkeypatch, os, "open", number, lambda path, *_: f"i.edje/{part}" in str(path)
    )
    with pytest.raises(EdjeError, match=f"{part}.*{os.strerror(number)}") as caught:
        copy_index(root, tmp_path / "copy.edje")
    assert not isinstance(caught.value, CorruptIndexError)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fadvise64,copy_file_range,io_setup,statx", "ENOSYS"),
        *(
            pytest.param(call, number, marks=pytest.mark.slow)
            for call, number in (
                ("fadvise64", "EPERM"),
                ("copy_file_range", "EXDEV"),
                ("copy_file_range", "EPERM"),
                ("io_setup", "EPERM"),
                ("io_setup", "EAGAIN"),
                ("statx", "EPERM"),
                ("mincore", "ENOSYS"),
                ("sendfile", "EINVAL"),
                ("fallocate", "EOPNOTSUPP"),
            )
        ),
    ],
)
def test_advice_that_the_kernel_refuses(tmp_path, call, number):
    write(tmp_path / "i.edje")
    code = (
        "from edje_index import copy_index\n"
        "from storage_formats import TokenStore\n"
        "copy_index('i.edje', 'copy.edje')\n"
        "print(TokenStore.open('copy.edje').fetch([1, 2]).shape)"
    )
    program = [sys.executable, "-c", code]
    faults = ["-e", f"trace={call}", "-e", f"inject={call}:error={number}"]
    done = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, *faults, *program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "(2, 4, 32)", done.stderr


def test_a_link_to_another_place_is_refused_before_the_change(tmp_path):
    for name in ("tokens", "tokens/bf16", "rows", "build", "ann", "build/erased/rows"):
        root = tmp_path / f"{name.replace('/', '-')}.edje"
        write(root)
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        outside = tmp_path / f"outside-{root.name}"
        shutil.move(folder, outside)
        folder.symlink_to(outside)
        with pytest.raises(OSError, match="leads outside the directory"):
            delete_rows(root, rows=[1])


# Prints what each place that looks for files of the user says.
NOBODY = """
from storage_formats import EdjeError
from storage_formats.cache import cache_directory
from storage_formats.remote.objects import _aws_profile
from storage_formats.remote.urls import hub_address
print(hub_address("hf://datasets/owner/name")[4], _aws_profile())
try:
    cache_directory()
except EdjeError as error:
    print(error)
"""


def test_a_user_without_a_name_and_a_home_needs_no_home():
    """As in a container with a random user id."""
    done = subprocess.run(
        ["unshare", "--user", "--map-user=12345", sys.executable, "-c", NOBODY],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPO,
        env={"PATH": os.environ["PATH"]},
    )
    if "unshare" in done.stderr:
        pytest.skip(f"needs user namespaces: {done.stderr}")
    assert done.stdout.splitlines() == [
        "{} {}",
        "this user has no home directory for cached files; set EDJE_CACHE to a"
        " directory",
    ], done.stderr
