"""What a disk may hold after a power cut: a model of a file system that replays
recorded operations.

The contents of a file are durable after fsync of the file, and its name after fsync of
the directory. Until then, an operation on names may be lost, also if a later one on
other names is not. A rename is one operation.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

SECTOR = 512
PAGE = 4096
# up to this number of pending operations, every subset of them may survive
_EVERY_SUBSET = 5
_DRAWS = 8


def read_tree(folder):
    """The contents of `folder`, a tree: bytes of each file, None for each directory, by
    relative path. Parents come first.
    """
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in paths
    }


def write_tree(tree, folder):
    """Write `tree` to the empty `folder`."""
    for name, data in tree.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


@dataclass(frozen=True)
class Operation:
    """A line of the log of shim.c. Paths are relative to the folder."""

    name: str
    path: str
    other: str
    offset: int
    data: bytes


def read_log(log, folder):
    """The operations that shim.c recorded below `folder`."""
    operations = []
    at = 0
    prefix = f"{folder}/"
    while at < len(log):
        stop = log.index(b"\n", at)
        name, path, other, offset, length = log[at:stop].decode().rsplit(" ", 4)
        at = stop + 1 + int(length)
        data = log[stop + 1 : at]
        operations.append(
            Operation(
                name,
                f"{path}/".removeprefix(prefix).rstrip("/"),
                other.removeprefix(prefix),
                int(offset),
                data,
            )
        )
    return operations


class Disk:
    """A file system with contents `tree`, all durable."""

    def __init__(self, tree):
        self._now = {}
        self._durable = {}
        self._pending = []
        self._directories = {0}
        self._contents = {}
        self._synced = {}
        self._nodes = 0
        for name, data in tree.items():
            self.apply(
                Operation("mkdir" if data is None else "create", name, "-", 0, b"")
            )
            if data:
                self.apply(Operation("write", name, "-", 0, data))
        self._durable = dict(self._now)
        self._synced = dict(self._contents)
        self._pending = []

    def apply(self, operation):
        """Carry out an operation that succeeded. Raises KeyError if it cannot have
        succeeded in this state.
        """
        name = operation.name
        offset = operation.offset
        if name == "fsync" and not operation.path:
            return self._flush_directory(0)
        slot = self._slot(operation.path)
        if name == "rename":
            return self._change(
                {slot: None, self._slot(operation.other): self._now[slot]}
            )
        if name in ("create", "empty", "mkdir") and slot not in self._now:
            self._nodes += 1
            if name == "mkdir":
                self._directories.add(self._nodes)
            else:
                self._contents[self._nodes] = self._synced[self._nodes] = b""
            return self._change({slot: self._nodes})
        node = self._now[slot]
        if name == "unlink":
            self._change({slot: None})
        elif name == "fsync" and node in self._directories:
            self._flush_directory(node)
        elif name == "fsync":
            self._synced[node] = self._contents[node]
        elif name != "create":
            data = self._contents[node]
            end = {
                "write": max(offset + len(operation.data), len(data)),
                "allocate": max(offset, len(data)),
            }
            data = data[: end.get(name, offset)].ljust(end.get(name, offset), b"\0")
            self._contents[node] = (
                data[:offset] + operation.data + data[offset + len(operation.data) :]
            )

    def tree(self):
        """What processes see now."""
        return self._tree(self._now, self._contents)

    def states(self):
        """What the disk may hold if the power is cut now. States may come repeatedly.

        Every subset of up to five pending operations on names survives; of more, none,
        all, each prefix, each alone, all but each, and some at random. Unsynced
        contents are all there or all lost. Or, with all names, those of one file are
        lost, zeros, shorter, or torn at a border: what lies before it or after it was
        written.
        """
        unsynced = [
            node for node, data in self._contents.items() if data != self._synced[node]
        ]
        for chosen in self._subsets():
            entries = dict(self._durable)
            for number in sorted(chosen):
                _enter(entries, self._pending[number])
            yield self._tree(entries, self._contents)
            if unsynced:
                yield self._tree(entries, self._synced)
        reachable = {*self._now.values()}
        for node in reachable.intersection(unsynced):
            for data in _torn(self._synced[node], self._contents[node]):
                yield self._tree(self._now, {**self._contents, node: data})

    def _subsets(self):
        """Sets of pending operations that may survive. One survives only with all
        earlier ones on the same names.
        """
        needs = []
        for number, operation in enumerate(self._pending):
            earlier = (
                needs[each]
                for each in range(number)
                if operation.keys() & self._pending[each].keys()
            )
            needs.append(frozenset({number}).union(*earlier))
        every = range(len(needs))
        if len(needs) <= _EVERY_SUBSET:
            chosen = [
                each
                for count in range(len(needs) + 1)
                for each in itertools.combinations(every, count)
            ]
        else:
            rng = random.Random(len(needs))
            chosen = [tuple(range(count)) for count in range(len(needs) + 1)] + [
                (each,) for each in every
            ]
            chosen += [
                tuple(other for other in every if each not in needs[other])
                for each in every
            ]
            chosen += [
                tuple(each for each in every if rng.random() < 0.5)
                for _ in range(_DRAWS)
            ]
        return {
            frozenset[int]().union(*(needs[each] for each in numbers))
            for numbers in chosen
        }

    def _slot(self, path):
        *folders, name = path.split("/")
        node = 0
        for folder in folders:
            node = self._now[node, folder]
        return node, name

    def _change(self, entries):
        self._pending.append(entries)
        _enter(self._now, entries)

    def _flush_directory(self, node):
        """Make the pending operations on entries of a directory durable, and
        earlier ones on the same names.
        """
        slots = {slot for each in self._pending for slot in each if slot[0] == node}
        kept = []
        flushed = []
        for operation in reversed(self._pending):
            if operation.keys() & slots:
                slots |= operation.keys()
                flushed.append(operation)
            else:
                kept.append(operation)
        for operation in reversed(flushed):
            _enter(self._durable, operation)
        self._pending = kept[::-1]

    def _tree(self, entries, contents):
        children = {}
        for (folder, name), node in entries.items():
            children.setdefault(folder, []).append((name, node))
        tree = {}

        def add(folder, prefix):
            for name, node in children.get(folder, ()):
                if node in self._directories:
                    tree[prefix + name] = None
                    add(node, f"{prefix}{name}/")
                else:
                    tree[prefix + name] = contents[node]

        add(0, "")
        return tree


def _enter(entries, operation):
    for slot, node in operation.items():
        if node is None:
            entries.pop(slot, None)
        else:
            entries[slot] = node


def _torn(old, new):
    """What a file may hold whose contents change from `old` to `new`."""
    old = old[: len(new)]
    under = old.ljust(len(new), b"\0")
    borders = {
        *range(SECTOR, min(len(new), PAGE), SECTOR),
        *range(PAGE, len(new), PAGE),
    }
    yield old
    yield under
    for border in sorted(borders):
        yield new[:border]
        yield new[:border] + under[border:]
        yield under[:border] + new[border:]
