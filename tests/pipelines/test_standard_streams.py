"""Standard output and standard error that are closed, full, slow, or of an encoding
that lacks a letter.
"""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from storage_formats import verify_index
from tests.conftest import write_arrays

SHELL = """exec "$0" -m pipelines.cli "$@" """


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("streams") / "i.edje"
    write_arrays(root, np.ones((3, 2, 8), np.float32), np.ones((3, 4), np.float32))
    return root


def command(redirections, *arguments, encoding="utf-8"):
    return subprocess.run(
        ["bash", "-c", SHELL + redirections, sys.executable, *map(str, arguments)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_fail_a_command(index, tmp_path, closed):
    out = tmp_path / "copy.edje"
    done = command(closed, "copy", index, out)
    assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0)
    assert verify_index(out) == []


def test_a_full_disk_ends_the_command_with_one_line(index):
    done = command(">/dev/full", "info", "--json", index)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: cannot write standard output: No space left")


def test_messages_that_nobody_reads_do_not_fail_a_job(index, tmp_path):
    # standard error is a pipe that nobody reads
    done = command("2> >(exec true)", "copy", index, tmp_path / "copy.edje", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)


@pytest.mark.parametrize("encoding", ["koi8-r", "utf-8"])
def test_a_letter_outside_the_encoding_is_escaped(tmp_path, encoding):
    missing = tmp_path / "smile ☺ \udce9.edje"
    done = command("", "info", missing, encoding=encoding)
    assert done.returncode == 2
    text = done.stderr.decode(encoding)
    assert text.startswith("error: ")
    assert "smile " in text
    assert "\\udce9" in text
    assert ("☺" in text) == (encoding == "utf-8")


def test_a_descriptor_that_does_not_block_gets_all_output(index):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # fill the pipe, so that the first write of the command cannot proceed
    filler = 0
    try:
        while True:
            filler += os.write(writer, b"x" * 4096)
    except BlockingIOError:
        pass
    received = []

    def drain():
        while piece := os.read(reader, 65536):
            received.append(piece)

    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "info", str(index), "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    thread = threading.Thread(target=drain)
    threading.Timer(2, thread.start).start()
    _, messages = process.communicate(timeout=60)
    thread.join(10)
    assert (process.returncode, messages) == (0, b"")
    assert json.loads(b"".join(received)[filler:])["rows"] == 3
