"""Sources on web servers and on the Hugging Face Hub: they list and read as local
files do.
"""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest

from edje_index.images.transient import TransientInputError
from edje_index.inputs import ranges, tars
from edje_index.inputs.refs import read_bytes
from pipelines import update_index
from pipelines.cli.info import failed_rows
from pipelines.sources import open_source, open_sources
from pipelines.sources.base import file_input
from pipelines.sources.kinds import iter_all
from storage_formats import TokenStore, UsageError, read_rows
from storage_formats.remote import files as remote
from tests.object_store import use_endpoint
from tests.pipelines.conftest import run_build, write_photo
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


def scan(spec):
    return list(iter_all(open_sources([spec])))


@pytest.mark.parametrize("suffix", ["tar", "tar.bz2", "tar.zst", "zip", "parquet"])
def test_archives_read_in_any_order(server, tmp_path, photos, monkeypatch, suffix):
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 700)
    monkeypatch.setattr(ranges, "KEPT_BYTES", 1000)
    monkeypatch.setattr(tars, "_CHUNK", 500)
    path = _packed_as(suffix, photos, tmp_path)
    server.files[f"/{path.name}"] = path.read_bytes()
    contents = [photo.read_bytes() for photo in sorted(photos.glob("*.jpg"))]
    for spec in (str(path), f"{server.url}/{path.name}"):
        refs = scan(spec)
        data = dict(zip(refs, contents, strict=True))
        for order in (refs, refs[::-1], random.Random(0).sample(refs, len(refs))):
            assert all(read_bytes(ref) == data[ref] for ref in order)


def _packed_as(suffix, photos, folder):
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

    def answer(self, headers):
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
    [("tar", "etag"), ("tar.gz", "length"), ("zip", "length"), ("parquet", "etag")],
)
def test_a_file_that_changes_between_requests_is_never_mixed(
    server, tmp_path, photos, monkeypatch, suffix, change
):
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 700)
    path = _packed_as(suffix, photos, tmp_path)
    data = path.read_bytes()
    changed = {
        "etag": (bytes(len(data)), '"b"'),
        "length": (data[:-600] + bytes(601), ""),
    }
    message = "has changed while it was"
    outcomes = set()
    for change_at in range(1 if suffix == "zip" else 3, 9):
        file = ChangingFile([(data, '"a"'), changed[change]], change_at)
        # Each scan has its own path, because requests ahead may arrive after its end.
        name = f"/{change_at}/{path.name}"
        server.responses[name] = file.answer
        try:
            outcomes.add(len(scan(f"{server.url}{name}")))
        except (TransientInputError, UsageError) as error:
            outcomes.add(message if message in str(error) else str(error))
    assert message in outcomes
    assert outcomes <= {10, message}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "txt", "json"])
def test_lists_on_a_server(server, suffix):
    near = f"{server.url}/lists/photos/a.jpg"
    far = f"{server.url}/other/b.jpg"
    local = ["/etc/passwd", "file:///etc/passwd", "../up.jpg"]
    values = ["photos/a.jpg", far, *local]
    lines = {
        "csv": ["url", *values],
        "tsv": ["url\tx", *(f"{value}\ty" for value in values)],
        "jsonl": [json.dumps({"url": value}) for value in values],
        "txt": values,
        "json": [json.dumps([{"image": value, "caption": "x"} for value in values])],
    }
    url = f"{server.url}/lists/list.{suffix}"
    server.files[f"/lists/list.{suffix}"] = "\n".join(lines[suffix]).encode()
    server.files["/lists/photos/a.jpg"] = b"a"
    server.files["/other/b.jpg"] = b"b"
    refs = scan(url)
    assert [ref.uri for ref in refs[:2]] == [near, far]
    assert [read_bytes(ref) for ref in refs[:2]] == [b"a", b"b"]
    assert [ref.problem for ref in refs[2:]] == ["bad-list-line"] * 3
    if suffix == "json":
        server.files["/lists/list.json"] = b"[3]"
        with pytest.raises(UsageError, match=f"{url}: line 1"):
            scan(url)


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
def test_a_folder_on_the_hub(server, photos, tmp_path, monkeypatch, revision, encoded):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "secret\n")
    (tmp_path / "packed").mkdir()
    _pack(photos, tmp_path / "packed")
    data = (tmp_path / "packed/c.parquet").read_bytes()
    names = ["data/train-0.parquet", "data/train-1.parquet"]
    for name in names:
        server.files[f"/datasets/owner/set/resolve/{encoded}/{name}"] = data
    tokens = []

    def page(name, **following):
        def answer(headers):
            tokens.append(headers["Authorization"])
            entry = {"type": "file", "path": name, "size": len(data)}
            return 200, following, json.dumps([entry]).encode()

        return answer

    server.responses[f"/api/datasets/owner/set/tree/{encoded}/data"] = page(
        names[0], Link='</page2>; rel="next"'
    )
    server.responses["/page2"] = page(names[1])
    url = f"hf://datasets/owner/set@{revision}"
    for spec in (f"{url}/data", f"{url}/data/*.parquet"):
        refs = scan(spec)
        assert refs[9].uri == f"{url}/{names[0]}!image/9"
        assert refs[10].uri == f"{url}/{names[1]}!image/0"
        assert read_bytes(refs[12]) == (photos / "02.jpg").read_bytes()
    assert {*tokens} == {"Bearer secret"}
    with pytest.raises(UsageError, match="names no repository"):
        open_source("hf://owner")
    monkeypatch.setenv("HF_TOKEN", "sec\nret")
    with pytest.raises(UsageError, match="the token of the Hub has line") as caught:
        open_source(f"{url}/data")
    assert "ret" not in str(caught.value).replace("are not", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_list_of_a_folder_gives_no_token_away_and_ends(server, monkeypatch, host):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    path = "/api/datasets/owner/set/tree/main/data"
    link = f'<{server.url.replace("127.0.0.1", host)}{path}>; rel="next"'
    monkeypatch.setenv("HF_TOKEN", "secret")
    tokens = []

    def answer(headers):
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


def _listing(keys, folders):
    """The answer of an S3 server to a request for a folder."""
    facts = "<Size>0</Size><ETag>e</ETag>"
    facts += "<LastModified>2024-01-01T00:00:00.000Z</LastModified>"
    entries = [f"<Contents><Key>{key}</Key>{facts}</Contents>" for key in keys]
    entries += [
        f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
        for folder in folders
    ]
    listed = f"<IsTruncated>false</IsTruncated>{''.join(entries)}"
    return f"<ListBucketResult>{listed}</ListBucketResult>"


def test_folders_of_a_bucket_without_a_name_or_without_a_list(monkeypatch):
    pages = {"": _listing(["b.jpg"], ["/", "empty/", "sub/"])}
    pages |= {"empty/": _listing(["empty/"], []), "/": _listing(["/x.jpg"], [])}
    pages["sub/"] = _listing(["sub/c.jpg"], [])
    with web_server() as server:

        def answer(method, path, *_):
            prefix = parse_qs(urlsplit(path).query).get("prefix", [""])[0]
            return 200, {"Content-Type": "application/xml"}, pages[prefix].encode()

        server.service = answer
        use_endpoint(monkeypatch, server.url)
        remote._bucket.cache_clear()
        source = open_source("s3://photos")
        uris = [ref.uri for ref in source.iter_inputs()]
        assert uris == ["s3://photos/b.jpg", "s3://photos/sub/c.jpg"]
        assert source.ignored["(hidden)"] == 1
        pages["sub/"] = "<html>Please accept the terms</html>"
        with pytest.raises(TransientInputError, match="/sub: the server lists"):
            list(source.iter_inputs())
    remote._bucket.cache_clear()


def test_a_build_from_addresses(server, tmp_path, photos, config):
    lines = ["url,caption"]
    for path in sorted(photos.glob("*.jpg")):
        server.files[f"/{path.name}"] = path.read_bytes()
        lines.append(f"{server.url}/{path.name},photo {path.stem}")
    lines.append(f"{server.url}/gone.jpg,nothing")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    server.faults["/02.jpg"] = ["503"] * 4
    server.faults["/04.jpg"] = ["reset", "truncate", "slow"]
    root = tmp_path / "web.edje"
    result = run_build(config(sources=[str(tmp_path / "list.csv")], out=root))
    assert (result.inputs, result.indexed, result.failed) == (11, 8, 3)
    failed = {row["uri"]: row["reason"] for row in failed_rows(root)}
    assert failed == {
        f"{server.url}/02.jpg": "unreachable",
        f"{server.url}/07.jpg": "not-an-image",
        f"{server.url}/gone.jpg": "missing",
    }
    assert read_rows(root, [4])["caption"].to_pylist() == ["photo 04"]
    retried = update_index(root, retry_failed=True, engine="inline")
    # gone.jpg is missing still, so it counts as failed
    assert (retried.unchanged, retried.deleted, retried.new) == (8, 2, 1)
    reasons = [row["reason"] for row in failed_rows(root)]
    assert sorted(reasons) == ["missing", "not-an-image"]


def test_an_update_keeps_the_rows_of_addresses_that_cannot_be_read_now(
    server, tmp_path, photos, config
):
    names = ["00.jpg", "01.jpg", "02.jpg", "04.jpg", "gone.jpg"]
    for name in names[:4]:
        server.files[f"/{name}"] = (photos / name).read_bytes()
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{server.url}/{name}\n" for name in names))
    root = tmp_path / "web.edje"
    run_build(config(sources=[str(listing)], out=root))
    server.faults["/00.jpg"] = ["503"] * 4
    server.faults["/01.jpg"] = ["403"]
    server.faults["/gone.jpg"] = ["503"] * 4
    del server.files["/04.jpg"]
    result, warnings = update_and_listen(root, dry_run=True)
    assert (result.unchanged, result.deleted) == (3, 2)
    assert result.failed_by_reason == {"missing": 1, "unreachable": 1}
    assert "2 inputs on servers cannot be read now; the rows stay" in warnings


def update_and_listen(root, **options):
    """The result and the warnings of an update."""
    events = []
    result = update_index(root, engine="inline", on_event=events.append, **options)
    return result, [each.text for each in events if getattr(each, "is_warning", False)]


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_update_keeps_the_original_of_a_duplicate_that_cannot_be_read_now(
    server, tmp_path, photos, config, is_changed
):
    original = photos / "01.jpg"
    server.files["/01.jpg"] = original.read_bytes()
    (tmp_path / "list.txt").write_text(f"{server.url}/01.jpg\n")
    sources = (str(photos), str(tmp_path / "list.txt"))
    root = tmp_path / "web.edje"
    # rows 3 and 10 are duplicates of row 1
    run_build(config(sources=sources, out=root, dedupe=True))
    original.unlink()
    if is_changed:
        write_photo(original, 99)
    server.faults["/01.jpg"] = ["503"] * 4
    result, warnings = update_and_listen(root)
    assert (result.unchanged, result.new, result.deleted) == (9, int(is_changed), 0)
    assert "1 input on servers cannot be read now; the rows stay" in warnings
    with TokenStore.open(root) as store:
        assert np.isfinite(store.fetch([1])).all()
    # the server responds again
    result, _ = update_and_listen(root)
    assert (result.unchanged, result.deleted) == (7 + is_changed, 3)
    assert result.new + result.changed == 1
    assert "duplicate" not in read_rows(root)["status"].to_pylist()[8:]


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
@pytest.mark.parametrize("status", ["403", "404"])
def test_an_archive_that_the_server_does_not_give_is_refused(server, name, status):
    server.faults[f"/{name}"] = [status] * 9
    with pytest.raises(
        UsageError,
        match=rf"cannot read .*/{name}: HTTP status {status} .*; check the URL",
    ):
        scan(f"{server.url}/{name}")
