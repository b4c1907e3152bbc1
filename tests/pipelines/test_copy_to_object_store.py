"""Copies to an S3-compatible server: whole or absent, also with two writers, kills,
and disturbed requests.
"""

import itertools
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines import copy_index
from storage_formats import EdjeError, IndexSpec
from storage_formats.remote.objects import ObjectFolder
from tests.command_line import command, environment
from tests.conftest import write_random_index
from tests.object_store import every, use_endpoint
from tests.pipelines.test_copy import check_equal

# they start a server
pytestmark = pytest.mark.slow
# a shard of several parts
LARGE = IndexSpec(200, 180, (64, 384), 4)


@pytest.fixture(autouse=True)
def environment_of_the_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    use_endpoint(monkeypatch, server)


numbers = itertools.count()


@pytest.fixture
def url():
    return f"s3://bucket/index-{next(numbers)}.edje"


def test_large_files_are_sent_in_parts(tmp_path, url, proxy):
    write_random_index(tmp_path / "large", LARGE)
    copy_index(tmp_path / "large", url)
    assert proxy.count("PUT", "partNumber") >= 2
    check_equal(tmp_path / "large", url)


def test_of_two_writers_one_wins(index, other):
    for _ in range(5):
        url = f"s3://bucket/race-{next(numbers)}.edje"
        with ThreadPoolExecutor(2) as pool:
            copies = [pool.submit(copy_index, each, url) for each in (index, other)]
        errors = [copy.exception() for copy in copies]
        assert sum(isinstance(error, EdjeError) for error in errors) == 1, errors
        check_equal(other if errors[0] else index, url)


def test_a_killed_copy_leaves_no_index_and_is_resumed(index, url, proxy):
    proxy.fault = every(1, "slow")
    for requests in (3, 9):
        stop = proxy.count("PUT", "") + requests
        process = subprocess.Popen(
            command("copy", index, url), env=environment(), stderr=subprocess.DEVNULL
        )
        while proxy.count("PUT", "") < stop:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "index.json" not in set(ObjectFolder.open(url).list_sizes())
    proxy.fault = lambda method, path: None
    result = copy_index(index, url)
    assert 0 < result.copied_files < result.files
    check_equal(index, url)
