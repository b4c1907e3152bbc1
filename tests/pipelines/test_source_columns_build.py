"""Builds and appends store what the sources say about their images as typed columns."""

import datetime
import decimal
import json
import os
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.captions.reading import read_captions
from edje_index.images.decode import ImageError
from edje_index.inputs.refs import InputRef, read_bytes
from pipelines.jobs.plan import CollectedInputs
from pipelines.progress.events import ignore, never
from pipelines.sources import Listing, open_sources
from pipelines.sources.base import Patterns
from storage_formats import Manifest, UsageError, read_rows, verify_index
from storage_formats.format.source_columns import MAX_COLUMNS
from tests.pipelines.archives import write_tar
from tests.pipelines.conftest import INLINE, write_photo


def write_lines(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.fixture
def listed(tmp_path):
    """Six photos with captions in JSON Lines, in shards of four."""
    for number in range(8):
        write_photo(tmp_path / f"{number}.jpg", number)
    records = [
        {"path": f"{number}.jpg", "captions": [f"photo {number}"]}
        for number in range(6)
    ]
    records[0] |= {"rating": 3, "width": 640, "source_width": 1, "licence": None}
    records[4] |= {
        "rating": 4.5,
        "safe": True,
        "captions": "one",
        "exif": {"make": "Leica"},
        "bad\nname": 1,
    }
    return write_lines(tmp_path / "list.jsonl", records)


def test_a_build_and_an_append_store_typed_columns(run, tmp_path, listed, tiny_bundle):
    index = tmp_path / "i"
    build = ["build", listed, "--out", index, "--model", tiny_bundle, *INLINE]
    code, _, err = run(*build)
    assert code == 0
    assert "(column name not allowed) 1" in err
    stock = pq.read_table(index / "rows")
    captions = [[f"photo {number}"] for number in range(6)]
    captions[4] = ["one"]
    assert stock["captions"].to_pylist() == captions
    assert stock["rating"].to_pylist() == [3.0, None, None, None, 4.5, None]
    assert stock["source_width"].to_pylist() == [640, *[None] * 5]
    assert stock["source_source_width"].to_pylist() == [1, *[None] * 5]
    assert stock["exif"].to_pylist()[4] == '{"make": "Leica"}'
    assert stock["width"].to_pylist() == [32] * 6
    columns = Manifest.load(index).columns
    assert {each.name: (each.type, each.values) for each in columns} == {
        "captions": ("list<string>", 6),
        "exif": ("string", 1),
        "rating": ("float64", 2),
        "safe": ("bool", 1),
        "source_source_width": ("int64", 1),
        "source_width": ("int64", 1),
    }
    shown = run.json("info", index)["columns"]
    assert {"name": "captions", "type": "list<string>", "values": 6} in shown
    assert {"name": "width", "type": "int32", "values": None} in shown
    # finished, and the sources have not changed
    run.ok(*build)

    added = [{"path": "6.jpg", "safe": "unknown", "tags": ["a"]}]
    more = write_lines(tmp_path / "more.jsonl", added)
    run.ok("append", index, more, "--engine", "inline")
    assert verify_index(index) == []
    rows = read_rows(index, columns=["safe", "tags", "rating"]).to_pylist()
    assert rows[4:] == [
        {"safe": "true", "tags": None, "rating": 4.5},
        {"safe": None, "tags": None, "rating": None},
        {"safe": "unknown", "tags": ["a"], "rating": None},
    ]
    run.ok("rollback", index, 0)
    assert read_rows(index, [4], ["safe"])["safe"].to_pylist() == [True]


def scan(*specs):
    listing = Listing(open_sources(map(str, specs)), ignore, never)
    return list(listing), listing.ignored


def test_joined_archives_have_a_caption_for_each_photo_of_a_name(tmp_path):
    write_photo(tmp_path / "000.jpg", 0)
    photo = (tmp_path / "000.jpg").read_bytes()
    data = b""
    for caption in (b"zero", b"two"):
        members = {"000.jpg": photo, "000.txt": caption}
        data += write_tar(tmp_path / "one.tar", members).read_bytes()
    (tmp_path / "joined.tar").write_bytes(data)
    refs, ignored = scan(tmp_path / "joined.tar")
    assert [ref.metadata for ref in refs] == [
        {"captions": ["zero"]},
        {"captions": ["two"]},
    ]
    assert ignored == {}


def test_a_line_per_caption_and_lines_that_cannot_be_read(tmp_path):
    for number in range(2):
        write_photo(tmp_path / f"{number}.jpg", number)
    table = tmp_path / "metadata.jsonl"
    table.write_text(
        '{"file_name": "0.jpg", "text": "one"}\n{"file_name": "0.jpg", "text": "two"}\n'
        '{"file_name": "1.jpg", "text": "three"\n'
    )
    refs, ignored = scan(tmp_path)
    assert [ref.metadata for ref in refs] == [{"text": ["one", "two"]}, None]
    assert ignored == {"(unreadable metadata)": 1}
    # repeated, and not texts
    records = [{"file_name": "0.jpg", "text": "one"}] * 2
    records += [{"file_name": "1.jpg", "caption": {key: "x"}} for key in ("en", "de")]
    write_lines(table, records)
    refs, _ = scan(tmp_path)
    texts = [{"text": "one"}, {"caption": '{"en": "x"}'}]
    assert [ref.metadata for ref in refs] == texts


def test_names_in_a_table_may_be_written_in_other_ways(tmp_path):
    # as a disk written by macOS has it
    composed = "caf\N{LATIN SMALL LETTER E WITH ACUTE}.jpg"
    decomposed = unicodedata.normalize("NFD", composed)
    listed = {
        "0.jpg": "./sub/0.jpg",
        "1.jpg": "sub//1.jpg",
        "2.jpg": "sub\\2.jpg",
        decomposed: f"sub/{composed}",
    }
    for number, name in enumerate(listed):
        write_photo(tmp_path / "sub" / name, number)
    names = [*listed.values(), "gone.jpg"]
    records = [{"file_name": name, "text": name} for name in names]
    write_lines(tmp_path / "metadata.jsonl", records)
    refs, ignored = scan(tmp_path)
    assert [ref.metadata for ref in refs] == [
        {"text": text} for text in listed.values()
    ]
    assert ignored == {"(metadata without a file)": 1}


def test_captions_behind_links_as_in_the_cache_of_the_hub(tmp_path):
    blobs = tmp_path / "blobs"
    folder = tmp_path / "snapshots/main"
    folder.mkdir(parents=True)
    for number in range(2):
        write_photo(blobs / f"{number}.jpg", number)
        (folder / f"{number}.jpg").symlink_to(f"../../blobs/{number}.jpg")
    (blobs / "12ab").write_text("a dog")
    (blobs / "34cd").write_text("file_name,text\n1.jpg,a cat\n")
    (folder / "0.txt").symlink_to("../../blobs/12ab")
    (folder / "metadata.csv").symlink_to("../../blobs/34cd")
    expected = [{"captions": ["a dog"]}, {"text": "a cat"}]
    refs, ignored = scan(folder)
    assert [ref.metadata for ref in refs] == expected
    assert ignored == {}
    (tmp_path / "refs").mkdir()
    refs, ignored = scan(tmp_path)
    assert [ref.metadata for ref in refs] == expected
    assert ignored == {"(folder seen)": 1}


def test_a_table_names_photos_through_links(tmp_path):
    for number in range(2):
        write_photo(tmp_path / f"z/{number}.jpg", number)
    (tmp_path / "album").symlink_to("z")
    (tmp_path / "one.jpg").symlink_to("z/1.jpg")
    records = [
        {"file_name": "album/0.jpg", "text": "a dog"},
        {"file_name": "one.jpg", "text": "a cat"},
    ]
    write_lines(tmp_path / "metadata.jsonl", records)
    refs, ignored = scan(tmp_path)
    texts = {os.path.basename(ref.uri): ref.metadata["text"] for ref in refs}
    assert texts == {"one.jpg": "a cat", "0.jpg": "a dog"}
    assert "(metadata without a file)" not in ignored


def test_captions_stay_whatever_paths_lead_to_a_photo(tmp_path):
    write_photo(tmp_path / "z/0.jpg", 0)
    write_photo(tmp_path / "z/1.jpg", 1)
    (tmp_path / "album").mkdir()
    (tmp_path / "album/a.jpg").symlink_to("../z/0.jpg")
    (tmp_path / "album/a.txt").write_text("a dog")
    (tmp_path / "album/b.jpg").symlink_to("../z/1.jpg")
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "z/1.jpg", "text": "cat"}])
    (source,) = open_sources([str(tmp_path)])
    for excluded, name in (([], "b.jpg"), (["b.jpg"], "1.jpg")):
        source.patterns = Patterns(exclude=excluded)
        refs = list(source.iter_inputs())
        assert {os.path.basename(ref.uri): ref.metadata for ref in refs} == {
            "a.jpg": {"captions": ["a dog"]},
            name: {"text": "cat"},
        }
    assert source.ignored == {"(link seen)": 1, "(excluded)": 1}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4743512\n"


@pytest.mark.parametrize("pointer", [LFS, b"/annex/objects/SHA256E-s9--00.txt\n"])
@pytest.mark.parametrize(
    "name", ["0.txt", "0.json", "metadata.csv", "metadata.jsonl", "a.tar", "a.parquet"]
)
def test_pointers_are_not_taken_for_content(tmp_path, name, pointer):
    folder = tmp_path / "sub"
    folder.mkdir()
    if name[0] != "a":
        write_photo(folder / "0.jpg", 0)
    write_photo(tmp_path / "1.jpg", 1)
    (folder / name).write_bytes(pointer)
    with pytest.raises(UsageError, match=rf"{name}.*'git lfs pull'"):
        scan(tmp_path)
    if name != "0.txt":
        with pytest.raises(UsageError, match="not on this machine"):
            read_captions(folder / name)
    (tmp_path / "2.jpg").write_bytes(pointer)
    with pytest.raises(ImageError, match="not on this machine"):
        read_bytes(InputRef("2.jpg", os.fsencode(tmp_path / "2.jpg")))


def test_an_empty_value_of_a_file_replaces_no_other(tmp_path):
    write_photo(tmp_path / "0.jpg", 0)
    listed = {"text": "a dog", "url": "", "place": "Bern", "year": 2024, "kind": None}
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "0.jpg", **listed}])
    info = '{"captions": null, "text": "", "place": [], "year": NaN, "kind": ""}'
    (tmp_path / "0.json").write_text(info)
    refs, _ = scan(tmp_path)
    expected = {**listed, "kind": ""}
    assert [ref.metadata for ref in refs] == [expected]
    (tmp_path / "0.txt").write_text("a cat\n")
    refs, _ = scan(tmp_path)
    assert [ref.metadata for ref in refs] == [{**expected, "captions": ["a cat"]}]
    (tmp_path / "0.json").write_text('{"captions": ["a bird"]}')
    (ref,) = scan(tmp_path)[0]
    assert ref.metadata["captions"] == ["a bird"]


MIDNIGHT = dict.fromkeys(["hour", "minute", "second", "microsecond"], 0)


def test_values_of_a_parquet_list(tmp_path):
    when = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
    utc = when.replace(tzinfo=datetime.UTC)
    cases = {
        "when": (pa.array([when], pa.timestamp("ns")), utc),
        "day": (pa.array([when.date()]), utc.replace(**MIDNIGHT)),
        "local": (pa.array([when], pa.timestamp("us", "America/New_York")), utc),
        "price": (pa.array([decimal.Decimal("1.00")]), "1.00"),
        "tags": (pa.array([["a"]], pa.large_list(pa.large_string())), ["a"]),
        "pair": (pa.array([["a", "b"]], pa.list_(pa.string(), 2)), ["a", "b"]),
        "counts": ([[1, 2]], "[1, 2]"),
        "kind": (pa.array(["cat"]).dictionary_encode(), "cat"),
        "big": (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
        "half": (pa.array([0.5], pa.float32()), 0.5),
    }
    columns = {name: column for name, (column, _) in cases.items()}
    columns |= {"path": ["a.jpg"], "thumb": [b"\xff"], "image": [{"bytes": b"x"}]}
    columns["late"] = pa.array([2**62], pa.timestamp("us"))
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    (ref,), ignored = scan(tmp_path / "list.parquet")
    assert isinstance(ref.metadata.pop("late"), str)
    assert ref.metadata == {name: value for name, (_, value) in cases.items()}
    assert ignored == {"(binary column)": 2}


def add(collected, **metadata):
    return collected.add(InputRef("a", b"a", metadata=metadata)).metadata


def test_too_many_columns_and_too_long_values_are_counted():
    collected = CollectedInputs(shard_size=4)
    assert add(collected, text="x" * 20_000, n=1) == {"n": 1}
    assert add(collected, text="x" * 20_000) is None
    assert collected.ignored == {"(metadata too long)": 2}
    assert (
        len(add(collected, **{f"c{number}": number for number in range(300)}))
        == MAX_COLUMNS - 1
    )
    assert add(collected, late=1, n=2) == {"n": 2}
    assert collected.ignored == {
        "(metadata too long)": 2,
        "(too many metadata columns)": 46,
    }
    assert len(collected.columns()) == MAX_COLUMNS
