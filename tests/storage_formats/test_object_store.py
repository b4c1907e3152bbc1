"""Indexes on an S3-compatible server: reads equal local reads, also if responses
are lost, late, short or refused.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines import copy_index, quantize_index
from storage_formats import (
    CorruptIndexError,
    IncompleteIndexError,
    TokenStore,
    UsageError,
    read_rows,
)
from storage_formats.format.layout import Layout
from storage_formats.remote import objects
from storage_formats.remote.objects import ObjectFolder, ObjectStoreError
from tests.conftest import rows_path, same_bits, write_files
from tests.object_store import every, use_endpoint
from tests.storage_formats.reading_cases import SPEC, flip

# they start a server
pytestmark = pytest.mark.slow
BUCKET = "bucket"
URL = f"s3://{BUCKET}/photos.edje"
TOKENS = "tokens/bf16/c."


@pytest.fixture(scope="module")
def stored(server, built):
    """The random index, which every test of this module can read below `URL`."""
    with pytest.MonkeyPatch.context() as patch:
        use_endpoint(patch, server)
        copy_index(built[0], URL)
    return built


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, server):
    """An empty cache directory for each test. Blocks are not cached, because most
    tests fetch the same ones again.
    """
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDJE_CACHE_BYTES", "0")
    use_endpoint(monkeypatch, server)
    return tmp_path / "cache"


numbers = itertools.count()


@pytest.fixture
def own(server, built, tmp_path):
    """An index of the test's own: its directory and its URL."""
    root = tmp_path / "own.edje"
    url = f"s3://{BUCKET}/own-{next(numbers)}.edje"
    shutil.copytree(built[0], root)
    copy_index(root, url)
    return root, url


def test_an_index_opens_by_plain_http(built, server, whole):
    copy_index(built[0], "s3://public/photos.edje")
    with TokenStore.open(f"{server}/public/photos.edje") as store:
        assert same_bits(store.fetch([1, 200]), whole["bf16"][[1, 200]])


def test_profiles_of_the_aws_tools_are_read(
    stored, server, whole, tmp_path, monkeypatch
):
    pytest.importorskip("botocore")
    keys = f"aws_access_key_id = {os.environ['AWS_ACCESS_KEY_ID']}\n"
    keys += f"aws_secret_access_key = {os.environ['AWS_SECRET_ACCESS_KEY']}\n"
    profile = f"[profile lab]\nregion = us-east-1\nendpoint_url = {server}\n"
    credentials = f"[default]\naws_access_key_id = other\n[lab]\n{keys}"
    write_files(tmp_path / ".aws", {"config": profile, "credentials": credentials})
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with TokenStore.open(URL) as store:
        assert same_bits(store.fetch([1, 200]), whole["bf16"][[1, 200]])
    monkeypatch.setenv("AWS_PROFILE", "lob")
    with pytest.raises(UsageError, match=r"profile \(lob\)"):
        TokenStore.open(URL)


@pytest.mark.parametrize("fault", ["reset", "503", "slow", "truncate", "lost"])
def test_blocks_are_equal_if_every_third_request_is_disturbed(
    stored, whole, proxy, fault
):
    proxy.fault = every(3, fault)
    row_ids = np.arange(0, SPEC.rows, 150)
    with TokenStore.open(URL) as store:
        for _ in range(3):
            assert same_bits(store.fetch(row_ids), whole["bf16"][row_ids])
    disturbed = proxy.count("GET", TOKENS)
    assert disturbed >= 6 if fault == "slow" else disturbed > 6


@pytest.mark.parametrize("fault", ["503", "reset", "truncate"])
def test_a_store_that_never_responds_gives_an_error_that_names_the_object(
    stored, proxy, monkeypatch, fault
):
    monkeypatch.setattr(objects, "_RETRIES", 1)
    monkeypatch.setattr(objects, "_ATTEMPTS", 2)
    store = TokenStore.open(URL)
    store.fetch([1])
    proxy.fault = every(1, fault, TOKENS)
    with pytest.raises(ObjectStoreError, match=f"{URL}/tokens/bf16/c.0.0.0 failed"):
        store.fetch([1])
    proxy.fault = every(1 << 40, fault)
    assert len(store.fetch([1])) == 1


def test_refused_credentials_are_named_also_if_they_refuse_a_conditional_write(proxy):
    proxy.fault = every(1, "403")
    folder = ObjectFolder.open(URL)
    for request in (
        lambda: folder.info("index.json"),
        lambda: folder.replace("build/claim.json", b"x", None),
    ):
        with pytest.raises(objects.AccessDeniedError, match="the credentials"):
            request()


def test_an_error_shows_no_password_of_the_endpoint(monkeypatch):
    monkeypatch.setattr(objects, "_RETRIES", 0)
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:word@127.0.0.1:1")
    with pytest.raises(
        ObjectStoreError, match=r"failed: nothing answers at .*127\.0\.0\.1:1;"
    ) as caught:
        ObjectFolder.open("s3://bucket").info("x")
    assert "word" not in str(caught.value)


def test_neighbouring_records_take_one_request(stored, proxy):
    with TokenStore.open(URL) as store:
        # gaps of a few hundred bytes
        store.fetch([1, 2, 5, 9])
        assert proxy.count("GET", TOKENS) == 1
        # two shards
        store.fetch([1, 65])
        assert proxy.count("GET", TOKENS) == 3


def test_only_tokens_are_requested_again(stored, proxy):
    for _ in range(2):
        before = len(proxy.requests)
        with TokenStore.open(URL) as store:
            store.fetch([1, 250])
        read_rows(URL, [1])
    paths = {
        path.split("photos.edje/")[1]
        for method, path, _ in proxy.requests[before:]
        if method == "GET"
    }
    assert paths == {"index.json", "tokens/bf16/c.0.0.0", "tokens/bf16/c.3.0.0"}


def test_a_reader_of_a_dropped_precision_is_told_to_open_the_index_again(own):
    root, url = own
    with TokenStore.open(url) as store:
        quantize_index(root, drop=["bf16"])
        copy_index(root, url, replace=True)
        with pytest.raises(CorruptIndexError, match=r"Call refresh\(\), or open"):
            store.fetch([1])
        with pytest.raises(UsageError, match="'bf16'; choose one of: fp8, nvfp4"):
            store.refresh()


def overwrite(url, key, data):
    ObjectFolder.open(url).put(key, lambda: [data], length=len(data), metadata={})


def test_many_objects_are_deleted_and_listed_with_few_requests(server, proxy):
    folder = ObjectFolder.open(f"s3://{BUCKET}/many-{next(numbers)}")
    for number in range(9):
        overwrite(folder.url, str(number), b"content")
    proxy.fault = lambda method, path: (
        "truncate" if proxy.count("GET", "list-type") == 1 else None
    )
    assert sorted(folder.list_sizes()) == [str(number) for number in range(9)]
    before = len(proxy.requests)
    folder.delete([*map(str, range(8)), "absent"])
    assert len(proxy.requests) == before + 1
    assert list(folder.list_sizes()) == ["8"]


def test_a_damaged_block_is_an_error_that_names_its_row_and_object(own):
    root, url = own
    path = Layout(root).token_shard("bf16", 1)
    flip(path, 3 * 512)
    overwrite(url, "tokens/bf16/c.1.0.0", path.read_bytes())
    with TokenStore.open(url) as store:
        with pytest.raises(CorruptIndexError, match=f"{url}/tokens") as caught:
            store.fetch([66, 67, 68])
        assert caught.value.row_ids == (67,)
        assert len(store.fetch([66, 68])) == 2


@pytest.mark.parametrize("key", ["checksums/bf16/00000001.crc32c", "rows"])
def test_a_damaged_file_never_enters_the_cache(own, cache, key):
    root, url = own
    if key == "rows":
        key = rows_path(root).relative_to(root).as_posix()

    def read():
        return (
            read_rows(url, [66]) if "rows" in key else TokenStore.open(url).fetch([66])
        )

    data = (root / key).read_bytes()
    flip(root / key, -1)
    overwrite(url, key, (root / key).read_bytes())
    for _ in range(2):
        with pytest.raises(CorruptIndexError, match=f"{key} is not the file"):
            read()
    assert not list(cache.rglob(Path(key).name))
    overwrite(url, key, data)
    assert len(read()) == 1


def test_a_missing_or_short_object_is_an_error(own):
    root, url = own
    key = "tokens/bf16/c.1.0.0"
    store = TokenStore.open(url)
    ObjectFolder.open(url).delete([key])
    with pytest.raises(CorruptIndexError, match=f"{key} is missing"):
        store.fetch([66])
    overwrite(url, key, (root / key).read_bytes()[:700])
    with pytest.raises(CorruptIndexError, match=f"{key} is missing, or ends before"):
        store.fetch([66])
    overwrite(url, "tokens/bf16/c.4.0.0", b"short")
    with pytest.raises(CorruptIndexError, match=r"c.4.0.0 has 5 bytes"):
        TokenStore.open(url)


def test_what_is_no_index_is_refused(server, stored):
    overwrite("s3://bucket/begun", "build/claim.json", b"{}")
    overwrite("s3://bucket/noise", "index.json", b"\xff\xfe{")
    for url, error, words in (
        ("s3://bucket/nothing", UsageError, "there is no index at s3://bucket/nothing"),
        ("s3:///photos.edje", UsageError, "names no bucket"),
        ("s3://bucket/begun", IncompleteIndexError, "is unfinished"),
        ("s3://bucket/noise", CorruptIndexError, "s3://bucket/noise/index"),
    ):
        with pytest.raises(error, match=words):
            TokenStore.open(url)
    with pytest.raises(UsageError, match="'portable' cannot read"):
        TokenStore.open(URL, engine="portable")
