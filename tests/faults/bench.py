"""Runs commands of `edje-index` in this process with recorded operations or faults, and
checks what they leave.

    LD_PRELOAD=shim.so python -m tests.faults.bench SHIM FOLDER

Reads a JSON object per line, the arguments of `Bench.crashes` or `Bench.errors`, and
answers with counts and problems.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines.cli import main
from pipelines.jobs.snapshots import history
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    TokenStore,
    change,
    read_rows,
    verify_index,
)
from storage_formats.format.file_check import Problem
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import TIMING_COLUMNS
from storage_formats.format.tombstones import live_rows
from tests.faults.crash_states import (
    Disk,
    read_log,
    read_tree,
    write_tree,
)
from tests.integration.builds import make_photos

COUNT, ERROR, SHORT, RECORD = range(4)
_CHANGES = ("create", "mkdir", "write", "fsync", "truncate", "rename")
_OPERATIONS = (*_CHANGES, "open", "list", "read", "unlink")
FAULTS = {
    "EIO": (ERROR, _OPERATIONS, errno.EIO),
    "ENOSPC": (ERROR, _CHANGES, errno.ENOSPC),
    "EMFILE": (ERROR, ("open", "create", "list"), errno.EMFILE),
    "ENOMEM": (ERROR, ("mmap",), errno.ENOMEM),
    "EINTR": (
        ERROR,
        ("open", "create", "read", "write", "fsync", "truncate"),
        errno.EINTR,
    ),
    "short": (SHORT, ("read", "write"), 0),
}
"""Kind, the operations of shim.c that can meet it, and errno of each fault."""

ENGINE = "--engine inline --threads 1 --shard-size 4 --batch-size 4"
INDEXES = {
    "built": ("", f"build photos --model model --out built {ENGINE}"),
    "other": ("", f"build more --model model --out other {ENGINE}"),
    "deleted": ("built", "delete deleted --rows 2"),
    "two": ("built", "quantize two --to fp8"),
    "damaged": ("two", ""),
    "imported": ("", "import-arrays tokens.npy embeddings.npy --out imported"),
    # two segments and two precisions, a deleted and an edited row, and FAISS files
    "appended": ("two", "append appended more --engine inline"),
    "shorter": ("appended", "delete shorter --rows 2"),
    "edited": ("shorter", "edit edited --rows 1 --set title=lake"),
    "lived": ("edited", "ann build lived"),
}
"""Indexes to begin with: the one to copy first, and the words of a command."""
CASES = {
    "build": ("", f"build photos --model model --out INDEX {ENGINE} --dedupe"),
    "append": ("built", "append INDEX more --engine inline"),
    "update": ("built", "update INDEX living --max-vanished 1 --engine inline"),
    "delete": ("built", "delete INDEX --rows 1"),
    "edit": ("deleted", "edit INDEX --rows 1 --set title=lake"),
    "erase": ("built", "delete INDEX --rows 1 --erase"),
    "compact": ("", "compact deleted --out INDEX"),
    "merge": ("", "merge built other --out INDEX"),
    "copy": ("", "copy deleted INDEX"),
    "copy-rows": ("", "copy built INDEX --rows 0 --rows 4"),
    "quantize": ("built", "quantize INDEX --to fp8"),
    "quantize-drop": ("two", "quantize INDEX --drop fp8"),
    "requantize": ("two", "quantize INDEX --to int8 --drop bf16"),
    "ann": ("deleted", "ann build INDEX"),
    "rollback": ("deleted", "rollback INDEX 0"),
    "gc": ("deleted", "gc INDEX --keep 1"),
    "import-arrays": (
        "",
        "import-arrays tokens.npy embeddings.npy --out INDEX",
    ),
    "import-append": (
        "imported",
        "import-arrays tokens.npy embeddings.npy --out INDEX --append",
    ),
    "repair": ("damaged", "repair INDEX"),
    "append-lived": ("lived", "append INDEX late --engine inline"),
    "update-lived": ("lived", "update INDEX living --max-vanished 1 --engine inline"),
    "delete-lived": ("lived", "delete INDEX --rows 0 --rows 9"),
    "edit-lived": ("lived", "edit INDEX --rows 1 --rows 8 --set title=sea"),
    "erase-lived": ("lived", "delete INDEX --rows 9 --erase"),
    "compact-lived": ("", "compact lived --out INDEX"),
    "merge-lived": ("", "merge lived two --out INDEX"),
    "copy-lived": ("", "copy lived INDEX"),
    "requantize-lived": ("lived", "quantize INDEX --to nvfp4 --drop fp8"),
    "rollback-lived": ("lived", "rollback INDEX 1"),
    "gc-lived": ("lived", "gc INDEX --keep 2"),
}
"""For each command, the index before it and its words. INDEX is the index that it
writes or changes.
"""
# once done, the same command does not do
_CHANGES_AGAIN = (
    "rollback",
    "merge",
    "copy",
    "copy-rows",
    "compact",
    "import-arrays",
    "import-append",
)
# each file or snapshot counts
_SEVERAL_CHANGES = ("erase", "gc", "repair")


def call(*words):
    """Exit code and output of `edje-index WORDS` in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([*map(str, words)])
    return code, output.getvalue()


def make_inputs(folder):
    """Write the model and the images and arrays that commands read to `folder`."""
    make_photos(folder / "photos", 8)
    for name, first, stop in (("more", 9, 13), ("late", 13, 16)):
        make_photos(folder / name, stop)
        for path in sorted((folder / name).iterdir())[:first]:
            path.unlink()
    shutil.copytree(folder / "photos", folder / "living")
    (folder / "living/0001.jpg").unlink()
    (folder / "living/new.jpg").write_bytes((folder / "more/0012.jpg").read_bytes())
    create_untrained_bundle(folder / "model", sizes=TINY)
    rng = np.random.default_rng(0)
    np.save(folder / "tokens.npy", rng.standard_normal((6, 4, 16), dtype=np.float32))
    np.save(folder / "embeddings.npy", rng.standard_normal((6, 8), dtype=np.float32))


def make_indexes(folder, names):
    """Make those of `names` that are indexes of INDEXES."""
    for name in names:
        if name in INDEXES and not (folder / name).exists():
            before, words = INDEXES[name]
            make_indexes(folder, [before])
            if before:
                shutil.copytree(folder / before, folder / name)
            assert not words or call(*words.split())[0] == 0
            if name == "damaged":
                path = folder / name / "tokens/fp8/c.0.0"
                path.write_bytes(path.read_bytes()[:-1] + b"?")


def view(root):
    """What readers of the index see: kinds of the snapshots, and a digest of the
    last. None if there is no index.
    """
    if not (root / "index.json").exists():
        return None
    opened = CommittedIndex.open(root)
    kinds = [entry.kind for entry in history(root)]
    seen = [live_rows(opened).tolist(), kinds[-1], opened.manifest.ann]
    seen.append(read_rows(root).drop_columns(list(TIMING_COLUMNS)).to_pylist())
    for name in opened.manifest.spec.precisions:
        try:
            with TokenStore(opened, name) as store:
                seen += [name, store.fetch(seen[0]).view(np.uint16).tobytes()]
        except CorruptIndexError:
            seen.append(f"{name} is damaged")
    return f"{kinds} {hashlib.sha256(repr(seen).encode()).hexdigest()[:8]}"


def names(root):
    """The files of the index, without the checksums in names. Shard tables may stay
    for readers, and the hashes of inputs are written again when they are needed.
    """
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    files = (str(path) for path in paths if path.parts[0] != "hashes")
    return {re.sub(r"-[0-9a-f]{8}\.", "-*.", name) for name in files}


@dataclass
class Bench:
    """Runs one command of CASES, again and again. Operations below `disk` count."""

    shim: ctypes.CDLL
    folder: Path
    name: str

    def __post_init__(self):
        before, words = CASES[self.name]
        make_indexes(self.folder, [before, *words.split()])
        self.disk = self.folder / "disk"
        self.log = self.folder / "log"
        self.index = self.disk / "index"
        self.words = [
            str(self.index) if word == "INDEX" else word for word in words.split()
        ]
        self.start = {}
        if before:
            tree = read_tree(self.folder / before)
            self.start = {
                "index": None,
                **{f"index/{name}": data for name, data in tree.items()},
            }
        self.place(self.start)
        self.known = set(verify_index(self.index)) if before else set()
        self.views = [view(self.index)]
        code, output = self.run(self.words, RECORD)
        assert code == 0, output
        self.operations = read_log(self.log.read_bytes(), self.disk)
        self.after = view(self.index)
        self.names = names(self.index)
        assert verify_index(self.index) == []
        disk = Disk(self.start)
        for operation in self.operations:
            disk.apply(operation)
        # every operation was recorded
        assert disk.tree() == read_tree(self.disk)
        self.read_before = {}

    def place(self, tree):
        shutil.rmtree(self.disk, ignore_errors=True)
        self.disk.mkdir()
        write_tree(tree, self.disk)

    def run(self, words, kind, operations=(), error=0, at=0):
        """Exit code and output of a command. Its operations are logged, and one of
        them may fail.
        """
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        listed = f",{','.join(operations)},".encode()
        self.shim.faults_arm(
            os.fsencode(self.disk), kind, error, ctypes.c_long(at), listed, log
        )
        try:
            return call(*words)
        finally:
            self.shim.faults_arm(b"", COUNT, 0, ctypes.c_long(0), b"", -1)
            os.close(log)

    def crashes(self, most=None, only=""):
        """Check what a power cut may leave after each operation, or those whose line
        has the pattern `only`.

        `most` limits the number of states, by chance.
        """
        return self.check_states(self.start, self.operations, most, only)

    def recoveries(self, starts, most=None, only=""):
        """Check what a second power cut may leave, while the command runs again in
        `starts` of the states of `crashes`.

        `most` limits the number of states of each start. `only` selects operations of
        the first run.
        """
        chosen = [*self.states(self.start, self.operations, only).values()]
        counts = Counter()
        problems = []
        for number, tree in random.Random(1).sample(chosen, min(starts, len(chosen))):
            self.place(tree)
            words = self.words_again(view(self.index))
            # A reader may have ended an erasure. Let the command end it.
            self.place(tree)
            code, output = self.run(words, RECORD)
            assert code == 0, output
            answer = self.check_states(
                tree, read_log(self.log.read_bytes(), self.disk), most
            )
            problems += [
                f"cut after {number} {self.operations[number]}, then {each}"
                for each in answer.pop("problems")
            ]
            counts += Counter(answer)
        return {**counts, "problems": problems}

    def states(self, start, operations, only):
        """The different states of the disk after each of `operations`, and what
        readers may see: `self.views`.
        """
        disk = Disk(start)
        states = {}
        for number, operation in enumerate(operations):
            disk.apply(operation)
            matches = re.search(only, f"{operation.name} {operation.path}")
            for tree in disk.states() if matches else ():
                states[tuple(sorted(tree.items(), key=lambda item: item[0]))] = (
                    number,
                    tree,
                )
            if operation.other == "index/index.json" or operation.path.startswith(
                "index/snapshots/0"
            ):
                self.place(disk.tree())
                self.views.append(view(self.index))
        return states

    def check_states(self, start, operations, most, only=""):
        """Two states are equal to a run that opens none of the staged files whose
        contents differ.
        """
        states = self.states(start, operations, only)
        chosen = [*states.values()]
        if most is not None and most < len(chosen):
            chosen = random.Random(0).sample(chosen, most)
        problems = []
        runs = 0
        known = {}
        for number, tree in chosen:
            is_last = number == len(operations) - 1
            staged = {
                name: data
                for name, data in tree.items()
                if data is not None and "/staging/" in name
            }
            key = (
                frozenset(item for item in tree.items() if item[0] not in staged),
                frozenset(staged),
                is_last,
            )
            fits = (
                problem
                for needed, problem in known.setdefault(key, [])
                if needed.items() <= staged.items()
            )
            if (problem := next(fits, "new")) == "new":
                self.place(tree)
                problem = self.problem(self.views[-1:] if is_last else self.views)
                runs = runs + 1
                opened = set(
                    re.findall(
                        rf"^(?:open|create) {self.disk}/(.*)",
                        self.log.read_text(),
                        re.MULTILINE,
                    )
                )
                known[key].append(
                    ({name: staged[name] for name in opened & staged.keys()}, problem)
                )
            if problem:
                problems.append(
                    f"{self.name} cut after {number} {operations[number]}: {problem}"
                )
        return {
            "all": len(states),
            "count": len(chosen),
            "runs": runs,
            "problems": problems,
        }

    def errors(self, fault, most=None, only=""):
        """Let operations meet a fault, one in each run. For `most` and `only`, see
        `crashes`.
        """
        kind, operations, error = FAULTS[fault]
        self.place(self.start)
        self.run(self.words, COUNT)
        lines = self.log.read_text().splitlines()
        places = [
            at
            for at, line in enumerate(lines, 1)
            if line.split()[0] in operations and re.search(only, line)
        ]
        if most is not None and most < len(places):
            places = sorted(random.Random(0).sample(places, most))
        problems = []
        count = 0
        for at in places:
            self.place(self.start)
            code, output = self.run(self.words, kind, operations, error, at)
            lines = self.log.read_text(errors="replace").splitlines()
            struck = [
                line
                for line, following in pairwise(lines)
                if following.startswith("FAULT")
            ]
            count += bool(struck)
            problem = self.wrong_end(code, output)
            if not problem and (code or (self.index / "build/journal.json").exists()):
                problem = self.problem(None)
            if problem:
                problems.append(
                    f"{self.name}, {fault} at {at} {struck}: {problem}\n{output}"
                )
        return {"count": count, "problems": problems}

    def wrong_end(self, code, output):
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        found_damage = (
            self.name == "repair"
            and re.search(r"\d problems? left", output) is not None
        )
        if (
            code not in (0, 1)
            or len(errors) != code - found_damage
            or "Traceback" in output
            or "unexpected" in output
        ):
            return f"exit code {code} with {len(errors)} errors"
        try:
            has_changed = view(self.index) == self.after != self.views[0]
        except EdjeError as error:
            return f"view: {error!r}"
        if (
            code
            and has_changed
            and "committed" not in output
            and self.name.removesuffix("-lived") not in _SEVERAL_CHANGES
        ):
            return "the change took effect, but the error does not say so"
        return None

    def problem(self, views):
        """What is wrong with the index, or with it after the command ran again."""
        try:
            seen, damage = self.read()
            # earlier ones may be removed
            of_snapshot = [(each or "").rpartition(" ")[2] for each in views or [seen]]
            if damage or (seen or "").rpartition(" ")[2] not in of_snapshot:
                return f"damage {damage}, sees {seen} instead of one of {views}"
            words = self.words_again(seen)
            code, output = self.run(words, COUNT)
            if code:
                return f"{' '.join(words)}: exit code {code}: {output}"
            seen, damage = self.read(strictly=True)
            if seen != self.after or damage or names(self.index) != self.names:
                files = sorted(names(self.index) ^ self.names)
                return (
                    f"at the end: files {files}, damage {damage}, sees {seen} instead"
                    f" of {self.after}"
                )
            return None
        except (EdjeError, OSError) as error:
            return repr(error)

    def words_again(self, seen):
        """The command that finishes what a crash left, if readers see `seen`."""
        return (
            ["gc", str(self.index)]
            if seen == self.after and self.name.removesuffix("-lived") in _CHANGES_AGAIN
            else self.words
        )

    def read(self, *, strictly=False):
        """What readers see, and damage. Leftovers are no damage, unless `strictly`.
        Equal indexes are read once.
        """
        files = read_tree(self.disk)
        key = hash(
            (
                frozenset(
                    item
                    for item in files.items()
                    if not re.match("index/build/(?!erased/)", item[0])
                ),
                strictly,
            )
        )
        if key not in self.read_before:
            seen = view(self.index)
            problems = list[Problem]()
            if seen is not None:
                problems = [
                    each
                    for each in verify_index(self.index)
                    if each.code != "stray-file" or strictly
                ]
            self.read_before[key] = (
                seen,
                [each for each in problems if strictly or each not in self.known],
            )
        return self.read_before[key]


def serve(shim, folder):
    """Answer requests until standard input ends."""
    os.chdir(folder)
    # equal changes then write equal files
    change.now = lambda: "2026-01-01T00:00:00+00:00"
    make_inputs(folder)
    benches = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("name")
        kind = request.pop("kind")
        if name not in benches:
            benches[name] = Bench(shim, folder, name)
        print(json.dumps(getattr(benches[name], kind)(**request)), flush=True)


if __name__ == "__main__":
    serve(ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]))
    # to free torch's objects would take longer
    os._exit(0)
