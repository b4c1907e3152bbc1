"""Builds that encode shards while their sources are still being listed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.indexing import shard_encoding
from pipelines.engines.base import Notice
from pipelines.jobs import encode_ahead
from pipelines.jobs.build import run_build
from pipelines.jobs.failed_inputs import FailedInputsError
from pipelines.planning.resources import check_index_size, disk_need
from pipelines.progress.events import PlanReady, Progress, StatusMessage
from pipelines.progress.stopping import JobStopped
from pipelines.sources import dedupe, digest
from storage_formats import verify_index
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.writing.pieces import rows_in_pieces
from tests.command_line import environment
from tests.integration.builds import contents

IMPATIENT = """
import sys
from pipelines.cli import main
from pipelines.jobs import encode_ahead

encode_ahead.PATIENCE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 0.0)


@pytest.fixture
def encoded(monkeypatch):
    """The row ids of the images that pass through the model, in order."""
    row_ids = []
    encode = shard_encoding._encode

    def count(encoder, images):
        row_ids.extend(image.entry.row_id for image in images)
        return encode(encoder, images)

    monkeypatch.setattr(shard_encoding, "_encode", count)
    return row_ids


@pytest.fixture
def listed(config, photos, monkeypatch):
    """Builds the photos that standard input and `sources` name.

    The list on standard input goes on after `rows` rows only once `until()` is True, by default once these rows are
    stored. Other arguments are those of `run_build`.
    """
    names = sorted(photos.glob("*.jpg"))

    def build(
        out, paths=names, *, rows=0, until=None, sources=(), on_event=ignore, should_stop=lambda: False, **changes
    ):
        request = dataclasses.replace(config(**changes), sources=("-", *sources), out=out)
        reader, writer = os.pipe()
        arguments = (writer, paths, rows, until or (lambda: rows_in_pieces(Layout(out), ()) >= rows))
        thread = threading.Thread(target=write_list, args=arguments)
        with open(reader) as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            thread.start()
            try:
                return run_build(request, on_event, should_stop)
            finally:
                thread.join()

    return build


def ignore(_event):
    pass


def write_list(writer, paths, rows, until):
    with open(writer, "w") as file:
        for path in paths[: rows + 1]:  # a shard is reported before its last input
            file.write(f"{path}\n")
        file.flush()
        wait(until)
        for path in paths[rows + 1 :]:
            file.write(f"{path}\n")


def wait(condition):
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def texts(events):
    return [event.text for event in events if isinstance(event, StatusMessage)]


def test_full_shards_are_encoded_before_the_list_ends_and_the_bytes_are_equal(
    listed, tmp_path, impatient, encoded, monkeypatch
):
    monkeypatch.setattr(digest, "_REPORT_EVERY", 1)
    events = []
    result = listed(tmp_path / "ahead", rows=8, on_event=events.append)
    listing = [event for event in events if isinstance(event, Progress) and event.activity == "listing the sources"]
    assert listing[0].encoded == 0
    assert listing[-1].encoded == 8
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5, 6, 8, 9], "each image once; 7 is no image"
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 60.0)
    listed(tmp_path / "calm")
    assert (result.indexed, result.failed) == (9, 1)
    assert contents(tmp_path / "ahead") == contents(tmp_path / "calm")
    assert verify_index(tmp_path / "ahead") == []


def test_duplicates_are_found_ahead(listed, tmp_path, impatient, encoded, monkeypatch):
    monkeypatch.setattr(dedupe, "_AHEAD", 0)
    result = listed(tmp_path / "ahead", rows=8, dedupe=True)
    assert (result.indexed, result.duplicates) == (8, 1)
    assert sorted(encoded) == [0, 1, 2, 4, 5, 6, 8, 9]
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 60.0)
    listed(tmp_path / "calm", dedupe=True)
    assert contents(tmp_path / "ahead") == contents(tmp_path / "calm")


def test_a_stopped_listing_keeps_the_shards_whose_inputs_are_listed_again(listed, photos, tmp_path, impatient, encoded):
    out, names, events = tmp_path / "index", sorted(photos.glob("*.jpg")), []
    with pytest.raises(JobStopped, match="stopped while listing the sources"):
        listed(out, rows=8, on_event=events.append, should_stop=lambda: rows_in_pieces(Layout(out), ()) == 8)
    kept = f"8 rows encoded during the listing are kept in {out} for the next run"
    assert texts(events) == [kept]
    encoded.clear()
    changed = [*names[:5], names[6], names[5], *names[7:]]
    listed(out, changed)
    assert sorted(encoded) == [4, 5, 6, 8, 9], "shard 0 is kept, and shard 1 has other inputs"
    listed(tmp_path / "calm", changed)
    assert contents(out) == contents(tmp_path / "calm")


def test_an_engine_that_fails_during_the_listing_is_shown_and_the_build_goes_on(
    listed, tmp_path, impatient, monkeypatch
):
    failed, events = threading.Event(), []

    def fail(*_):
        failed.set()
        raise MemoryError("no memory")

    monkeypatch.setattr(encode_ahead, "open_ahead_worker", fail)
    result = listed(tmp_path / "index", rows=4, until=failed.is_set, on_event=events.append)
    assert result.indexed == 9
    assert "the encoding during the listing ended: a worker could not start: MemoryError: no memory" in texts(events)


def test_lost_machines_and_killed_workers_count_against_no_input(listed, tmp_path, impatient, monkeypatch):
    out, events, left = tmp_path / "index", [], {}
    path = Layout(out).attempt(0)

    class LosesMachine:
        def run(self, make_worker, tasks, *, on_progress, should_stop):
            path.parent.mkdir()
            path.write_text(attempt)
            yield Notice("node 7 was lost", repeated=next(tasks))
            left["lost"] = path.exists()
            path.write_text(attempt)

    def on_event(event):
        events.append(event)
        if isinstance(event, PlanReady):
            left["killed"] = path.exists()

    attempt = json.dumps({"careful": False, "position": None, "deaths": {}})
    monkeypatch.setattr(encode_ahead, "engine_of", lambda config, build: LosesMachine())
    listed(out, rows=4, until=lambda: "lost" in left, on_event=on_event)
    assert left == {"lost": False, "killed": False}
    assert "node 7 was lost" in texts(events)


def test_a_source_that_fails_in_mid_listing_costs_no_rows(listed, photos, tmp_path, impatient, encoded):
    names, late, events = sorted(photos.glob("*.jpg")), tmp_path / "late.parquet", []
    write_paths(late, names[9:])
    intact = late.read_bytes()
    late.write_bytes(intact[:4] + bytes(40) + intact[44:])
    with pytest.raises(UsageError, match=r"late\.parquet"):
        listed(tmp_path / "index", names[:9], rows=8, sources=[str(late)], on_event=events.append)
    assert "8 rows encoded during the listing are kept" in texts(events)[-1]
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5, 6]
    encoded.clear()
    late.write_bytes(intact)
    listed(tmp_path / "index", names[:9], sources=[str(late)])
    assert sorted(encoded) == [8, 9]
    listed(tmp_path / "calm", names[:9], sources=[str(late)])
    assert contents(tmp_path / "index") == contents(tmp_path / "calm")


def write_paths(path, names):
    pq.write_table(pa.table({"path": [str(name) for name in names]}), path, compression="zstd")


def test_the_limit_of_failures_counts_rows_that_were_encoded_ahead(listed, tmp_path, impatient, encoded):
    with pytest.raises(FailedInputsError):
        listed(tmp_path / "index", rows=8, max_failed=0.0)
    assert 7 not in encoded
    encoded.clear()
    assert listed(tmp_path / "index", max_failed=1.0).failed == 1
    assert sorted(encoded) == [8, 9]


@pytest.mark.parametrize("pause", [0.0, 0.1])  # the interrupt comes before or while the build waits for the engine
def test_a_second_interrupt_leaves_no_engine_behind(listed, tmp_path, impatient, monkeypatch, pause):
    started, ended = threading.Event(), []

    def encode(ahead, _build):
        started.set()
        ahead._stopped.wait()
        time.sleep(pause)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        ended.append(True)

    monkeypatch.setattr(encode_ahead.EncodingAhead, "_encode", encode)
    with pytest.raises(KeyboardInterrupt):
        listed(tmp_path / "index", rows=4, until=started.is_set)
    assert ended == [True]


def test_stored_rows_count_as_free_space(tmp_path, monkeypatch):
    spec = IndexSpec(4, 4, (4, 16), 24)
    need = disk_need(spec).total
    monkeypatch.setattr("pipelines.planning.resources.free_disk", lambda _: need - 1)
    with pytest.raises(UsageError, match="of disk, but only"):
        check_index_size(tmp_path, spec)
    piece = Layout(tmp_path).pieces(0) / "00000000-00000004"
    piece.parent.mkdir(parents=True)
    piece.write_bytes(b"x")
    check_index_size(tmp_path, spec)


def start(out, photos, model, engine):
    """A build of standard input in another process, which encodes ahead at once."""
    sizes = ["--shard-size", "4", "--batch-size", "2", "--threads", "1", "--device", "cpu"]
    arguments = ["build", "-", "--out", out, "--model", model, "--engine", engine, "--max-failed", "1", *sizes]
    return subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def stored(out, shard):
    """The files of the rows of `shard` that are stored, with their times."""
    return {path: path.stat().st_mtime_ns for path in Layout(out).pieces(shard).glob("[0-9]*")}


@pytest.mark.slow
def test_ray_encodes_what_a_slow_pipe_has_named(listed, photos, tiny_bundle, tmp_path):
    out = tmp_path / "index"
    process = start(out, photos, tiny_bundle, "ray")
    for row, path in enumerate(sorted(photos.glob("*.jpg"))):
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        time.sleep(0.2)
        rows = row // 4 * 4
        wait(lambda rows=rows: rows_in_pieces(Layout(out), ()) >= rows)
        assert process.poll() is None
        assert rows_in_pieces(Layout(out), ()) >= rows, "the list has not ended"
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    listed(tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")
    assert verify_index(out) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "ray"])
def test_a_killed_and_an_interrupted_listing_resume_with_the_same_bytes(photos, tiny_bundle, tmp_path, engine):
    out, calm, names = tmp_path / "index", tmp_path / "calm", sorted(photos.glob("*.jpg"))
    changed = [*names[:5], names[6], names[5], *names[7:]]
    kept = {}
    for number, paths in ((signal.SIGKILL, names), (signal.SIGINT, changed)):
        before = stored(out, 1)
        process = start(out, photos, tiny_bundle, engine)
        process.stdin.writelines(f"{path}\n" for path in paths[:9])
        process.stdin.flush()
        wait(lambda before=before: rows_in_pieces(Layout(out), ()) == 8 and stored(out, 1) != before)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert rows_in_pieces(Layout(out), ()) == 8, err
        assert stored(out, 1) != before, "the killed listing had other inputs"
        assert not Layout(out).plan.exists()
        kept = kept or stored(out, 0)
        assert stored(out, 0) == kept
    assert "8 rows encoded during the listing are kept" in err
    assert "stopped while listing the sources. To resume: edje-index build -" in err
    for root in (out, calm):
        lines = "".join(f"{path}\n" for path in changed)
        _, err = start(root, photos, tiny_bundle, engine).communicate(lines, timeout=300)
        assert verify_index(root) == [], err
    assert contents(out) == contents(calm)
    assert not Path(out / "build").exists()
