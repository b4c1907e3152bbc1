"""Encoding a shard with a real, tiny model over real image files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

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
from edje_index.inputs.helpers import Helpers, Threads
from edje_index.inputs.input_lists import write_input_lists
from edje_index.inputs.preparation import DecodeSettings, Preparation
from edje_index.inputs.refs import InputRef
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Directory
from storage_formats.format.receipts import read_receipts
from storage_formats.format.rows import TIMING_COLUMNS, read_staged_rows
from storage_formats.reading.embeddings import read_shard_embeddings


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_untrained_bundle(folder, sizes=TINY)
    return ImageEncoder.open(folder, device="cpu", threads=1)


def photo(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(
        0, 255, (size[1], size[0], 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def case(tmp_path):
    """Eleven inputs of two shards: good ones, a truncated one, an empty one, a
    duplicate, a missing one.

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
    spec = IndexSpec(11, 8, (4, 16), 24)
    root = tmp_path / "index"
    Directory(root).input_lists.mkdir(parents=True)
    write_input_lists(Directory(root), refs, spec.shard_size)
    task = ShardTask(
        str(root),
        0,
        spec,
        "plan",
        batch_size=3,
        decoding=DecodeSettings(),
    )
    return task, refs


def encode_shard(task, encoder, should_stop=lambda: False, helpers=0):
    open_helpers = Helpers if helpers else Threads
    preparation = Preparation(task.decoding, encoder.preprocess)
    positions = batches_in_memory(task.batch_size) * task.batch_size
    with contextlib.closing(
        open_helpers(helpers or 2, preparation, positions)
    ) as opened:
        return shard_encoding.encode_shard(
            task, encoder, opened, should_stop=should_stop
        )


def stored(task: ShardTask) -> tuple[np.ndarray, np.ndarray]:
    """Bits [8, 4, 16] and embeddings of the task's shard."""
    layout = _layout(task)
    bits = np.fromfile(
        layout.token_shard("bf16", task.shard), np.uint16, count=8 * 64
    ).reshape(8, 4, 16)
    return bits, read_shard_embeddings(layout, task.spec, task.shard)


def _layout(task: ShardTask) -> Directory:
    return Directory(Path(task.root))


class Stops:
    """A function `should_stop` that stops before a batch."""

    def __init__(self, before: int) -> None:
        self.left = before

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("batch_size", "helpers"), [(1, 0), (2, 2), (3, 0)])
def test_a_stopped_shard_goes_on_with_its_kept_batches(
    case, encoder, monkeypatch, batch_size, helpers
):
    task = replace(case[0], batch_size=batch_size)
    encode_shard(task, encoder)
    expected = shard_content(task)
    layout = _layout(task)
    folder = layout.build / "batches"
    assert not folder.exists(), "the shard was fast"
    monkeypatch.setattr(shard_encoding, "_LONG_SECONDS", 0.0)
    encode = encoder.encode
    encoded = []

    def counted(images):
        encoded.append(len(images))
        return encode(images)

    monkeypatch.setattr(encoder, "encode", counted)

    def run(should_stop):
        encoded.clear()
        encode_shard(task, encoder, should_stop=should_stop, helpers=helpers)

    run(lambda: False)
    whole = [*encoded]
    assert (shard_content(task), [*folder.glob("*")]) == (expected, [])
    for stop in range(1, -(-8 // batch_size)):
        with pytest.raises(TaskInterrupted):
            run(Stops(stop))
        kept = len(encoded)
        paths = sorted(folder.glob("*/*"))
        assert (len(paths), kept_rows(layout) > 0) == (kept, kept > 0)
        run(lambda: False)
        assert encoded == whole[kept:]
        assert shard_content(task) == expected
    with pytest.raises(TaskInterrupted):
        run(Stops(-(-8 // batch_size) - 1))
    first, *others = sorted(folder.glob("*/*"))
    # one of the batches between others is missing or damaged
    data = first.read_bytes()
    place = data.index(b"tokens.npy") + 200
    first.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for path in others[1:2]:
        path.unlink()
    # of another plan
    with pytest.raises(TaskInterrupted):
        encode_shard(replace(task, plan="other"), encoder, should_stop=Stops(1))
    run(lambda: False)
    assert len(encoded) == len(whole) - len(others) + len(others[1:2])
    assert shard_content(task) == expected


def shard_content(task: ShardTask) -> object:
    """All bytes of a shard, and its rows without times."""
    layout = _layout(task)
    rows = read_staged_rows(layout, task.shard).drop_columns(list(TIMING_COLUMNS))
    files = (layout.token_shard("bf16", task.shard), layout.embedding_shard(task.shard))
    return [path.read_bytes() for path in files], rows.to_pylist()


def test_every_input_is_a_row_and_decodable_ones_hold_the_model_output(case, encoder):
    task, refs = case
    receipt = encode_shard(task, encoder)
    assert (receipt.rows, receipt.indexed, receipt.duplicates) == (8, 5, 1)
    assert receipt.failed == {"empty": 1, "truncated": 1}
    assert read_receipts(_layout(task), [0], "plan").get(0) == receipt
    rows = read_staged_rows(_layout(task), 0)
    assert rows["row_id"].to_pylist() == list(range(8))
    assert rows["uri"].to_pylist() == [ref.uri for ref in refs[:8]]
    assert rows["status"].to_pylist() == [
        *(
            "indexed",
            "indexed",
            "failed",
            "indexed",
            "failed",
            "indexed",
            "duplicate",
            "indexed",
        ),
    ]
    assert rows["duplicate_of"].to_pylist()[6] == 5
    assert all(len(digest) == 64 for digest in rows["content_hash"].to_pylist()[:2])
    assert (rows["width"][0].as_py(), rows["height"][0].as_py()) == (40, 30)
    bits, embeddings = stored(task)
    for row in (0, 1, 3, 5, 7):
        with open(refs[row].path, "rb") as file:
            image = decode_rgb(file.read(), 10**7)
        tokens, embedding = encoder.encode(encoder.preprocess(image)[None])
        np.testing.assert_allclose(
            tokens[0].astype(np.float32), _floats(bits[row]), atol=0.02
        )
        np.testing.assert_allclose(embedding[0], embeddings[row], atol=1e-5)
    for row in (2, 4, 6):
        assert (bits[row] == 0x7FC0).all()
        assert np.isnan(embeddings[row]).all()


def test_out_of_memory_halves_the_batch_of_the_whole_shard(case, encoder, monkeypatch):
    """The model raises above one image per pass; the bytes are those of this size."""
    task, _ = case
    monkeypatch.setattr(encoder, "processor", "a GPU, batches of {}".format)
    encode_shard(replace(task, batch_size=1), encoder)
    expected = stored(task)
    sizes = []

    def too_large(_module, inputs):
        sizes.append(len(inputs[0]))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = encoder.adapter.register_forward_pre_hook(too_large)
    try:
        receipt = encode_shard(task, encoder)
    finally:
        hook.remove()
    assert sizes == [2, 1, 1, 1, 1, 1], "3 inputs; the third is truncated"
    assert receipt.encoded_on == "a GPU, batches of 1"
    assert read_receipts(_layout(task), [0], "plan").get(0) == receipt
    for bits, other in zip(stored(task), expected, strict=True):
        assert np.array_equal(bits, other, equal_nan=bits.dtype == np.float32)


def test_full_batches_hold_the_same_rows(case, encoder, monkeypatch):
    """Batches of a GPU are full, also behind failed inputs and at the end."""
    task, _ = case
    encode_shard(replace(task, batch_size=7), encoder)
    expected = stored(task)
    monkeypatch.setattr(encoder, "fills_batches", True)
    sizes = []
    hook = encoder.adapter.register_forward_pre_hook(
        lambda _, inputs: sizes.append(len(inputs[0]))
    )
    try:
        receipt = encode_shard(replace(task, batch_size=7), encoder)
    finally:
        hook.remove()
    assert sizes == [7, 7]
    assert (receipt.indexed, receipt.duplicates) == (5, 1)
    bits, embeddings = stored(task)
    np.testing.assert_allclose(_floats(bits), _floats(expected[0]), atol=0.02)
    np.testing.assert_allclose(embeddings, expected[1], atol=1e-5)


def test_out_of_memory_for_one_image_ends_the_build(case, encoder):
    task, _ = case

    def too_large(_module, _inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = encoder.adapter.register_forward_pre_hook(too_large)
    try:
        with pytest.raises(EdjeError, match="too little memory to encode one image"):
            encode_shard(task, encoder)
    finally:
        hook.remove()
    assert read_receipts(_layout(task), [0], "plan").get(0) is None


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_last_shard_and_missing_file(case, encoder):
    task, refs = case
    receipt = encode_shard(replace(task, shard=1), encoder)
    assert (receipt.rows, receipt.indexed, receipt.failed) == (3, 2, {"missing": 1})
    assert read_staged_rows(_layout(task), 1)["uri_raw"].to_pylist()[2] == refs[10].path


def test_stopping_leaves_no_shard_and_no_threads(case, encoder):
    task, _ = case
    answers = iter([False, True])
    with pytest.raises(TaskInterrupted):
        encode_shard(task, encoder, should_stop=lambda: next(answers))
    assert not _layout(task).token_shard("bf16", 0).exists()
    assert list(_layout(task).staging.iterdir()) == []
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("edje-")
    ]


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
    assert read_receipts(_layout(task), [0], "plan").get(0) is None
    assert list(_layout(task).staging.iterdir()) == []
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("edje-")
    ]
    assert encode_shard(task, encoder).failed == {"empty": 1, "truncated": 1}


def test_changed_bytes_are_not_indexed_under_the_planned_hash(case, encoder):
    task, refs = case
    refs = [
        replace(ref, content_hash="0" * 64) if at == 1 else ref
        for at, ref in enumerate(refs)
    ]
    write_input_lists(_layout(task), refs, 8)
    assert encode_shard(task, encoder).failed["changed-since-plan"] == 1


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
    bits, embeddings = stored(task)
    assert (bits[1] == 0x7FC0).all()
    assert (bits[0] != 0x7FC0).all()
    assert np.isnan(embeddings[1]).all()
    assert np.isfinite(embeddings[0]).all()
