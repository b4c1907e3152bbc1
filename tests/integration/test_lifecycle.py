"""Random changes of an index, some of them killed, are compared with a model of the index in plain Python."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from edje_index.indexing.faiss_index import AnnIndex
from storage_formats import (
    Manifest,
    RowIdError,
    TokenStore,
    codec,
    read_rows,
    verify_index,
)
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.remote import open_index
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import REPO, same_bits

SHARD = 4
PHOTOS = 40
BROKEN = 13  # this photo is not an image
_LONGEST_KILL = {"append": 0.6, "update": 0.6, "compact": 0.3, "retry": 0.3}  # seconds


class ForkingCli:
    """Commands of `edje-index`, each in a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        command = [sys.executable, "-m", "tests.integration.forking_cli", str(self._output)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO, env=dict(os.environ)
        )

    def run(self, *arguments: object, kill_after: float | None = None) -> int:
        """Exit code of a command; -9 if it was killed after `kill_after` seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        process = int(self._process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(process, signal.SIGKILL)
        return int(self._process.stdout.readline())

    def output(self) -> str:
        return self._output.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass(frozen=True)
class State:
    """What a snapshot holds: the photo of each row that is not deleted, the row ids in use, deletions, precisions."""

    photos: dict[int, int]
    rows: int
    first: int = 0
    deleted: int = 0
    precisions: frozenset[str] = frozenset({"bf16"})


@dataclass
class Model:
    """The index in plain Python. `snapshots` are the kept states by number; the last is the current one."""

    snapshots: dict[int, State]
    next_shard: int
    killed: dict[str, int] = field(default_factory=dict)
    commits: int = 0

    @property
    def number(self) -> int:
        return max(self.snapshots)

    @property
    def now(self) -> State:
        return self.snapshots[self.number]

    def appended(self, photos: list[int]) -> State | None:
        new = [photo for photo in photos if photo not in self.now.photos.values()]
        if not any(photo != BROKEN for photo in new):
            return None
        first = self.next_shard * SHARD
        rows = dict(zip(range(first, first + len(new)), new, strict=True))
        return replace(self.now, photos={**self.now.photos, **rows}, rows=first + len(new))

    def updated(self, kept: set[int], photos: list[int]) -> State | None:
        """The state with only the rows `kept`, and with rows for the other `photos`; None if nothing changes."""
        left = {row: photo for row, photo in self.now.photos.items() if row in kept}
        new = [photo for photo in photos if photo not in left.values()]
        deleted = len(self.now.photos) - len(left)
        if not new:
            return replace(self.now, photos=left, deleted=self.now.deleted + deleted) if deleted else None
        first = self.next_shard * SHARD
        rows = dict(zip(range(first, first + len(new)), new, strict=True))
        return replace(self.now, photos={**left, **rows}, rows=first + len(new), deleted=self.now.deleted + deleted)

    def compacted(self) -> State | None:
        if not self.now.deleted:
            return None
        first = self.next_shard * SHARD
        photos = dict(enumerate(self.now.photos.values(), first))
        return replace(self.now, photos=photos, rows=first + len(photos), first=first, deleted=0)

    def merged(self, photos: list[int]) -> State:
        """The state of a new index of this one and of an index of `photos`, in which rows are numbered from 0."""
        offset = -(-(self.now.rows - self.now.first) // SHARD) * SHARD
        rows = {row - self.now.first: photo for row, photo in self.now.photos.items()}
        held = set(rows.values()) - {BROKEN}
        new = {offset + position: photo for position, photo in enumerate(photos) if photo not in held}
        deleted = self.now.deleted + len(photos) - len(new)
        return replace(self.now, photos={**rows, **new}, rows=offset + len(photos), first=0, deleted=deleted)

    def commit(self, state: State) -> None:
        self.next_shard = max(self.next_shard, -(-state.rows // SHARD))
        self.snapshots[self.number + 1] = state
        self.commits += 1

    def keep(self, count: int) -> None:
        for number in sorted(self.snapshots)[:-count]:
            del self.snapshots[number]


@dataclass
class Reference:
    """Tokens and embeddings of every photo, from an index of all of them."""

    blocks: np.ndarray
    embeddings: np.ndarray

    def check(self, root: Path, model: Model) -> None:
        state = model.now
        manifest = Manifest.load(root)
        assert verify_index(root) == []
        assert manifest.snapshot.number == model.number
        assert set(manifest.spec.precisions) == state.precisions
        assert manifest.spec.rows == state.rows
        rows = read_rows(root, columns=["row_id", "uri"]).to_pydict()
        stored = {row: int(Path(uri).stem) for row, uri in zip(rows["row_id"], rows["uri"], strict=True)}
        assert stored == state.photos
        for precision in state.precisions:
            with TokenStore.open(root, precision) as store:
                self.check_blocks(store, state, precision)
        self._check_search(root, manifest, state)

    def check_blocks(self, store: TokenStore, state: State, precision: str = "bf16") -> None:
        row_ids, photos = list(state.photos), list(state.photos.values())
        entry = codec(precision, store.block_shape)
        expected = self.blocks[photos]
        expected = np.where(np.isnan(expected), expected, entry.decode(entry.encode(np.nan_to_num(expected))))
        assert store.row_ids().tolist() == row_ids
        assert same_bits(store.fetch(row_ids), expected)
        deleted = set(range(store._view.index.manifest.spec.rows)) - set(row_ids)
        for row in sorted(deleted)[:3]:
            with contextlib.suppress(RowIdError):
                assert np.isnan(store.fetch([row])).all()  # no input has this row id

    def _check_search(self, root: Path, manifest: Manifest, state: State) -> None:
        indexed = {row: photo for row, photo in state.photos.items() if photo != BROKEN}
        query = self.embeddings[0] + 0.5 * self.embeddings[1]
        row_ids = np.array(list(indexed))
        scores = self.embeddings[list(indexed.values())] @ query
        found_rows, found_scores = AnnIndex(CommittedIndex.open(root)).nearest(query, 5)
        order = np.lexsort((row_ids, -scores))[:5]
        assert set(found_rows.tolist()) == set(row_ids[order].tolist())
        np.testing.assert_allclose(found_scores, scores[order], rtol=1e-5)
        stored = read_embeddings(CommittedIndex.open(root), row_ids)
        np.testing.assert_array_equal(stored, self.embeddings[list(indexed.values())])


def write_photo(path: Path, photo: int) -> None:
    if photo == BROKEN:
        path.write_bytes(b"not an image")
        return
    pixels = np.random.default_rng(photo).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_photos(folder: Path, photos: list[int]) -> Path:
    folder.mkdir()
    for photo in photos:
        write_photo(folder / f"{photo:03d}.jpg", photo)
    return folder


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingCli]:
    forking = ForkingCli(tmp_path_factory.mktemp("cli"))
    yield forking
    forking.close()


def build(
    cli: ForkingCli, sources: Path, out: Path, bundle: Path, precisions: frozenset[str] = frozenset({"bf16"})
) -> None:
    options = [option for name in sorted(precisions) for option in ("--precision", name)]
    options += ["--engine", "inline", "--shard-size", SHARD, "--batch-size", 1, "--threads", 1, "--max-failed", 1]
    assert cli.run("build", sources, "--out", out, "--model", bundle, *options) == 0, cli.output()


def reference_of(cli: ForkingCli, folder: Path, bundle: Path) -> Reference:
    build(cli, write_photos(folder / "every", list(range(PHOTOS))), folder / "every.edje", bundle)
    blocks = TokenStore.open(folder / "every.edje").fetch(range(PHOTOS))
    return Reference(blocks, read_embeddings(CommittedIndex.open(folder / "every.edje"), range(PHOTOS)))


@dataclass
class Trial:
    """One sequence of random changes."""

    cli: ForkingCli
    folder: Path
    bundle: Path
    root: Path | str
    model: Model
    reference: Reference
    rng: random.Random
    kills: float
    merges: int = 0
    kill_factor: ClassVar[float] = 1.0  # the kills of slower commands come later
    kinds: ClassVar[dict[str, int]] = {
        "append": 28, "update": 14, "delete": 20, "erase": 8, "retry_failed": 4, "rollback": 12, "gc": 7, "quantize": 9,
        "compact": 10, "merge": 6,
    }  # fmt: skip

    def directory(self) -> Path:
        """A directory with the index."""
        return Path(self.root)

    def placed(self, index: Path) -> Path | str:
        """Where the changes of `index`, a new index, are made."""
        return index

    def change(self, step: int) -> None:
        kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        before, store = self.model.now, TokenStore.open(self.root)
        getattr(self, kind)(step)
        if kind not in ("gc", "erase"):
            self.reference.check_blocks(store, before)
        store.close()
        self.reference.check(self.directory(), self.model)

    def append(self, step: int) -> None:
        photos = sorted(self.rng.sample(range(PHOTOS), self.rng.randint(1, 9)))
        sources = write_photos(self.folder / f"sources-{step}", photos)
        after = self.model.appended(photos)
        arguments = ("append", self.root, sources, "--engine", "inline", "--quiet", "--json")
        self._run("append", after, arguments)
        if after is not None and self.model.now != after:  # it was killed before its commit: resume it
            assert self.cli.run(*arguments) == 0, self.cli.output()
            self.model.commit(after)

    def update(self, step: int) -> None:
        """Make the index equal to a folder in which photos come and go."""
        living = self.folder / "living"
        shutil.rmtree(living, ignore_errors=True)
        photos = sorted({1, 2, *self.rng.sample(range(PHOTOS), self.rng.randint(1, 9))})
        write_photos(living, photos)
        names = {str(living / f"{photo:03d}.jpg") for photo in photos}
        rows = read_rows(self.root, columns=["row_id", "uri"]).to_pylist()
        after = self.model.updated({row["row_id"] for row in rows if row["uri"] in names}, photos)
        options = ("--max-vanished", 1, "--engine", "inline", "--quiet", "--json")
        arguments = ("update", self.root, living, *options)
        self._run("update", after, arguments)
        if after is not None and self.model.now != after:
            assert self.cli.run(*arguments) == 0, self.cli.output()
            self.model.commit(after)

    def delete(self, step: int) -> None:
        after, options = self._without_some_rows()
        if after is not None:
            self._run("delete", after, ("delete", self.root, *options))

    def _without_some_rows(self) -> tuple[State | None, list[object]]:
        """A state without some rows, and the options that name these rows; None if too few rows would be left."""
        rows = self.rng.sample(list(self.model.now.photos), min(len(self.model.now.photos) - 2, self.rng.randint(1, 4)))
        left = {row: photo for row, photo in self.model.now.photos.items() if row not in rows}
        if not rows or all(photo == BROKEN for photo in left.values()):
            return None, []
        after = replace(self.model.now, photos=left, deleted=self.model.now.deleted + len(rows))
        return after, [option for row in rows for option in ("--rows", row)]

    def erase(self, step: int) -> None:
        """Rows are deleted; then the other rows of their shards move, where the row map says, and get new ids."""
        after, options = self._without_some_rows()
        if after is None:
            return
        before, arguments = self.model.number, ("delete", self.root, *options, "--erase")
        code = self.cli.run(*arguments, kill_after=self._kill_after(0.15))
        if code == -signal.SIGKILL:
            self.model.killed["erase"] = self.model.killed.get("erase", 0) + 1
            assert verify_index(self.directory()) == []
            code = self.cli.run(*arguments)
        assert code == 0, self.cli.output()
        self.model.commit(after)
        rows, spec = np.array(list(after.photos)), Manifest.load(self.directory()).spec
        erased = [row for row in options if isinstance(row, int)]
        with TokenStore.open(self.root) as store:
            moved, gone = store.translate(rows), store.translate(erased)
        moves = np.isin(rows // SHARD, [row // SHARD for row in erased])
        assert (moved[moves] >= self.model.next_shard * SHARD).all(), "new ids, so that no old id names another photo"
        assert (moved >= 0).all()
        assert (gone == -1).all()
        photos = dict(sorted(zip(moved.tolist(), after.photos.values(), strict=True)))
        first = spec.used_segments[0].first_row
        self.model.commit(replace(after, photos=photos, rows=spec.rows, first=first, deleted=0))
        self.model.keep(1)
        assert self.cli.run("rollback", self.root, before) == 2

    def retry_failed(self, step: int) -> None:
        """The broken photo fails again for the same reason, so nothing changes."""
        arguments = ("update", self.root, "--retry-failed", "--engine", "inline", "--quiet")
        self._run("retry", None, arguments)
        assert self.cli.run(*arguments) == 0, self.cli.output()

    def compact(self, step: int) -> None:
        after, arguments = self.model.compacted(), ("compact", self.root, "--quiet")
        self._run("compact", after, arguments)
        if after is not None and self.model.now != after and self.rng.random() < 0.5:  # otherwise it stays unfinished
            assert self.cli.run(*arguments) == 0, self.cli.output()
            self.model.commit(after)

    def rollback(self, step: int) -> None:
        numbers = sorted(self.model.snapshots)[:-1]
        if numbers:
            number = self.rng.choice(numbers)
            self._run("rollback", self.model.snapshots[number], ("rollback", self.root, number))

    def gc(self, step: int) -> None:
        keep = self.rng.randint(1, 4)
        code = self.cli.run("gc", self.root, "--keep", keep, kill_after=self._kill_after(0.05))
        if code == -signal.SIGKILL:  # some snapshots may be gone
            assert verify_index(self.directory()) == []
            assert self.cli.run("gc", self.root, "--keep", keep) == 0, self.cli.output()
        self.model.keep(keep)

    def quantize(self, step: int) -> None:
        held = "fp8" in self.model.now.precisions
        options = ("--drop", "fp8") if held else ("--to", "fp8")
        after = replace(self.model.now, precisions=self.model.now.precisions ^ {"fp8"})
        code = self.cli.run("quantize", self.root, *options, kill_after=self._kill_after(0.3))
        if code == -signal.SIGKILL:
            assert verify_index(self.directory()) == []
            assert self.cli.run("quantize", self.root, *options) == 0, self.cli.output()
        else:
            assert code == 0, self.cli.output()
        self.model.snapshots[self.model.number] = after

    def merge(self, step: int) -> None:
        """Merge the index with a new one. The later changes are changes of the merged index."""
        photos = sorted({1, *self.rng.sample(range(PHOTOS), self.rng.randint(1, 6))})
        other, out = self.folder / f"other-{step}.edje", self.folder / f"merged-{step}.edje"
        sources = write_photos(self.folder / f"sources-{step}", photos)
        build(self.cli, sources, other, self.bundle, self.model.now.precisions)
        arguments = ("merge", self.directory(), other, "--out", out, "--quiet")
        code = self.cli.run(*arguments, kill_after=self._kill_after(0.3))
        if code == -signal.SIGKILL:
            self.model.killed["merge"] = self.model.killed.get("merge", 0) + 1
            assert verify_index(self.directory()) == verify_index(other) == []
            code = 0 if (out / "index.json").exists() else self.cli.run(*arguments)
        assert code == 0, self.cli.output()
        after = self.model.merged(photos)
        self.root, self.model.snapshots, self.model.next_shard = self.placed(out), {0: after}, -(-after.rows // SHARD)
        self.merges += 1

    def _kill_after(self, longest: float) -> float | None:
        return self.rng.uniform(0, longest * self.kill_factor) if self.rng.random() < self.kills else None

    def _run(self, kind: str, after: State | None, arguments: tuple[Any, ...]) -> None:
        """Run a command, perhaps kill it, and bring the model to the state that the index must have."""
        code = self.cli.run(*arguments, kill_after=self._kill_after(_LONGEST_KILL.get(kind, 0.05)))
        if code == -signal.SIGKILL:
            self.model.killed[kind] = self.model.killed.get(kind, 0) + 1
            assert verify_index(self.directory()) == []
            number = open_index(self.root).manifest.snapshot.number
            assert number in (self.model.number, self.model.number + 1)
            if number == self.model.number + 1:
                assert after is not None
                self.model.commit(after)
        elif after is not None:
            assert code == 0, self.cli.output()
            self.model.commit(after)


def run_trial(
    cli: ForkingCli, folder: Path, bundle: Path, *, seed: int, changes: int, kills: float, kind: type[Trial] = Trial
) -> Trial:
    reference = reference_of(cli, folder, bundle)
    first = list(range(0, PHOTOS, 4))
    build(cli, write_photos(folder / "first", first), folder / "index.edje", bundle)
    model = Model({0: State(dict(enumerate(first)), len(first))}, next_shard=-(-len(first) // SHARD))
    trial = kind(cli, folder, bundle, folder / "index.edje", model, reference, random.Random(seed), kills)
    trial.root = trial.placed(folder / "index.edje")
    reference.check(trial.directory(), model)
    for step in range(changes):
        trial.change(step)
    return trial


def test_changes_equal_those_of_a_model(cli, tmp_path, tiny_bundle):
    trial = run_trial(cli, tmp_path, tiny_bundle, seed=1, changes=4, kills=0)
    assert trial.model.commits > 1


@pytest.mark.slow
def test_two_hundred_changes_of_which_many_are_killed(cli, tmp_path, tiny_bundle):
    trial = run_trial(cli, tmp_path, tiny_bundle, seed=2, changes=200, kills=0.4)
    assert trial.model.commits > 80
    assert trial.merges > 2
    assert sum(trial.model.killed.values()) > 20, trial.model.killed
