"""A shard whose attempt was stopped or killed: what was stored of it is not encoded again, and the bytes are equal."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.images.input_lists import write_input_lists
from edje_index.images.inputs import InputRef
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.indexing.shard_encoding import EncodingInterrupted, encode_shard
from edje_index.indexing.shard_task import ShardTask
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.rows import TIMING_COLUMNS, read_shard_rows
from storage_formats.writing import pieces
from storage_formats.writing.begin import begin_index, clear_staging
from storage_formats.writing.pieces import rows_in_pieces
from tests.integration.builds import make_photos

ROWS, BATCH = 16, 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_untrained_bundle(folder, sizes=TINY)
    return ImageEncoder.open(folder, device="cpu", threads=1)


@pytest.fixture
def task(tmp_path):
    """A shard of 16 images in two precisions; two are truncated, and the second batch has no good image."""
    make_photos(tmp_path / "photos", ROWS)
    paths = sorted((tmp_path / "photos").iterdir())
    for path in paths[3:6]:
        path.write_bytes(b"")
    refs = [InputRef(str(path), os.fsencode(path)) for path in paths]
    spec = IndexSpec(ROWS, 32, (4, 16), 24, ("bf16", "fp8"))
    return begin(tmp_path / "index", spec, refs)


def begin(root: Path, spec: IndexSpec, refs: list[InputRef]) -> ShardTask:
    begin_index(root, spec)
    Layout(root).input_lists.mkdir(parents=True, exist_ok=True)
    write_input_lists(Layout(root), refs, spec.shard_size)
    return ShardTask(str(root), 0, spec, "plan", batch_size=BATCH, max_pixels=10**7, decode_threads=2)


class Counting:
    """An encoder that counts images and sends its process a signal after some."""

    def __init__(self, encoder, kill_after=ROWS + 1):
        self.encoder, self.kill_after, self.images = encoder, kill_after, 0
        self.preprocess = encoder.preprocess

    def encode(self, pixels):
        if self.images + len(pixels) > self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.images += len(pixels)
        return self.encoder.encode(pixels)


def contents(task: ShardTask) -> dict[str, object]:
    layout = Layout(Path(task.root))
    files = [path for name in task.spec.precisions for path in layout.token_array(name).glob("c.0.*")]
    files += [layout.checksums(name, 0) for name in task.spec.precisions] + [layout.embedding_shard(0)]
    rows = read_shard_rows(layout, 0).drop_columns(list(TIMING_COLUMNS)).to_pylist()
    assert len(files) == 5
    return {"rows": rows, **{str(path.relative_to(layout.root)): path.read_bytes() for path in files}}


@pytest.fixture
def calm(task, encoder, tmp_path):
    """The contents of the shard, encoded in one go, in another index."""
    photos = sorted((tmp_path / "photos").iterdir())
    other = begin(tmp_path / "calm", task.spec, [InputRef(str(path), os.fsencode(path)) for path in photos])
    encode_shard(other, encoder)
    return contents(other)


def kill_while_encoding(task, encoder, kill_after) -> None:
    pid = os.fork()
    if pid == 0:
        encode_shard(task, Counting(encoder, kill_after))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    clear_staging(task.root)


def stop_after(task, encoder, batches) -> None:
    calls = []
    with pytest.raises(EncodingInterrupted):
        encode_shard(task, encoder, should_stop=lambda: calls.append(0) or len(calls) > batches)


def resume(task, encoder) -> int:
    """Number of images that the resumed attempt encodes."""
    counting = Counting(encoder)
    encode_shard(task, counting)
    assert not Layout(Path(task.root)).pieces(0).exists()
    return counting.images


def test_a_killed_attempt_loses_one_batch(task, encoder, calm, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 0.0)
    kill_while_encoding(task, encoder, kill_after=5)  # images of rows 0, 1, 2, 7, 8 of four batches
    assert rows_in_pieces(Layout(Path(task.root))) == {0: 9}
    kill_while_encoding(task, encoder, kill_after=3)  # the next attempt dies as well
    assert rows_in_pieces(Layout(Path(task.root))) == {0: 12}
    assert resume(task, encoder) == 3
    assert contents(task) == calm


def test_a_stopped_attempt_loses_nothing(task, encoder, calm):
    stop_after(task, encoder, batches=2)
    stop_after(task, encoder, batches=1)
    assert [path.name for path in sorted(Layout(Path(task.root)).pieces(0).iterdir())] == [
        "00000000-00000006",
        "00000006-00000009",
    ]
    resume(task, encoder)
    assert contents(task) == calm


def test_a_quick_attempt_stores_no_pieces(task, encoder):
    stored = []
    encode_shard(task, encoder, lambda progress: stored.append(Layout(Path(task.root)).pieces(0).exists()))
    assert stored == [False] * 6


def test_many_blocks_in_memory_are_stored_early(task, encoder, monkeypatch):
    monkeypatch.setattr(pieces, "_MAX_BYTES", 4 * 4 * 16 * 2)  # four blocks
    stored = []
    encode_shard(task, encoder, lambda _: stored.append(rows_in_pieces(Layout(Path(task.root))).get(0, 0)))
    assert stored == [0, 0, 9, 9, 15, 15]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "renamed", "link"])
def test_a_damaged_piece_and_those_after_it_do_not_count(task, encoder, calm, damage, tmp_path):
    for _ in range(3):
        stop_after(task, encoder, batches=1)
    path = Layout(Path(task.root)).pieces(0) / "00000003-00000006"
    data = path.read_bytes()
    if damage == "renamed":
        path.rename(path.with_name("00000003-00000099"))
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        flipped = data[:200] + bytes([data[200] ^ 1]) + data[201:]
        path.write_bytes({"flip": flipped, "truncate": data[:-9], "empty": b""}[damage])
    assert resume(task, encoder) == np.sum([row["status"] == "indexed" for row in calm["rows"][3:]])
    assert contents(task) == calm


def test_pieces_of_another_plan_do_not_count(task, encoder, calm):
    stop_after(task, encoder, batches=4)
    other = replace(task, plan="other")
    assert resume(other, encoder) == sum(row["status"] == "indexed" for row in calm["rows"])
