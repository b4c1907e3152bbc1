"""Encoding a shard with a real, tiny model over real image files."""

import contextlib
import errno
import io
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.images import resize
from edje_index.images.decode import content_hash, decode_rgb
from edje_index.images.transient import TransientInputError
from edje_index.indexing import shard_encoding
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.indexing.kept_batches import kept_rows
from edje_index.indexing.shard_encoding import ShardTask, batches_in_memory
from edje_index.inputs.helpers import Threads
from edje_index.inputs.input_lists import write_input_lists
from edje_index.inputs.preparation import DecodeSettings, Preparation
from edje_index.inputs.refs import InputRef
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Directory
from storage_formats.format.receipts import read_receipts
from storage_formats.format.rows import TIMING_COLUMNS, read_staged_rows
from storage_formats.reading.embeddings import read_shard_embeddings
from tests.storage_formats.reading_cases import flip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_untrained_bundle(folder, sizes=TINY)
    return ImageEncoder.open(folder, device="cpu", threads=1)


def photo(seed, size=(40, 30)):
    pixels = np.random.default_rng(seed).integers(
        0, 255, (size[1], size[0], 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def case(tmp_path):
    """Eleven inputs of two shards: good ones, a truncated one, an empty one, a
    duplicate, a missing one, and one that is not the planned one.

    The name of the last one is not UTF-8.
    """
    files = {f"{at}.jpg": photo(at) for at in range(11)}
    files["2.jpg"] = files["2.jpg"][:200]
    files["4.jpg"] = b""
    refs = []
    for name, data in files.items():
        path = os.fsencode(tmp_path / name)
        if name != "9.jpg":
            (tmp_path / name).write_bytes(data)
        refs.append(InputRef(str(tmp_path / name), path, size=len(data)))
    refs[10] = replace(refs[10], path=os.fsencode(tmp_path) + b"/\xff\xfe.jpg")
    os.rename(tmp_path / "10.jpg", refs[10].path)
    refs[6] = replace(
        refs[6], content_hash=content_hash(files["5.jpg"]), duplicate_of=5
    )
    refs[8] = replace(refs[8], content_hash="0" * 64)
    spec = IndexSpec(11, 8, (4, 16), 24)
    place = Directory(tmp_path / "index")
    place.input_lists.mkdir(parents=True)
    write_input_lists(place, refs, spec.shard_size)
    task = ShardTask(
        str(place.root), 0, spec, "plan", batch_size=3, decoding=DecodeSettings()
    )
    return task, refs


def place_of(task):
    return Directory(Path(task.root))


def stored(task):
    """Tokens, float32 [8, 4, 16], and embeddings of the task's shard."""
    place = place_of(task)
    bits = np.fromfile(place.token_shard("bf16", task.shard), np.uint16, 8 * 64)
    tokens = bits.view(ml_dtypes.bfloat16).astype(np.float32).reshape(8, 4, 16)
    return tokens, read_shard_embeddings(place, task.spec, task.shard)


def check_nothing_is_left(task):
    place = place_of(task)
    assert read_receipts(place, [task.shard], "plan").get(task.shard) is None
    assert list(place.staging.iterdir()) == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("edje-")]


def encode_shard(task, encoder, should_stop=lambda: False):
    preparation = Preparation(task.decoding, encoder.preprocess)
    positions = batches_in_memory(task.batch_size) * task.batch_size
    with contextlib.closing(Threads(2, preparation, positions)) as threads:
        return shard_encoding.encode_shard(
            task, encoder, threads, lambda _: None, should_stop
        )


def stops(before):
    """A function `should_stop` that stops before a batch."""
    answers = iter([False] * before)
    return lambda: next(answers, True)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_stopped_shard_goes_on_with_its_kept_batches(
    case, encoder, monkeypatch, batch_size
):
    task = replace(case[0], batch_size=batch_size)
    encode_shard(task, encoder)
    expected = shard_content(task)
    layout = place_of(task)
    folder = layout.build / "batches"
    # the shard was fast
    assert not folder.exists()
    monkeypatch.setattr(shard_encoding, "_LONG_SECONDS", 0.0)
    encode = encoder.encode
    encoded = []

    def counted(images):
        encoded.append(len(images))
        return encode(images)

    monkeypatch.setattr(encoder, "encode", counted)

    def run(should_stop):
        encoded.clear()
        encode_shard(task, encoder, should_stop=should_stop)

    run(lambda: False)
    whole = [*encoded]
    assert (shard_content(task), [*folder.glob("*")]) == (expected, [])
    for stop in range(1, -(-8 // batch_size)):
        with pytest.raises(TaskInterrupted):
            run(stops(stop))
        kept = len(encoded)
        paths = sorted(folder.glob("*/*"))
        assert (len(paths), kept_rows(layout) > 0) == (kept, kept > 0)
        run(lambda: False)
        assert encoded == whole[kept:]
        assert shard_content(task) == expected
    with pytest.raises(TaskInterrupted):
        run(stops(-(-8 // batch_size) - 1))
    first, *others = sorted(folder.glob("*/*"))
    # one of the batches between others is missing or damaged
    flip(first, first.read_bytes().index(b"tokens.npy") + 200)
    for path in others[1:2]:
        path.unlink()
    # of another plan
    with pytest.raises(TaskInterrupted):
        encode_shard(replace(task, plan="other"), encoder, should_stop=stops(1))
    run(lambda: False)
    assert len(encoded) == len(whole) - len(others) + len(others[1:2])
    assert shard_content(task) == expected


def shard_content(task):
    """All bytes of a shard, and its rows without times."""
    layout = place_of(task)
    rows = read_staged_rows(layout, task.shard).drop_columns(list(TIMING_COLUMNS))
    files = (layout.token_shard("bf16", task.shard), layout.embedding_shard(task.shard))
    return [path.read_bytes() for path in files], rows.to_pylist()


def test_every_input_is_a_row_and_decodable_ones_hold_the_model_output(case, encoder):
    task, refs = case
    receipt = encode_shard(task, encoder)
    assert (receipt.rows, receipt.indexed, receipt.duplicates) == (8, 5, 1)
    assert receipt.failed == {"empty": 1, "truncated": 1}
    assert read_receipts(place_of(task), [0], "plan").get(0) == receipt
    rows = read_staged_rows(place_of(task), 0)
    assert rows["row_id"].to_pylist() == list(range(8))
    assert rows["uri"].to_pylist() == [ref.uri for ref in refs[:8]]
    statuses = ["indexed"] * 8
    statuses[2] = statuses[4] = "failed"
    statuses[6] = "duplicate"
    assert rows["status"].to_pylist() == statuses
    assert rows["duplicate_of"].to_pylist()[6] == 5
    assert all(len(digest) == 64 for digest in rows["content_hash"].to_pylist()[:2])
    assert (rows["width"][0].as_py(), rows["height"][0].as_py()) == (40, 30)
    tokens, embeddings = stored(task)
    for row in (0, 1, 3, 5, 7):
        image = decode_rgb(Path(os.fsdecode(refs[row].path)).read_bytes(), 10**7)
        expected, embedding = encoder.encode(encoder.preprocess(image)[None])
        np.testing.assert_allclose(
            expected[0].astype(np.float32), tokens[row], atol=0.02
        )
        np.testing.assert_allclose(embedding[0], embeddings[row], atol=1e-5)
    assert np.isnan(tokens[[2, 4, 6]]).all()
    assert np.isnan(embeddings[[2, 4, 6]]).all()
    last = encode_shard(replace(task, shard=1), encoder)
    assert (last.rows, last.indexed) == (3, 1)
    assert last.failed == {"changed-since-plan": 1, "missing": 1}
    rows = read_staged_rows(place_of(task), 1)
    assert rows["uri_raw"].to_pylist()[2] == refs[10].path


@pytest.fixture
def batches(encoder):
    """The sizes of the batches that the model gets. It raises above `limit` images."""
    sizes = Batches()

    def check(_module, inputs):
        sizes.append(len(inputs[0]))
        if sizes[-1] > sizes.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = encoder.adapter.register_forward_pre_hook(check)
    yield sizes
    hook.remove()


class Batches(list):
    limit = 100


def test_out_of_memory_halves_the_batch_of_the_whole_shard(
    case, encoder, monkeypatch, batches
):
    """The bytes are those of batches of this size."""
    task, _ = case
    monkeypatch.setattr(encoder, "processor", "a GPU, batches of {}".format)
    encode_shard(replace(task, batch_size=1), encoder)
    expected = stored(task)
    batches.clear()
    batches.limit = 1
    receipt = encode_shard(task, encoder)
    # 3 inputs; the third is truncated
    assert batches == [2, 1, 1, 1, 1, 1]
    assert receipt.encoded_on == "a GPU, batches of 1"
    assert read_receipts(place_of(task), [0], "plan").get(0) == receipt
    for values, other in zip(stored(task), expected, strict=True):
        np.testing.assert_array_equal(values, other)


def test_full_batches_hold_the_same_rows(case, encoder, monkeypatch, batches):
    """Batches of a GPU are full, also behind failed inputs and at the end."""
    task = replace(case[0], batch_size=7)
    encode_shard(task, encoder)
    expected = stored(task)
    batches.clear()
    monkeypatch.setattr(encoder, "fills_batches", True)
    receipt = encode_shard(task, encoder)
    assert batches == [7, 7]
    assert (receipt.indexed, receipt.duplicates) == (5, 1)
    for values, other in zip(stored(task), expected, strict=True):
        np.testing.assert_allclose(values, other, atol=0.02)


def test_out_of_memory_for_one_image_ends_the_build(case, encoder, batches):
    batches.limit = 0
    with pytest.raises(EdjeError, match="too little memory to encode one image"):
        encode_shard(case[0], encoder)
    check_nothing_is_left(case[0])


@pytest.mark.parametrize("stage", ["read", "decode", "preprocess"])
def test_trouble_outside_an_image_fails_the_shard_and_no_row(
    stage, case, encoder, monkeypatch
):
    task, refs = case

    def no_memory(*_, **__):
        raise MemoryError

    def damaged_disk(fd, size, offset):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", lambda _: None)
        patched.setattr("edje_index.images.transient.can_allocate", lambda _: False)
        target, broken = {
            "read": ((os, "pread"), damaged_disk),
            "decode": ((simplejpeg, "decode_jpeg"), no_memory),
            "preprocess": ((resize, "resize"), no_memory),
        }[stage]
        patched.setattr(*target, broken)
        with pytest.raises(TransientInputError, match=re.escape(refs[0].uri)):
            encode_shard(task, encoder)
    check_nothing_is_left(task)
    assert encode_shard(task, encoder).failed == {"empty": 1, "truncated": 1}


@pytest.mark.parametrize(
    ("value", "precisions", "reason"),
    [
        (1000, ("bf16", "nvfp4"), "out-of-range"),
        (np.inf, ("bf16",), "non-finite-output"),
    ],
)
def test_wrong_output_fails_only_its_image(
    case, encoder, monkeypatch, value, precisions, reason
):
    task, _ = case
    task = replace(task, spec=replace(task.spec, precisions=precisions))
    encode = encoder.encode

    def broken(pixels):
        tokens, embeddings = encode(pixels)
        tokens[:, 0, 0] = 3
        # the first batch: rows 0 and 1, row 2 is truncated
        if len(tokens) == 2:
            tokens[1, 0, 0] = value
        return tokens, embeddings

    monkeypatch.setattr(encoder, "encode", broken)
    assert encode_shard(task, encoder).failed[reason] >= 1
    for values in stored(task):
        assert np.isnan(values[1]).all()
        assert np.isfinite(values[0]).all()
