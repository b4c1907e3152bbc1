"""Sources on web servers and on the Hugging Face Hub: they list and read as local
files do.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest

from edje_index.images.transient import TransientInputError
from edje_index.inputs import ranges, tars
from edje_index.inputs.refs import InputRef, read_bytes
from pipelines import update_index
from pipelines.cli.info import failed_rows
from pipelines.progress.events import StatusMessage
from pipelines.sources import open_source, open_sources
from pipelines.sources.base import file_input
from pipelines.sources.kinds import iter_all
from storage_formats import TokenStore, UsageError, read_rows
from storage_formats.remote import files as remote
from tests.object_store import use_endpoint
from tests.pipelines.conftest import run_build
from tests.pipelines.test_build_packed import _pack
from tests.web_server import web_server


@pytest.fixture(scope="module")
def running():
    with web_server() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    for part in (running.files, running.faults, running.responses, running.requests):
        part.clear()
    running.ranges = True
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "_LONGEST_PAUSE", 0.02)
    return running


def scan(spec: str) -> list[InputRef]:
    return list(iter_all(open_sources([spec])))


def contents(refs: list[InputRef], base: str) -> list[tuple[str, bytes, object]]:
    """Name below `base`, bytes and metadata of each input."""
    return [(ref.uri.removeprefix(base), read_bytes(ref), ref.metadata) for ref in refs]


@pytest.mark.parametrize(
    "suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst", "zip", "parquet"]
)
def test_archives_read_in_any_order(
    server,
    tmp_path,
    photos,
    monkeypatch,
    suffix,
):
    for module, name, value in [
        (ranges, "BLOCK_BYTES", 700),
        (tars, "_CHUNK", 500),
        (ranges, "KEPT_BYTES", 1000),
    ]:
        monkeypatch.setattr(module, name, value)
    path = _packed_as(suffix, photos, tmp_path)
    server.files[f"/{path.name}"] = path.read_bytes()
    for spec in (str(path), f"{server.url}/{path.name}"):
        refs = scan(spec)
        data = {ref: read_bytes(ref) for ref in refs}
        assert list(data.values()) == [
            photo.read_bytes() for photo in sorted(photos.glob("*.jpg"))
        ]
        orders = [refs[::-1], random.Random(0).sample(refs, len(refs))]
        assert all(read_bytes(ref) == data[ref] for order in orders for ref in order)


def _packed_as(suffix: str, photos: Path, folder: Path) -> Path:
    path = folder / f"packed.{suffix}"
    if suffix in ("zip", "parquet"):
        (folder / "packed").mkdir()
        _pack(photos, folder / "packed")
        return next((folder / "packed").glob(f"*.{suffix}"))
    names = sorted(photo.name for photo in photos.glob("*.jpg"))
    subprocess.run(["tar", "-C", photos, "-caf", path, *names], check=True)
    return path


@dataclass
class ChangingFile:
    """A file whose contents and ETag the server exchanges before the request with
    the number `change_at`.
    """

    versions: list[tuple[bytes, str]]
    change_at: int = 1 << 30
    requests: int = 0

    def answer(self, headers: dict[str, str]) -> Any:
        data, etag = self.versions[self.requests >= self.change_at]
        self.requests += 1
        first, last = (
            int(number) for number in headers["Range"].removeprefix("bytes=").split("-")
        )
        part = data[first : last + 1]
        content_range = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return 206, {"Content-Range": content_range, "ETag": etag}, part


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("tar", "etag"),
        ("tar.gz", "length"),
        ("tar.zst", "etag"),
        ("zip", "length"),
        ("parquet", "etag"),
    ],
)
def test_a_file_that_changes_between_requests_is_never_mixed(
    server,
    tmp_path,
    photos,
    monkeypatch,
    suffix,
    change,
):
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 700)
    path = _packed_as(suffix, photos, tmp_path)
    data = path.read_bytes()
    versions = [
        (data, '"a"'),
        (
            (bytes(len(data)), '"b"')
            if change == "etag"
            else (data[:-600] + bytes(601), "")
        ),
    ]
    outcomes: list[object] = []
    for change_at in range(1 if suffix == "zip" else 3, 9):
        server.responses[f"/{path.name}"] = ChangingFile(versions, change_at).answer
        try:
            outcomes.append(len(scan(f"{server.url}/{path.name}")))
        except (TransientInputError, UsageError) as error:
            outcomes.append(
                re.sub(
                    r".*(has changed while it was) (listed|read).*", r"\1", str(error)
                )
            )
    assert "has changed while it was" in outcomes
    assert {*outcomes} <= {10, "has changed while it was"}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "txt", "json"])
def test_lists_on_a_server(server, suffix):
    values = [
        "photos/a.jpg",
        f"{server.url}/other/b.jpg",
        "/etc/passwd",
        "file:///etc/passwd",
        "../up.jpg",
    ]
    lines = {
        "csv": ["url", *values],
        "tsv": ["url\tx", *(f"{value}\ty" for value in values)],
        "jsonl": [json.dumps({"url": value}) for value in values],
        "txt": values,
        "json": [json.dumps([{"image": value, "caption": "x"} for value in values])],
    }
    server.files[f"/lists/list.{suffix}"] = "\n".join(lines[suffix]).encode()
    server.files["/lists/photos/a.jpg"] = b"a"
    server.files["/other/b.jpg"] = b"b"
    refs = scan(f"{server.url}/lists/list.{suffix}")
    assert [ref.uri for ref in refs[:2]] == [
        f"{server.url}/lists/photos/a.jpg",
        f"{server.url}/other/b.jpg",
    ]
    assert [read_bytes(ref) for ref in refs[:2]] == [b"a", b"b"]
    assert [ref.problem for ref in refs[2:]] == ["bad-list-line"] * 3
    if suffix == "json":
        server.files["/lists/bad.json"] = b"[3]"
        with pytest.raises(UsageError, match=rf"{server.url}/lists/bad.json: line 1"):
            scan(f"{server.url}/lists/bad.json")


def test_names_in_a_list_on_a_server_are_no_addresses(server):
    names = ["shot #1.jpg", "shot #2.jpg", "é.jpg"]
    server.files["/dir/list.txt"] = "\n".join(names).encode()
    for name in names:
        server.files[f"/dir/{quote(name)}"] = name.encode()
    refs = scan(f"{server.url}/dir/list.txt")
    assert [read_bytes(ref).decode() for ref in refs] == names
    # the uri is enough to read the photo again
    again = [file_input(ref.uri.encode()) for ref in refs]
    assert [read_bytes(ref).decode() for ref in again] == names


def test_patterns_of_urls(server):
    for number in range(3):
        server.files[f"/{number}.jpg"] = b"photo"
    assert [ref.uri for ref in scan(server.url + "/{0..2}.jpg")] == [
        f"{server.url}/{number}.jpg" for number in range(3)
    ]
    assert [ref.uri for ref in scan(server.url + "/photo?id=3")] == [
        f"{server.url}/photo?id=3"
    ]
    with pytest.raises(UsageError, match="web servers do not list directories"):
        open_source(f"{server.url}/photos")
    with pytest.raises(UsageError, match=r"cannot read .*: Invalid IPv6 URL"):
        open_source("http://[::1/a.jpg")


@pytest.mark.parametrize(
    ("revision", "encoded"),
    [
        ("v1", "v1"),
        ("refs/pr/1", "refs%2Fpr%2F1"),
        ("refs%2Fconvert%2Fparquet", "refs%2Fconvert%2Fparquet"),
    ],
)
def test_a_folder_on_the_hub(
    server,
    photos,
    tmp_path,
    monkeypatch,
    revision,
    encoded,
):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "secret\n")
    (tmp_path / "packed").mkdir()
    _pack(photos, tmp_path / "packed")
    data = (tmp_path / "packed/c.parquet").read_bytes()
    names = ["train-00000.parquet", "train-00001.parquet"]
    for name in names:
        server.files[f"/datasets/owner/set/resolve/{encoded}/data/{name}"] = data
    sent: list[dict[str, str]] = []

    def page(number: int) -> Callable[[dict[str, str]], Any]:
        def answer(headers: dict[str, str]) -> Any:
            sent.append(headers)
            following = {} if number else {"Link": '</page2>; rel="next"'}
            entry = {"type": "file", "path": f"data/{names[number]}", "size": len(data)}
            return 200, following, json.dumps([entry]).encode()

        return answer

    server.responses[f"/api/datasets/owner/set/tree/{encoded}/data"] = page(0)
    server.responses["/page2"] = page(1)
    for spec in (
        f"hf://datasets/owner/set@{revision}/data",
        f"hf://datasets/owner/set@{revision}/data/*.parquet",
    ):
        refs = scan(spec)
        assert [ref.uri for ref in refs[9:11]] == [
            f"hf://datasets/owner/set@{revision}/data/train-00000.parquet!image/9",
            f"hf://datasets/owner/set@{revision}/data/train-00001.parquet!image/0",
        ]
        assert read_bytes(refs[12]) == (photos / "02.jpg").read_bytes()
    assert {headers["Authorization"] for headers in sent} == {"Bearer secret"}
    with pytest.raises(UsageError, match="names no repository"):
        open_source("hf://owner")
    monkeypatch.setenv("HF_TOKEN", "sec\nret")
    with pytest.raises(UsageError, match="the token of the Hub has line") as caught:
        open_source(f"hf://datasets/owner/set@{revision}/data")
    assert "ret" not in str(caught.value).replace("are not", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_list_of_a_folder_gives_no_token_away_and_ends(server, monkeypatch, host):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    path = "/api/datasets/owner/set/tree/main/data"
    link = f'<{server.url.replace("127.0.0.1", host)}{path}>; rel="next"'
    monkeypatch.setenv("HF_TOKEN", "secret")
    tokens = []

    def answer(headers: Any) -> tuple[int, dict[str, str], bytes]:
        tokens.append(headers.get("Authorization"))
        return 200, {"Link": link}, b"[]"

    server.responses[path] = answer
    with pytest.raises(
        UsageError, match=f"the list of files continues at http://{host}"
    ):
        open_source("hf://datasets/owner/set/data")
    assert tokens == ["Bearer secret", None][: 1 + (host == "localhost")]


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        '{"error": "sign in"}',
        "5",
        '["a"]',
        '[{"path": "a"}]',
        '[{"path": "a", "type": "file", "size": null}]',
        '[{"path": "a", "type": "file", "size": 1e999}]',
    ],
)
def test_an_answer_of_the_hub_that_lists_no_files(server, monkeypatch, answer):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.files["/api/datasets/owner/set/tree/main/data"] = answer.encode()
    with pytest.raises(UsageError, match=r"/data is no list of files: .*; check"):
        open_source("hf://datasets/owner/set/data")


def _listing(keys: list[str], prefix: str) -> str:
    """The answer of an S3 server to a request for a folder."""
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    folders = {f"{prefix}{name.partition('/')[0]}/" for name in below if "/" in name}
    return (
        "<ListBucketResult><IsTruncated>false</IsTruncated>"
        + "".join(
            f"<Contents><Key>{prefix}{name}</Key><Size>0</Size><ETag>e</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in below
            if "/" not in name
        )
        + "".join(
            f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        + "</ListBucketResult>"
    )


def test_folders_of_a_bucket_without_a_name_or_without_a_list(
    monkeypatch,
):
    keys = ["/x.jpg", "b.jpg", "empty/", "sub/c.jpg"]
    pages = {"sub/": _listing(keys, "sub/")}
    with web_server() as server:

        def answer(method: str, path: str, *_: object) -> Any:
            prefix = parse_qs(urlsplit(path).query).get("prefix", [""])[0]
            page = pages.get(prefix) or _listing(keys, prefix)
            return 200, {"Content-Type": "application/xml"}, page.encode()

        server.service = answer
        use_endpoint(monkeypatch, server.url)
        remote._bucket.cache_clear()
        source = open_source("s3://photos")
        assert [ref.uri for ref in source.iter_inputs()] == [
            "s3://photos/b.jpg",
            "s3://photos/sub/c.jpg",
        ]
        assert source.ignored["(hidden)"] == 1
        pages["sub/"] = "<html>Please accept the terms</html>"
        with pytest.raises(TransientInputError, match="/sub: the server lists"):
            list(source.iter_inputs())
    remote._bucket.cache_clear()


def test_a_build_from_addresses(
    server,
    tmp_path,
    photos,
    config,
    monkeypatch,
):
    lines = ["url,caption"]
    for path in sorted(photos.glob("*.jpg")):
        server.files[f"/{path.name}"] = path.read_bytes()
        lines.append(f"{server.url}/{path.name},photo {path.stem}")
    lines.append(f"{server.url}/gone.jpg,nothing")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    server.faults["/02.jpg"] = ["503"] * 4
    server.faults["/04.jpg"] = ["reset", "truncate", "slow"]
    request = replace(
        config(), sources=(str(tmp_path / "list.csv"),), out=tmp_path / "web.edje"
    )
    result = run_build(request, lambda event: None)
    assert (result.inputs, result.indexed, result.failed) == (11, 8, 3)
    failed = {
        row["uri"].rpartition("/")[2]: row["reason"] for row in failed_rows(request.out)
    }
    assert failed == {
        "02.jpg": "unreachable",
        "07.jpg": "not-an-image",
        "gone.jpg": "missing",
    }
    assert (
        read_rows(request.out, columns=["caption"])["caption"].to_pylist()[4]
        == "photo 04"
    )
    retried = update_index(request.out, retry_failed=True, engine="inline")
    # gone.jpg is missing still, so it counts as failed
    assert (retried.unchanged, retried.deleted, retried.new) == (8, 2, 1)
    reasons = [row["reason"] for row in failed_rows(request.out)]
    assert sorted(reasons) == ["missing", "not-an-image"]


def test_an_update_keeps_the_rows_of_addresses_that_cannot_be_read_now(
    server, tmp_path, photos, config
):
    names = ["00.jpg", "01.jpg", "02.jpg", "04.jpg", "gone.jpg"]
    for name in names[:4]:
        server.files[f"/{name}"] = (photos / name).read_bytes()
    (tmp_path / "list.txt").write_text(
        "".join(f"{server.url}/{name}\n" for name in names)
    )
    request = replace(
        config(), sources=(str(tmp_path / "list.txt"),), out=tmp_path / "web.edje"
    )
    run_build(request, lambda event: None)
    server.faults["/00.jpg"] = ["503"] * 4
    server.faults["/01.jpg"] = ["403"]
    server.faults["/gone.jpg"] = ["503"] * 4
    del server.files["/04.jpg"]
    events: list[Any] = []
    result = update_index(
        request.out, engine="inline", dry_run=True, on_event=events.append
    )
    assert (result.unchanged, result.deleted, result.failed_by_reason) == (
        3,
        2,
        {"missing": 1, "unreachable": 1},
    )
    assert (
        StatusMessage(
            "2 inputs on servers cannot be read now; the rows stay", is_warning=True
        )
        in events
    )


@pytest.mark.parametrize("original", ["changed", "vanished"])
def test_an_update_keeps_the_original_of_a_duplicate_that_cannot_be_read_now(
    server,
    tmp_path,
    photos,
    config,
    original,
):
    server.files["/01.jpg"] = (photos / "01.jpg").read_bytes()
    (tmp_path / "list.txt").write_text(f"{server.url}/01.jpg\n")
    sources = (str(photos), str(tmp_path / "list.txt"))
    request = replace(config(), sources=sources, out=tmp_path / "web.edje", dedupe=True)
    # rows 3 and 10 are duplicates of row 1
    run_build(request, lambda event: None)
    if original == "changed":
        (photos / "01.jpg").write_bytes((photos / "02.jpg").read_bytes() + b"changed")
    else:
        (photos / "01.jpg").unlink()
    server.faults["/01.jpg"] = ["503"] * 4
    events: list[Any] = []
    result = update_index(request.out, engine="inline", on_event=events.append)
    assert (result.unchanged, result.new, result.deleted) == (
        9,
        int(original == "changed"),
        0,
    )
    assert (
        StatusMessage(
            "1 input on servers cannot be read now; the rows stay", is_warning=True
        )
        in events
    )
    with TokenStore.open(request.out) as store:
        assert np.isfinite(store.fetch([1])).all()
    # the server responds again
    result = update_index(request.out, engine="inline", on_event=events.append)
    assert (result.unchanged, result.new + result.changed, result.deleted) == (
        7 + int(original == "changed"),
        1,
        3,
    )
    assert (
        "duplicate"
        not in read_rows(request.out, columns=["status"])["status"].to_pylist()[8:]
    )


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
@pytest.mark.parametrize("status", ["403", "404"])
def test_an_archive_that_the_server_does_not_give_is_refused(server, name, status):
    server.faults[f"/{name}"] = [status] * 9
    with pytest.raises(
        UsageError,
        match=rf"cannot read .*/{name}: HTTP status {status} .*; check the URL",
    ):
        scan(f"{server.url}/{name}")
