"""Parquet files that hold images: which column holds them, and every row is an
image, a failed input or counted.
"""

import contextlib
import gc
import json
import random
import tarfile
import tracemalloc

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.images.decode import REASONS, ImageError
from edje_index.inputs.containers import (
    PARQUET,
    Container,
    ParquetImages,
    read_packed,
)
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import InputRef, read_bytes
from pipelines.sources import open_source
from storage_formats.errors import UsageError

PHOTOS = [
    b"\xff\xd8\xff" + random.Random(number).randbytes(30_000) for number in range(10)
]
STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def values(path, column=None):
    """The bytes of every input, or the reason why it has none."""
    result = []
    for ref in open_source(str(path), column).iter_inputs():
        try:
            result.append(read_bytes(ref))
        except ImageError as error:
            result.append(error.reason)
    return result


@pytest.mark.parametrize("dictionary", [True, False])
def test_binary_columns(tmp_path, dictionary):
    numbers = list(range(10))
    path = write(
        tmp_path / "a.parquet",
        {"key": [*map(str, numbers)], "jpg": PHOTOS, "width": numbers},
        compression="zstd" if dictionary else "none",
        use_dictionary=dictionary,
        row_group_size=3,
    )
    refs = list(open_source(str(path)).iter_inputs())
    assert [read_bytes(ref) for ref in refs] == PHOTOS
    assert refs[7].uri == f"{path}!jpg/7"
    assert refs[7].metadata == {"key": "7", "source_width": 7}


def test_struct_columns_with_bytes_or_paths(tmp_path):
    (tmp_path / "b.jpg").write_bytes(PHOTOS[1])
    pairs = [
        (PHOTOS[0], "a.jpg"),
        (None, "b.jpg"),
        (None, "gone.jpg"),
        (PHOTOS[2], None),
        (None, None),
    ]
    rows = [{"bytes": data, "path": name} for data, name in pairs]
    columns = {"image": pa.array([*rows, None], STRUCT), "label": range(6)}
    path = write(tmp_path / "a.parquet", columns)
    source = open_source(str(path))
    refs = list(source.iter_inputs())
    assert values(path) == [PHOTOS[0], PHOTOS[1], "missing", PHOTOS[2]]
    assert [ref.metadata["label"] for ref in refs] == [0, 1, 2, 3]
    assert refs[0].metadata["image_path"] == "a.jpg"
    assert refs[1].uri == f"{tmp_path}/b.jpg"
    assert source.ignored == {"(row without an image)": 2}


def test_the_column_can_be_named(tmp_path):
    path = write(tmp_path / "a.parquet", {"left": PHOTOS, "right": PHOTOS[::-1]})
    with pytest.raises(UsageError, match=r"images \(left, right\); name the column"):
        open_source(str(path))
    assert values(path, "right") == values(tmp_path, "right") == PHOTOS[::-1]
    with pytest.raises(UsageError, match="no column middle"):
        open_source(str(path), "middle")
    # the column of another source of the command
    write(path, {"photo": PHOTOS[:1]})
    assert values(tmp_path, "path") == PHOTOS[:1]


def test_sounds_are_no_images_and_labels_have_names(tmp_path):
    label = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    features = {
        "audio": {"_type": "Audio"},
        "image": {"_type": "Image"},
        "label": label,
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    rows = pa.array([{"bytes": data, "path": None} for data in PHOTOS[:4]], STRUCT)
    table = pa.table({"audio": rows, "image": rows, "label": [0, 1, -1, None]})
    path = tmp_path / "a.parquet"
    pq.write_table(table.replace_schema_metadata(metadata), path)
    source = open_source(str(path))
    assert (source.table.column, source.ignored) == ("image", {})
    labels = [(ref.metadata or {}).get("label") for ref in source.iter_inputs()]
    assert labels == ["cat", "dog", None, None]
    assert source.ignored == {"(binary column)": 1}


@pytest.mark.parametrize("rows", [None, 4])
def test_a_file_that_was_replaced_by_a_shorter_one(tmp_path, rows):
    path = tmp_path / "a.parquet"
    schema = pa.schema({"jpg": pa.binary()})
    with pq.ParquetWriter(path, schema) as writer:
        if rows is not None:
            writer.write_table(pa.table({"jpg": PHOTOS[:rows]}, schema))
    container = Container(PARQUET, path.stat().st_size, "jpg")
    with pytest.raises(ImageError, match="changed-since-plan"):
        read_bytes(InputRef("a.parquet!jpg/4", bytes(path), container, 4))


def test_a_damaged_row_group_fails_its_rows_only(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        {"jpg": PHOTOS},
        row_group_size=2,
        compression="snappy",
        use_dictionary=False,
    )
    column = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 40] = bytes(40)
    path.write_bytes(content)
    assert values(path) == [*PHOTOS[:2], *["damaged-archive"] * 2, *PHOTOS[4:]]
    # no thread reads the damaged rows
    with open_ranged(bytes(path)) as file:
        images = ParquetImages(file, "jpg")
        for row in (0, 9, 4):
            assert images.read(row, 0) == PHOTOS[row]


def test_repeated_images_take_the_memory_of_one(tmp_path):
    photo = b"\xff\xd8\xff" + bytes(1 << 18)
    path = write(tmp_path / "a.parquet", {"jpg": [photo] * 500})
    first, *_ = open_source(str(path)).iter_inputs()
    pool = pa.default_memory_pool()
    tracemalloc.start()
    before = pool.bytes_allocated()
    assert read_bytes(first) == photo
    used = pool.bytes_allocated() - before + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 10 << 20


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_files_never_raise(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    write(
        path,
        {"jpg": [photo[:200] for photo in PHOTOS], "caption": ["a dog"] * 10},
        row_group_size=4,
    )
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 9))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(content)
    try:
        found = values(path)
    except UsageError:
        return
    for value in found:
        assert isinstance(value, bytes) or value in REASONS


def test_no_damaged_byte_of_the_metadata_aborts_the_process(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"jpg": PHOTOS[:2]}), path, store_schema=False)
    content = path.read_bytes()
    length = pq.read_metadata(path).serialized_size
    for position in range(len(content) - 8 - length, len(content) - 8):
        path.write_bytes(content[:position] + b"d" + content[position + 1 :])
        with contextlib.suppress(UsageError):
            values(path)


@pytest.mark.parametrize("first", [b"<html>", b""])
def test_a_damaged_first_image_hides_no_others(tmp_path, first):
    photos = [first, b"\xff\xd8\xff one", b"\xff\xd8\xff two"]
    write(tmp_path / "a.parquet", {"image": pa.array(photos)})
    assert len(list(open_source(str(tmp_path)).iter_inputs())) == 3


def test_images_that_expand_too_much_are_refused(tmp_path):
    columns = {"image": [PHOTOS[0][:3] + bytes(40 << 20)] * 4}
    path = write(tmp_path / "a.parquet", columns, compression="zstd")
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"row group 0 has \d+ bytes, but"):
        values(path)
    container = Container(PARQUET, path.stat().st_size, "image")
    with pytest.raises(ImageError, match="row group 0 has"):
        read_packed(bytes(path), container, 0, size=None, max_bytes=1 << 30)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_files_that_were_not_read_lately_are_closed(tmp_path):
    gc.disable()
    try:
        for number in range(20):
            path = write(tmp_path / f"{number}.parquet", {"image": PHOTOS})
            container = Container(PARQUET, path.stat().st_size, "image")
            read_packed(bytes(path), container, 0, size=None, max_bytes=1 << 20)
            path = tmp_path / f"{number}.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                archive.add(__file__, "a.jpg")
            container = Container("tar", path.stat().st_size)
            with pytest.raises(ImageError, match="over the limit"):
                read_packed(bytes(path), container, 512, size=9, max_bytes=8)
            assert read_packed(bytes(path), container, 512, size=3, max_bytes=8)
        opened = [each.path for each in psutil.Process().open_files()]
        assert sum(name.startswith(str(tmp_path)) for name in opened) <= 8
    finally:
        gc.enable()
