"""Random changes of an index, in a directory and on an object store, are compared with
a model of the index in plain Python.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from edje_index.indexing.faiss_index import AnnIndex
from pipelines.cli import main
from storage_formats import (
    RowIdError,
    TokenStore,
    codec,
    read_rows,
    verify_index,
)
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import same_bits

SHARD = 4
PHOTOS = 40
# this photo is not an image
BROKEN = 13


def run(*arguments, expect=(0,)):
    """Run a command of `edje-index` in this process."""
    assert main([*map(str, arguments)]) in expect


@dataclass(frozen=True)
class State:
    """What a snapshot holds: the photo of each row that is not deleted, the row ids in
    use, the uris that an update leaves out because their rows were deleted by hand,
    precisions.
    """

    photos: dict[int, int]
    rows: int

    removed: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset({"bf16"})


@dataclass
class Model:
    """The index in plain Python. `snapshots` are the kept states by number; the
    last is the current one.
    """

    snapshots: dict[int, State]
    next_shard: int
    commits: int = 0

    @property
    def number(self):
        return max(self.snapshots)

    @property
    def now(self):
        return self.snapshots[self.number]

    def appended(self, photos):
        new = [photo for photo in photos if photo not in self.now.photos.values()]
        if not any(photo != BROKEN for photo in new):
            return None
        return self.with_new_rows(self.now, new)

    def updated(self, kept, photos):
        """The state with the rows `kept`, the rows of moved photos, and new rows for
        the other `photos`; None if nothing changes.
        """
        held = self.now.photos.items()
        left = {row: photo for row, photo in held if row in kept}
        moved = {
            row: photo
            for row, photo in held
            if row not in kept
            and photo in photos
            and photo not in left.values()
            and photo != BROKEN
        }
        left = {row: photo for row, photo in held if row in kept or row in moved}
        new = [photo for photo in photos if photo not in left.values()]
        if not new and not moved and len(left) == len(held):
            return None
        after = replace(self.now, photos=left)
        return self.with_new_rows(after, new) if new else after

    def with_new_rows(self, state, photos):
        first = self.next_shard * SHARD
        rows = dict(enumerate(photos, first))
        return replace(state, photos={**state.photos, **rows}, rows=first + len(photos))

    def compacted(self):
        """The state of a new index without deleted rows."""
        photos = dict(enumerate(self.now.photos.values()))
        return replace(self.now, photos=photos, rows=len(photos))

    def merged(self, photos):
        """The state of a new index of this one and of an index of `photos`, without
        deleted rows and without photos that this one has.
        """
        left = self.compacted()
        offset = -(-left.rows // SHARD) * SHARD
        held = set(left.photos.values()) - {BROKEN}
        added = [photo for photo in photos if photo not in held]
        right = dict(enumerate(added, offset))
        rows = offset + len(added) if added else left.rows
        return replace(left, photos={**left.photos, **right}, rows=rows)

    def commit(self, state):
        self.next_shard = max(self.next_shard, -(-state.rows // SHARD))
        self.snapshots[self.number + 1] = state
        self.commits += 1

    def keep(self, count):
        for number in sorted(self.snapshots)[:-count]:
            del self.snapshots[number]


@dataclass
class Reference:
    """Tokens and embeddings of every photo, from an index of all of them."""

    blocks: np.ndarray
    embeddings: np.ndarray

    def check(self, root, model):
        state = model.now
        index = CommittedIndex.open(root)
        manifest = index.manifest
        assert verify_index(root) == []
        assert manifest.snapshot.number == model.number
        assert set(manifest.spec.precisions) == state.precisions
        assert manifest.spec.rows == state.rows
        rows = read_rows(root, columns=["row_id", "uri"]).to_pydict()
        stored = {
            row: int(Path(uri).stem)
            for row, uri in zip(rows["row_id"], rows["uri"], strict=True)
        }
        assert stored == state.photos
        for precision in state.precisions:
            with TokenStore.open(root, precision) as store:
                self.check_blocks(store, state, precision)
        self._check_search(index, state)

    def check_blocks(self, store, state, precision="bf16"):
        row_ids = list(state.photos)
        photos = list(state.photos.values())
        entry = codec(precision, store.block_shape)
        expected = self.blocks[photos]
        expected = np.where(
            np.isnan(expected),
            expected,
            entry.decode(entry.encode(np.nan_to_num(expected))),
        )
        assert store.row_ids().tolist() == row_ids
        assert same_bits(store.fetch(row_ids), expected)
        deleted = set(range(store._view.index.manifest.spec.rows)) - set(row_ids)
        for row in sorted(deleted)[:3]:
            with contextlib.suppress(RowIdError):
                # no input has this row id
                assert np.isnan(store.fetch([row])).all()

    def _check_search(self, index, state):
        indexed = {row: photo for row, photo in state.photos.items() if photo != BROKEN}
        query = self.embeddings[0] + 0.5 * self.embeddings[1]
        row_ids = np.array(list(indexed))
        scores = self.embeddings[list(indexed.values())] @ query
        found_rows, found_scores = AnnIndex(index).nearest(query, 5)
        order = np.lexsort((row_ids, -scores))[:5]
        assert set(found_rows.tolist()) == set(row_ids[order].tolist())
        np.testing.assert_allclose(found_scores, scores[order], rtol=1e-5)
        stored = read_embeddings(index, row_ids)
        np.testing.assert_array_equal(stored, self.embeddings[list(indexed.values())])


def write_photo(path, photo):
    if photo == BROKEN:
        path.write_bytes(b"not an image")
        return
    pixels = np.random.default_rng(photo).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_photos(folder, photos):
    folder.mkdir()
    for photo in photos:
        write_photo(folder / f"{photo:03d}.jpg", photo)
    return folder


def build(sources, out, bundle, precisions=("bf16",)):
    options = [option for name in precisions for option in ("--precision", name)]
    options += ["--engine", "inline", "--shard-size", SHARD, "--batch-size", 1]
    run("build", sources, "--out", out, "--model", bundle, *options, "--max-failed", 1)


def reference_of(folder, bundle):
    root = folder / "every.edje"
    build(write_photos(folder / "every", list(range(PHOTOS))), root, bundle)
    blocks = TokenStore.open(root).fetch(range(PHOTOS))
    return Reference(blocks, read_embeddings(CommittedIndex.open(root), range(PHOTOS)))


@dataclass
class Trial:
    """One sequence of random changes."""

    folder: Path
    bundle: Path
    root: Path | str
    model: Model
    reference: Reference
    rng: random.Random
    merges: int = 0
    kinds: ClassVar[dict[str, int]] = {
        "append": 28,
        "update": 14,
        "delete": 20,
        "erase": 8,
        "retry_failed": 4,
        "rollback": 12,
        "gc": 7,
        "quantize": 9,
        "compact": 10,
        "merge": 6,
    }

    def change(self, step):
        kinds = dict(self.kinds)
        if isinstance(self.root, str):
            # these two make an index in a directory
            del kinds["compact"], kinds["merge"]
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        before = self.model.now
        store = TokenStore.open(self.root)
        getattr(self, kind)(step)
        if kind not in ("gc", "erase"):
            self.reference.check_blocks(store, before)
        store.close()
        self.reference.check(self.root, self.model)

    def append(self, step):
        photos = sorted(self.rng.sample(range(PHOTOS), self.rng.randint(1, 9)))
        sources = write_photos(self.folder / f"sources-{step}", photos)
        after = self.model.appended(photos)
        self._run(after, "append", self.root, sources, "--engine", "inline")

    def update(self, step):
        """Make the index equal to a folder in which photos come and go. Return False
        if it would have no image.
        """
        living = self.folder / "living"
        shutil.rmtree(living, ignore_errors=True)
        photos = sorted({1, 2, *self.rng.sample(range(PHOTOS), self.rng.randint(1, 9))})
        names = {photo: str(living / f"{photo:03d}.jpg") for photo in photos}
        rows = read_rows(self.root, columns=["row_id", "uri"]).to_pylist()
        kept = {row["row_id"] for row in rows if row["uri"] in names.values()}
        photos = [
            photo for photo in photos if names[photo] not in self.model.now.removed
        ]
        after = self.model.updated(kept, photos)
        if after is not None and {*after.photos.values()} <= {BROKEN}:
            # the later changes need an image
            return False
        write_photos(living, list(names))
        options = ("--max-vanished", 1, "--engine", "inline")
        self._run(after, "update", self.root, living, *options)
        return True

    def delete(self, step):
        after, options = self._without_some_rows()
        if after is not None:
            self._run(after, "delete", self.root, *options)

    def _without_some_rows(self):
        """A state without some rows, and the options that name these rows; None if
        too few rows would be left.
        """
        photos = self.model.now.photos
        count = max(0, min(len(photos) - 2, self.rng.randint(1, 4)))
        rows = self.rng.sample(list(photos), count)
        left = {row: photo for row, photo in photos.items() if row not in rows}
        if not rows or all(photo == BROKEN for photo in left.values()):
            return None, []
        uris = read_rows(self.root, rows, ["uri"])["uri"].to_pylist()
        after = replace(
            self.model.now,
            photos=left,
            removed=self.model.now.removed | {*uris},
        )
        return after, [option for row in rows for option in ("--rows", row)]

    def erase(self, step):
        """Rows are deleted, and their data are removed. The other rows keep their
        ids.
        """
        after, options = self._without_some_rows()
        if after is None:
            return
        before = self.model.number
        self._run(after, "delete", self.root, *options, "--erase")
        self.model.keep(1)
        run("rollback", self.root, before, expect=(2,))

    def retry_failed(self, step):
        """After an update, the broken photo fails again, so nothing changes."""
        if self.update(step):
            run("update", self.root, "--retry-failed", "--engine", "inline")

    def compact(self, step):
        """The later changes are changes of the new index."""
        out = self.folder / f"dense-{step}.edje"
        run("compact", self.root, "--out", out)
        self._go_on(out, self.model.compacted())

    def _go_on(self, root, state):
        self.root = root
        self.model.snapshots = {0: state}
        self.model.next_shard = -(-state.rows // SHARD)

    def rollback(self, step):
        numbers = sorted(self.model.snapshots)[:-1]
        if numbers:
            number = self.rng.choice(numbers)
            self._run(self.model.snapshots[number], "rollback", self.root, number)

    def gc(self, step):
        keep = self.rng.randint(1, 4)
        run("gc", self.root, "--keep", keep)
        self.model.keep(keep)

    def quantize(self, step):
        held = "fp8" in self.model.now.precisions
        options = ("--drop", "fp8") if held else ("--to", "fp8")
        after = replace(self.model.now, precisions=self.model.now.precisions ^ {"fp8"})
        run("quantize", self.root, *options)
        self.model.snapshots[self.model.number] = after

    def merge(self, step):
        """Merge the index with a new one. The later changes are changes of the
        merged index.
        """
        photos = sorted({1, *self.rng.sample(range(PHOTOS), self.rng.randint(1, 6))})
        other = self.folder / f"other-{step}.edje"
        out = self.folder / f"merged-{step}.edje"
        sources = write_photos(self.folder / f"sources-{step}", photos)
        build(sources, other, self.bundle, self.model.now.precisions)
        run("merge", self.root, other, "--out", out)
        self._go_on(out, self.model.merged(photos))
        self.merges += 1

    def _run(self, after, *arguments):
        """Run a command that brings the index to the state `after`; None if it
        changes nothing.
        """
        run(*arguments, expect=(0, 1) if after is None else (0,))
        if after is not None:
            self.model.commit(after)


@pytest.mark.usefixtures("memory_stores")
@pytest.mark.parametrize("place", ["directory", "object store"])
@pytest.mark.parametrize(
    ("seed", "changes"), [(1, 4), pytest.param(2, 200, marks=pytest.mark.slow)]
)
def test_changes_equal_those_of_a_model(tmp_path, tiny_bundle, place, seed, changes):
    reference = reference_of(tmp_path, tiny_bundle)
    first = list(range(0, PHOTOS, 4))
    root: Path | str = tmp_path / "index.edje"
    if place == "object store":
        root = "s3://bucket/index.edje"
    build(write_photos(tmp_path / "first", first), root, tiny_bundle)
    model = Model(
        {0: State(dict(enumerate(first)), len(first))},
        next_shard=-(-len(first) // SHARD),
    )
    trial = Trial(tmp_path, tiny_bundle, root, model, reference, random.Random(seed))
    reference.check(root, model)
    for step in range(changes):
        trial.change(step)
    assert model.commits > changes // 4
    if place == "directory" and changes >= 200:
        assert trial.merges > 2
