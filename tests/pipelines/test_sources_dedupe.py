"""Duplicates depend on the inputs alone; the first of several identical inputs is
the original.
"""

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from edje_index.images.decode import content_hash
from edje_index.inputs.refs import InputRef
from pipelines.sources import hash_and_mark_duplicates


def refs_of(folder, contents):
    """One input per content; None stands for a missing file."""
    refs = []
    for row, content in enumerate(contents):
        path = folder / f"{row}.jpg"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        refs.append(
            InputRef(
                str(path),
                os.fsencode(path),
                size=None if content is None else len(content),
            )
        )
    return refs


@given(st.lists(st.none() | st.sampled_from([b"", b"a", b"b", b"c"]), max_size=80))
def test_first_of_identical_inputs_is_the_original(tmp_path_factory, contents):
    folder = tmp_path_factory.getbasetemp() / "dedupe"
    folder.mkdir(exist_ok=True)
    refs = refs_of(folder, contents)
    marked = list(hash_and_mark_duplicates(refs))
    assert [ref.uri for ref in marked] == [ref.uri for ref in refs]
    for row, (ref, content) in enumerate(zip(marked, contents, strict=True)):
        first = contents.index(content)
        if not content:
            assert (ref.problem, ref.content_hash, ref.duplicate_of) == (
                "missing" if content is None else "empty",
                None,
                None,
            )
        else:
            assert (ref.problem, ref.content_hash) == (None, content_hash(content))
            assert ref.duplicate_of == (None if first == row else first)


def test_looks_ahead_a_bounded_number_of_inputs(tmp_path):
    (ref,) = refs_of(tmp_path, [b"x"])
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield ref

    marked = hash_and_mark_duplicates(endless())
    for _ in range(10):
        next(marked)
    assert taken < 200
    marked.close()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("edje-hash")
    ]


def test_helper_processes_hash_the_inputs_of_a_large_collection(tmp_path, monkeypatch):
    refs = refs_of(tmp_path, [None, b"", *(b"%d" % (row % 30) for row in range(90))])
    in_threads = list(hash_and_mark_duplicates(refs))
    monkeypatch.setattr("pipelines.sources._THREADED_INPUTS", 5)
    assert list(hash_and_mark_duplicates(refs)) == in_threads
    assert in_threads[-1].duplicate_of == 31
