"""Changes of indexes on an object store: the same result as in a directory, cut at
every request, with two writers, and on servers that cannot be trusted.
"""

import contextlib
import datetime
import json
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from edje_index import add_ann
from pipelines import (
    append_index,
    build_index,
    copy_index,
    delete_rows,
    quantize_index,
    repair_index,
    set_columns,
    update_index,
)
from pipelines.jobs.import_arrays import import_arrays
from pipelines.jobs.snapshots import history, remove_snapshots, roll_back
from storage_formats import (
    EdjeError,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.change import UnfinishedChangeError, begin_change
from storage_formats.errors import IncompleteIndexError
from storage_formats.format import prefix
from storage_formats.format.file_check import FileEntry
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import open_place
from storage_formats.format.rows import TIMING_COLUMNS
from storage_formats.remote.objects import ObjectFolder, ObjectStoreError
from storage_formats.writing.shard_writer import ShardWriter
from tests.pipelines.conftest import write_photo

pytestmark = pytest.mark.usefixtures("memory_stores")
CLAIM = "build/claim.json"
URL = "s3://bucket/photos.edje"


@pytest.fixture
def folder():
    return ObjectFolder.open(URL)


@pytest.fixture
def remote(index, folder):
    """The folder of a copy of `index` at `URL`."""
    copy_index(index, URL)
    return folder


def build_files():
    keys = ObjectFolder.open(URL).list_sizes()
    return [key for key in keys if key.startswith("build/")]


def put(folder, key, data):
    folder.put(key, lambda: [data], length=len(data), metadata={})


def import_to(out, **options):
    """Import arrays of the shape of `index`."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / "tokens.npy", Path(name) / "embeddings.npy"]
        for path, shape in zip(paths, ((9, 2, 8), (9, 4)), strict=True):
            np.save(path, rng.standard_normal(shape, dtype=np.float32))
        import_arrays(*paths, out, **options)


def stored(folder):
    return {key: folder.read(key, 1 << 30).data for key in folder.list_sizes()}


def restore(folder, files):
    if keys := sorted(folder.list_sizes()):
        folder.delete(keys)
    for key, data in files.items():
        put(folder, key, data)


def contents(location):
    """What a reader finds."""
    with TokenStore.open(location) as store:
        row_ids = store.row_ids()
        blocks = store.fetch(row_ids)
    rows = read_rows(location).drop_columns(list(TIMING_COLUMNS)).to_pylist()
    return row_ids.tolist(), blocks.tobytes(), rows


def expire(folder):
    """Let the claim of a killed process expire."""
    if CLAIM in folder.list_sizes():
        claim = json.loads(folder.read(CLAIM, 1 << 20).data)
        claim["expires"] = datetime.datetime.now(datetime.UTC).isoformat()
        put(folder, CLAIM, json.dumps(claim).encode())


def test_all_changes_give_the_same_index_as_in_a_directory(tmp_path, tiny_bundle):
    for row in range(20):
        write_photo(tmp_path / "photos" / f"{row:02}.jpg", row)
    for row in (3, 30, 31):
        write_photo(tmp_path / "more" / f"{row:02}.jpg", row)
    more = tmp_path / "more"
    local = tmp_path / "local.edje"
    inline = {"engine": "inline"}
    changes = [
        lambda root: build_index(
            tmp_path / "photos", root, tiny_bundle, device="cpu", shard_size=8, **inline
        ),
        lambda root: append_index(root, more, **inline),
        lambda root: delete_rows(root, rows=[1, 9]),
        lambda root: set_columns(root, [2, 10], {"title": ["Sea", "Hill"]}),
        lambda root: quantize_index(root, ["fp8"]),
        lambda root: delete_rows(root, rows=[4], erase=True),
        add_ann,
        lambda root: delete_rows(root, rows=[5]),
        lambda root: roll_back(root, history(root)[0].snapshot),
        lambda root: quantize_index(root, drop=["bf16"]),
        lambda root: remove_snapshots(root, keep=1),
        lambda root: update_index(root, more, max_vanished=1, **inline),
    ]
    for change in changes:
        change(local)
        change(URL)
        if change is changes[0]:
            assert change(URL).already_finished
        assert contents(URL) == contents(local)
        assert verify_index(URL) == []
        assert build_files() == []
    kinds = [[entry.kind for entry in history(each)] for each in (URL, local)]
    assert kinds[0] == kinds[1]
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def test_a_damaged_file_is_repaired_where_it_lies(index, folder):
    quantize_index(index, ["int8"])
    add_ann(index)
    copy_index(index, URL)
    sound = stored(folder)
    folder.delete([key for key in sound if key.startswith("ann/")])
    for key in ("tokens/int8/c.1.0", "checksums/int8/00000000.crc32c"):
        data = bytearray(sound[key])
        data[7] ^= 1
        put(folder, key, bytes(data))
    assert {problem.path for problem in verify_index(URL)} >= {"tokens/int8/c.1.0"}
    assert len(repair_index(URL).repaired) == 3
    assert verify_index(URL) == []
    assert stored(folder) == sound
    # an earlier snapshot has the FAISS file, too
    delete_rows(URL, rows=[1])
    folder.delete([key for key in sound if key.startswith("ann/")])
    assert repair_index(URL).left == ()
    assert verify_index(URL) == []


@pytest.mark.parametrize("number", range(30, 70, 2))
def test_a_replacement_that_is_cut_keeps_nothing_of_the_replaced_index(
    number, index, other, folder, monkeypatch
):
    copy_index(index, URL)
    set_columns(URL, [2], {"title": ["Sea"]})
    delete_rows(other, rows=[1])
    delete_rows(other, rows=[2])
    requests = Requests(monkeypatch)
    requests.end_after(number, is_done=True, is_dead=True)
    with contextlib.suppress(Killed, EdjeError):
        copy_index(other, URL, replace=True)
    requests.go_on()
    expire(folder)
    # without an index, the replacement has begun
    with contextlib.suppress(UsageError, IncompleteIndexError):
        kinds = [entry.kind for entry in history(URL)]
        assert kinds in (["import", "edit"], ["delete"])
    copy_index(other, URL, replace=True)
    assert [entry.kind for entry in history(URL)] == ["delete"]
    assert verify_index(URL) == []


def test_a_claim_does_not_depend_on_the_clock(remote, monkeypatch):
    boot_time = psutil._psplatform.boot_time
    with open_place(URL) as place, place.claimed():
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + 9)
        with pytest.raises(EdjeError, match="is working on"):
            delete_rows(URL, rows=[1])


def test_arrays_are_imported(tmp_path):
    for out in (URL, tmp_path / "local.edje"):
        import_to(out)
        import_to(out, append=True)
    assert contents(URL) == contents(tmp_path / "local.edje")


class Killed(BaseException):
    """The process is killed."""


class Requests:
    """Counts the requests to object stores. Request number `last` gets no answer, and
    no later request either if `is_dead`. If `is_done`, request number `last` is done.
    """

    def __init__(self, monkeypatch):
        self.count = 0
        self.last = 1 << 30
        self.is_done = False
        self.is_dead = True
        self._lock = threading.Lock()
        repeated = ObjectFolder._repeated

        def request(folder, key, send):
            with self._lock:
                self.count += 1
                number = self.count
            if number > self.last and self.is_dead:
                raise ObjectStoreError("the process is killed")
            if number == self.last:
                with contextlib.suppress(Exception):
                    if self.is_done:
                        repeated(folder, key, send)
                raise Killed
            return repeated(folder, key, send)

        monkeypatch.setattr(ObjectFolder, "_repeated", request)

    def end_after(self, number, *, is_done, is_dead=True):
        self.count = 0
        self.last = number
        self.is_done = is_done
        self.is_dead = is_dead

    def go_on(self):
        self.last = 1 << 30


CHANGES = {
    "delete": lambda: delete_rows(URL, rows=[1]),
    "edit": lambda: set_columns(URL, [2], {"title": ["Sea"]}),
    "quantize": lambda: quantize_index(URL, ["int8"]),
    "drop": lambda: quantize_index(URL, drop=["bf16"]),
    "erase": lambda: delete_rows(URL, rows=[9], erase=True),
    "rollback": lambda: roll_back(URL, 0),
    "gc": lambda: remove_snapshots(URL, keep=1),
    "ann": lambda: add_ann(URL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_cut_at_any_request_recovers(name, index, folder, monkeypatch):
    check_cuts(name, index, folder, monkeypatch, step=1)


def test_a_change_that_is_cut_at_some_requests_recovers(index, folder, monkeypatch):
    check_cuts("delete", index, folder, monkeypatch, step=7)


def check_cuts(name, index, folder, monkeypatch, *, step):
    copy_index(index, URL)
    delete_rows(index, rows=[3])
    copy_index(index, URL)
    requests = Requests(monkeypatch)
    before = contents(URL)
    files = stored(folder)
    requests.count = 0
    CHANGES[name]()
    total = requests.count
    after = contents(URL)
    expected = stored(folder).keys()
    states = set()
    for number in range(1, total + 1, step):
        # Killed before or after a request, or only the answer of the request is lost.
        for is_done, is_dead in ((False, True), (True, True), (True, False)):
            restore(folder, files)
            requests.end_after(number, is_done=is_done, is_dead=is_dead)
            try:
                CHANGES[name]()
            except (Killed, EdjeError):
                # An error of the store after the kill can take the place of the kill.
                assert requests.count >= number
            else:
                # The first change also probes the server, so it has more requests.
                assert requests.count < number
            requests.go_on()
            expire(folder)
            snapshot = json.loads(folder.read("index.json", 1 << 20).data)
            states.add(snapshot["crc32c"])
            assert contents(URL) in (before, after)
            try:
                CHANGES[name]()
            except UsageError:
                # The change was committed, so a rollback finds the snapshot current.
                assert name == "rollback"
            remove_snapshots(URL)
            assert contents(URL) == after
            assert verify_index(URL) == []
            found = folder.list_sizes().keys()
            assert {key for key in found if key.startswith(("tokens/", "build/"))} == {
                key for key in expected if key.startswith(("tokens/", "build/"))
            }
    assert total > 10
    assert len(states) >= 2


def test_only_one_process_changes_an_index(remote):
    entered = threading.Event()
    go_on = threading.Event()

    def wait(event):
        entered.set()
        assert go_on.wait(30)

    worker = threading.Thread(
        target=lambda: quantize_index(URL, ["int8"], on_event=wait)
    )
    worker.start()
    assert entered.wait(30)
    with pytest.raises(EdjeError, match=r"process \d+ .* working on s3://"):
        delete_rows(URL, rows=[1])
    go_on.set()
    worker.join()
    assert delete_rows(URL, rows=[1]).snapshot == 1
    assert TokenStore.open(URL, "int8").fetch([2]).shape == (1, 2, 8)


def test_the_claim_of_a_dead_process_is_taken_over(remote):
    claim = json.loads(prefix._claim_bytes("another"))
    for dead in (
        {"pid": 2**22 + 1},
        {"started": 0.0},
        {"machine": "gone", "expires": "2020-01-01T00:00:00+00:00"},
    ):
        put(remote, CLAIM, json.dumps({**claim, **dead}).encode())
        set_columns(URL, [2], {"title": [json.dumps(dead)]})
    put(remote, CLAIM, json.dumps({**claim, "machine": "b", "host": "b"}).encode())
    with pytest.raises(EdjeError, match="on b is working on"):
        delete_rows(URL, rows=[1])


def test_a_process_that_lost_its_claim_commits_nothing(remote):
    before = contents(URL)

    def take_over(event):
        put(remote, CLAIM, prefix._claim_bytes("another"))

    with pytest.raises(EdjeError, match=r"another process took over .*claim\.json"):
        quantize_index(URL, ["int8"], on_event=take_over)
    assert contents(URL) == before
    # the claim of the other process stays
    assert CLAIM in remote.list_sizes()


def test_another_index_json_is_not_overwritten(remote, other):
    data = (other / "index.json").read_bytes()
    with pytest.raises(EdjeError, match="another writer changed"):
        add_ann(URL, on_event=lambda event: put(remote, "index.json", data))
    assert remote.read("index.json", 1 << 20).data == data


def test_a_server_that_ignores_conditions_is_refused(remote, monkeypatch):
    def careless(self, key, data, expected):
        put(self, key, data)
        return self.read(key, 1 << 20)

    monkeypatch.setattr(prefix, "_honest", set())
    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "replace", careless)
        with pytest.raises(UsageError, match="ignores the conditions of writes"):
            delete_rows(URL, rows=[1])
    assert delete_rows(URL, rows=[1]).deleted == (1,)


def test_a_stopped_change_is_finished_or_discarded(remote, monkeypatch):
    requests = Requests(monkeypatch)
    for number in range(10, 100, 5):
        requests.end_after(number, is_done=True)
        with pytest.raises((Killed, EdjeError)):
            quantize_index(URL, ["int8"])
        requests.go_on()
        expire(remote)
        if any(key.startswith("build/receipts/") for key in build_files()):
            break
    with pytest.raises(UnfinishedChangeError, match="'quantize'"):
        delete_rows(URL, rows=[1])
    before = contents(URL)
    remove_snapshots(URL)
    assert contents(URL) == before
    assert "int8" not in str(remote.list_sizes())
    assert verify_index(URL) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/photos.edje", "can only be read"),
        ("s3://bucket/photos", "has other objects"),
        ("s3://bucket/program", "has other objects"),
        (URL, "exists already"),
    ],
)
def test_a_new_index_needs_a_free_place(url, message, remote):
    used = {"s3://bucket/photos": "0.jpg", "s3://bucket/program": "build/app.zip"}
    for other, key in used.items():
        put(ObjectFolder.open(other), key, b"x")
    with pytest.raises(UsageError, match=message):
        import_to(url)
    for other, key in used.items():
        assert [*ObjectFolder.open(other).list_sizes()] == [key]


def test_a_worker_whose_change_has_ended_puts_nothing(remote, monkeypatch):
    monkeypatch.setattr(prefix, "_FRESH_SECONDS", -1.0)
    with (
        contextlib.ExitStack() as stack,
        begin_change(URL, "quantize", {"to": "int8"}) as change,
        open_place(URL) as place,
    ):
        change.abandon()
        spec = replace(change.index.spec, precisions=("int8",), offset=None)
        writer = stack.enter_context(ShardWriter(place, spec, 0))
        # another process takes over, and runs another change
        expire(remote)
        set_columns(URL, [2], {"title": ["Sea"]})
        with pytest.raises(EdjeError, match="that this process served has ended"):
            writer.commit_files()
    assert verify_index(URL) == []
    assert "int8" not in str(remote.list_sizes())


def test_a_process_that_slept_checks_its_claim(index, remote, monkeypatch):
    source = CommittedIndex.open(index)

    def copy_file(place):
        place.copy(source.place, FileEntry("tokens/x", 4, 0))

    with open_place(URL) as place, place.claimed():
        place.write(place.build / "x", b"x")
        expire(remote)
        assert delete_rows(URL, rows=[1]).deleted == (1,)
        before = stored(remote)
        monkeypatch.setattr(prefix, "_LATE_SECONDS", -1.0)
        for act in (
            lambda: place.write(place.build / "x", b"y"),
            lambda: place.remove([place.manifest]),
            lambda: place.commit(b"{}"),
            lambda: copy_file(place),
        ):
            with pytest.raises(EdjeError, match=r"taken it over|took over"):
                act()
    assert stored(remote) == before


def test_an_unfinished_change_is_not_copied_over(index, remote):
    with begin_change(URL, "delete", {"rows": [1]}) as change:
        change.store_plan({})
    with pytest.raises(UnfinishedChangeError, match="'delete'"):
        copy_index(index, URL)
    copy_index(index, URL, replace=True)
    assert build_files() == []
    assert verify_index(URL) == []
