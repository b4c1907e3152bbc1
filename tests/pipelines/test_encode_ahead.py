"""Builds that encode shards while their sources are still being listed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.images.inputs import InputRef
from edje_index.indexing import shard_encoding
from edje_index.indexing.listed_shards import listed_bytes, listed_shards
from edje_index.indexing.shard_encoding import StageProgress
from pipelines.cli.build import _print as show_result
from pipelines.engines.base import EngineUnavailableError, Notice, TaskFailure
from pipelines.engines.inline import InlineEngine
from pipelines.jobs import encode_ahead, encode_shards
from pipelines.jobs.build import run_build
from pipelines.jobs.build_result import BuildResult
from pipelines.jobs.dry_run import try_build
from pipelines.jobs.failed_inputs import FailedInputsError
from pipelines.planning import prepare
from pipelines.planning.output import has_stored_work
from pipelines.planning.prepare import prepare_build
from pipelines.planning.resources import disk_need
from pipelines.progress.events import PlanReady, Progress, StatusMessage
from pipelines.progress.stopping import JobStopped
from pipelines.sources import dedupe, digest
from storage_formats import verify_index
from storage_formats.atomic import json_bytes
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import read_receipt
from storage_formats.format.rows import read_rows
from storage_formats.format.shard_table import FileEntry
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


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Builds with the engine "ray" run in this process."""
    monkeypatch.setattr(encode_shards, "open_engine", lambda *args, **options: InlineEngine())


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

    The sources `before` come before standard input. The list there goes on after `rows` rows only once `until()` is
    True, by default once these rows are stored. Other arguments are those of `run_build`.
    """
    names = sorted(photos.glob("*.jpg"))

    def build(
        out,
        paths=names,
        *,
        rows=0,
        until=None,
        before=(),
        sources=(),
        on_event=ignore,
        should_stop=lambda: False,
        **changes,
    ):
        changed = config(**{"engine": "ray", **changes})
        request = dataclasses.replace(changed, sources=(*before, "-", *sources), out=out)
        reader, writer = os.pipe()
        arguments = (writer, paths, rows, until or (lambda: rows_ahead(out) >= rows))
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


def rows_ahead(out):
    """The number of rows in `build/listed/`."""
    return 4 * len(listed_shards(out))


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
    monkeypatch.setattr(digest, "_REPORT_SECONDS", 0.0)
    events = []
    result = listed(tmp_path / "ahead", rows=8, on_event=events.append)
    listing = [event for event in events if isinstance(event, Progress) and event.activity == "listing the sources"]
    assert listing[0].encoded == 0
    assert listing[-1].encoded == 8
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5, 6, 8, 9], "each image once; 7 is no image"
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 60.0)
    calm = listed(tmp_path / "calm")
    assert (result.indexed, result.failed) == (9, 1)
    assert (result.encoded_ahead, calm.encoded_ahead) == (8, 0)
    assert result.images_per_second > 0
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
        listed(out, rows=8, on_event=events.append, should_stop=lambda: rows_ahead(out) == 8)
    kept = rf"the rows encoded during the listing \([\d.]+ kB\) are kept in {Layout(out).listed} for the next run"
    assert [re.fullmatch(kept, text) is not None for text in texts(events)] == [True]
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

    class Fails:
        def run(self, make_worker, tasks, *, on_progress, should_stop):
            next(tasks)
            failed.set()
            raise MemoryError("no memory")
            yield

    monkeypatch.setattr(encode_ahead, "open_workers", lambda config, build: (None, Fails()))
    result = listed(tmp_path / "index", rows=4, until=failed.is_set, on_event=events.append)
    assert result.indexed == 9
    ended = "the encoding during the listing ended: MemoryError: no memory; it goes on after the listing"
    assert ended in texts(events)


def test_lost_machines_and_failed_shards_count_against_no_input(listed, tmp_path, impatient, monkeypatch):
    out, events, left = tmp_path / "index", [], {}
    path = Layout(Layout(out).listed).attempt(0)

    class LosesMachine:
        def run(self, make_worker, tasks, *, on_progress, should_stop):
            task = next(tasks)
            path.parent.mkdir()
            path.write_text(json.dumps({"careful": False, "position": None, "deaths": {}}))
            yield Notice("node 7 was lost", repeated=task)
            left["lost"] = path.exists()
            yield TaskFailure(task, "4 worker processes died")

    monkeypatch.setattr(encode_ahead, "open_workers", lambda config, build: (None, LosesMachine()))
    result = listed(out, rows=4, until=lambda: "lost" in left, on_event=events.append)
    assert left == {"lost": False}
    assert result.indexed == 9
    assert "node 7 was lost" in texts(events)
    assert any(text.startswith("the encoding during the listing ended: shard 0: 4 worker") for text in texts(events))


def test_a_silent_pipe_shows_messages_and_progress_of_the_workers(listed, tmp_path, impatient, monkeypatch):
    events = []

    class Reports:
        def run(self, make_worker, tasks, *, on_progress, should_stop):
            yield Notice("node 7 joined the cluster")
            on_progress(StageProgress(shard=0, done=3, failed=0))
            yield from InlineEngine().run(make_worker, tasks, on_progress=on_progress, should_stop=should_stop)

    def are_shown():
        return "node 7 joined the cluster" in texts(events) and {3, 4, 8} <= {getattr(e, "encoded", 0) for e in events}

    workers = encode_ahead.open_workers
    monkeypatch.setattr(encode_ahead, "open_workers", lambda *arguments: (workers(*arguments)[0], Reports()))
    monkeypatch.setattr(digest, "_REPORT_SECONDS", 0.0)
    began = time.monotonic()
    assert listed(tmp_path / "index", rows=8, until=are_shown, on_event=events.append).indexed == 9
    assert time.monotonic() - began < 60, "the list goes on once the events are shown"


def test_an_error_of_a_callback_in_the_thread_of_the_engine_ends_the_build(listed, tmp_path, impatient, monkeypatch):
    failed = threading.Event()

    def fail(_event):
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(digest, "_REPORT_SECONDS", 0.0)
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        listed(tmp_path / "index", rows=4, until=lambda: failed.is_set() and not time.sleep(0.1), on_event=fail)


def test_the_inline_engine_encodes_after_the_listing(listed, tmp_path, impatient, monkeypatch):
    monkeypatch.delattr(encode_ahead.EncodingAhead, "_run")
    assert listed(tmp_path / "index", engine="inline").indexed == 9


def test_columns_that_become_known_later_are_in_every_shard(listed, photos, tmp_path, impatient, encoded, monkeypatch):
    names = sorted(photos.glob("*.jpg"))
    first, last = tmp_path / "first.parquet", tmp_path / "last.parquet"
    pq.write_table(pa.table({"path": [str(name) for name in names[:3]], "score": [1, 2, 3]}), first)
    pq.write_table(pa.table({"path": [str(name) for name in names[9:]], "score": [0.5], "late": ["x"]}), last)
    arguments = {"paths": names[3:9], "before": [str(first)], "sources": [str(last)]}
    listed(tmp_path / "ahead", rows=5, until=lambda: rows_ahead(tmp_path / "ahead") == 8, **arguments)
    assert len(encoded) == 9
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 60.0)
    listed(tmp_path / "calm", **arguments)
    assert contents(tmp_path / "ahead") == contents(tmp_path / "calm")
    assert read_rows(tmp_path / "ahead")["score"].to_pylist() == [1, 2, 3, *[None] * 6, 0.5]
    assert verify_index(tmp_path / "ahead") == []


@pytest.fixture
def stopped(listed, tmp_path, impatient, encoded):
    """The directory of a build that was stopped while it listed its sources, after it had encoded eight rows."""
    out = tmp_path / "stopped"
    with pytest.raises(JobStopped):
        listed(out, rows=8, should_stop=lambda: rows_ahead(out) == 8)
    encoded.clear()
    return out


def test_a_shorter_list_leaves_no_files_of_the_longer_one(listed, photos, tmp_path, stopped, encoded):
    names, left = sorted(photos.glob("*.jpg"))[:6], []
    folder = Layout(stopped).listed
    folder.joinpath("rows", "00000077.parquet").write_bytes(b"rows of a killed worker")

    def look(event):
        if isinstance(event, PlanReady):
            left.extend(path.name for path in folder.rglob("*") if path.is_file())

    listed(stopped, names, on_event=look)
    assert sorted(left) == ["00000000.crc32c", "00000000.json", "00000000.parquet", "c.0.0", "c.0.0.0"]
    assert encoded == [4, 5]
    listed(tmp_path / "calm", names)
    assert contents(stopped) == contents(tmp_path / "calm")


def test_other_settings_keep_no_rows(listed, tmp_path, stopped, encoded):
    useless, is_left = Layout(Layout(stopped).listed).rows_file(0), []
    listed(stopped, max_pixels=10_000_000, on_event=lambda event: is_left.append(useless.exists()))
    assert not is_left[-1], "the rows are removed before other rows are encoded"
    assert len(encoded) == 9
    listed(tmp_path / "calm", max_pixels=10_000_000)
    assert contents(stopped) == contents(tmp_path / "calm")


def test_damaged_and_foreign_files_are_not_moved_into_the_index(listed, tmp_path, stopped, encoded):
    layout = Layout(Layout(stopped).listed)
    layout.rows_file(0).write_bytes(bytes(layout.rows_file(0).stat().st_size))
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    receipt = read_receipt(layout, 1, json.loads(layout.receipt(1).read_text())["plan"])
    files = (FileEntry("../../../outside", 4, 0), *receipt.files[1:])
    layout.receipt(1).write_bytes(json_bytes(dataclasses.replace(receipt, files=files).to_json()))
    listed(stopped)
    assert len(encoded) == 9
    assert outside.read_bytes() == b"mine"
    assert verify_index(stopped) == []


@pytest.mark.parametrize("calls", range(6))
def test_an_error_while_shards_are_moved_loses_at_most_one_shard(
    listed, tmp_path, stopped, encoded, monkeypatch, calls
):
    replace = Path.replace
    remaining = [calls]

    def fails_once(path, target):
        if "build/listed" in str(path) or "staging" in str(path):
            remaining[0] -= 1
            if remaining[0] == -1:
                raise OSError(28, "No space left on device")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails_once)
        with pytest.raises(JobStopped, match="No space left"):
            listed(stopped)
    assert remaining == [-1]
    assert Layout(stopped).plan.exists()
    listed(stopped)
    assert 2 <= len(encoded) <= 6
    listed(tmp_path / "calm")
    assert contents(stopped) == contents(tmp_path / "calm")


def test_a_receipt_of_an_earlier_run_does_not_vouch_for_files_of_another_list(
    listed, photos, tmp_path, stopped, encoded, monkeypatch
):
    names = sorted(photos.glob("*.jpg"))
    replace, failed = Path.replace, []

    def fails_for_rows(path, target):
        if target == Layout(Layout(stopped).listed).rows_file(0):
            failed.append(target)
            raise OSError(28, "No space left on device")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails_for_rows)
        swapped = [names[1], names[0], *names[2:]]
        with pytest.raises(JobStopped):
            listed(stopped, swapped, rows=8, until=lambda: failed, should_stop=lambda: bool(failed))
    encoded.clear()
    listed(stopped)
    assert len(encoded) >= 5, "shard 0 is encoded again"
    listed(tmp_path / "calm")
    assert contents(stopped) == contents(tmp_path / "calm")


def test_what_is_encoded_of_a_shard_when_the_list_ends_is_kept(listed, tmp_path, impatient, monkeypatch, encoded):
    run, encode, aheads = encode_ahead.EncodingAhead._run, shard_encoding._encode, []

    def record(ahead, build):
        aheads.append(ahead)
        run(ahead, build)

    def encode_until_listed(encoder, images):
        blocks = encode(encoder, images)
        aheads[0]._is_listed.wait(60)
        return blocks

    monkeypatch.setattr(encode_ahead.EncodingAhead, "_run", record)
    monkeypatch.setattr(shard_encoding, "_encode", encode_until_listed)
    listed(tmp_path / "ahead", rows=4, until=lambda: encoded)
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5, 6, 8, 9], "each image once"
    listed(tmp_path / "calm")
    assert contents(tmp_path / "ahead") == contents(tmp_path / "calm")


def test_the_rows_of_a_part_of_a_shard_are_kept_and_counted_once(listed, tmp_path, impatient, encoded, monkeypatch):
    out, events, arguments = tmp_path / "index", [], {"shard_size": 8, "max_failed": 1.0}
    kept = "the rows encoded during the listing"
    for at_least in (2, 4):
        stop = functools.partial(lambda rows: len(encoded) >= rows, at_least)
        with pytest.raises(JobStopped, match=r"stopped while listing the sources"):
            listed(out, rows=8, until=stop, on_event=events.append, should_stop=stop, **arguments)
        assert kept in texts(events)[-1]
        assert has_stored_work(out)
        assert listed_shards(out) == set()
    monkeypatch.setattr(encode_ahead, "PATIENCE_SECONDS", 60.0)
    with pytest.raises(JobStopped) as stopped:
        listed(out, should_stop=lambda: len(encoded) >= 6, **arguments)
    rows = len(encoded)
    assert re.match(rf"stopped; {rows} of 10 rows are kept, 0 of 2 shards are finished", str(stopped.value))
    assert listed(out, **arguments).images_per_second > 0
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5, 6, 8, 9], "each image once"
    listed(tmp_path / "calm", **arguments)
    assert contents(out) == contents(tmp_path / "calm")


def test_an_interrupted_listing_with_nothing_encoded_keeps_nothing(listed, tmp_path, impatient):
    out, events = tmp_path / "index", []
    with pytest.raises(JobStopped):
        listed(out, on_event=events.append, should_stop=lambda: True)
    assert texts(events) == []
    assert not has_stored_work(out)


def test_the_speed_of_a_build_that_encoded_ahead_is_that_after_the_listing(capsys):
    result = BuildResult(10, 9, 0, 1, {}, 10, 3, 60.0, 2.0, "model", {}, encoded_ahead=8)
    for changes, line in (
        ({}, "60.0 s, 8 rows encoded during the listing, 2.0 images/s after it, bottleneck model"),
        ({"images_per_second": 0.0}, "60.0 s, 8 rows encoded during the listing"),
        ({"encoded_ahead": 0}, "60.0 s, 2.0 images/s, bottleneck model"),
    ):
        show_result(dataclasses.replace(result, **changes), Path("index"))
        assert capsys.readouterr().out.splitlines()[1] == line


def test_half_of_the_free_disk_stays_free(config, monkeypatch):
    request = config(engine="ray")
    ahead, build = encode_ahead.EncodingAhead(request, ignore, lambda: False), prepare_build(config(), ignore)
    shard_bytes = disk_need(IndexSpec(4, 4, (4, 16), 24)).total
    monkeypatch.setattr(encode_ahead, "free_disk", lambda _: 5 * shard_bytes)
    for shard in range(4):
        ahead._add(build, shard, [InputRef(f"{shard}.jpg", b"x")] * 4)
    tasks = ahead._tasks(build)
    assert [task and task.shard for task in itertools.islice(tasks, 4)] == [0, 1, None, None]


def test_an_engine_that_cannot_run_ends_the_build_during_the_listing(listed, tmp_path, impatient, monkeypatch):
    failed = threading.Event()

    def fail(_config, _build):
        failed.set()
        raise EngineUnavailableError("there is no Ray cluster at head:6379")

    monkeypatch.setattr(digest, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(encode_ahead, "open_workers", fail)
    monkeypatch.setattr(prepare, "check_index_size", None)  # the build does not come so far
    with pytest.raises(EngineUnavailableError, match="head:6379"):
        listed(tmp_path / "index", rows=4, until=lambda: failed.is_set() and not time.sleep(0.1))


def test_what_was_encoded_ahead_counts_as_free_space(config, listed, tmp_path, stopped, monkeypatch):
    need = disk_need(IndexSpec(10, 4, (4, 16), 24)).total
    monkeypatch.setattr("pipelines.planning.resources.free_disk", lambda _: need - listed_bytes(stopped))
    assert 0 < listed_bytes(stopped) < need
    with pytest.raises(UsageError, match="of disk, but only"):
        listed(tmp_path / "other")
    assert try_build(dataclasses.replace(config(), out=stopped), ignore).rows == 10
    assert listed(stopped).indexed == 9


def test_a_source_that_fails_in_mid_listing_costs_no_rows(listed, photos, tmp_path, impatient, encoded):
    names, late, events = sorted(photos.glob("*.jpg")), tmp_path / "late.parquet", []
    write_paths(late, names[9:])
    intact = late.read_bytes()
    late.write_bytes(intact[:4] + bytes(40) + intact[44:])
    with pytest.raises(UsageError, match=r"late\.parquet"):
        listed(tmp_path / "index", names[:9], rows=8, sources=[str(late)], on_event=events.append)
    assert "the rows encoded during the listing" in texts(events)[-1]
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
        ahead._is_listed.wait()
        time.sleep(pause)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        ended.append(True)

    monkeypatch.setattr(encode_ahead.EncodingAhead, "_encode", encode)
    with pytest.raises(KeyboardInterrupt):
        listed(tmp_path / "index", rows=4, until=started.is_set)
    assert ended == [True]


def start(out, model):
    """A build of standard input in another process, which encodes ahead at once."""
    sizes = ["--shard-size", "4", "--batch-size", "2", "--threads", "1", "--device", "cpu"]
    arguments = ["build", "-", "--out", out, "--model", model, "--engine", "ray", "--max-failed", "1", *sizes]
    return subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def stored(out, shard):
    """The time at which `shard` was encoded ahead; None if it was not."""
    path = Layout(Layout(out).listed).receipt(shard)
    return path.stat().st_mtime_ns if path.exists() else None


@pytest.mark.slow
def test_ray_encodes_what_a_slow_pipe_has_named(listed, photos, tiny_bundle, tmp_path):
    out = tmp_path / "index"
    process = start(out, tiny_bundle)
    for row, path in enumerate(sorted(photos.glob("*.jpg"))):
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        time.sleep(0.2)
        rows = row // 4 * 4
        wait(lambda rows=rows: rows_ahead(out) >= rows)
        assert process.poll() is None
        assert rows_ahead(out) >= rows, "the list has not ended"
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    listed(tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")
    assert verify_index(out) == []


@pytest.mark.slow
def test_a_killed_and_an_interrupted_listing_resume_with_the_same_bytes(photos, tiny_bundle, tmp_path):
    out, calm, names = tmp_path / "index", tmp_path / "calm", sorted(photos.glob("*.jpg"))
    changed = [*names[:5], names[6], names[5], *names[7:]]
    kept = {}
    for number, paths in ((signal.SIGKILL, names), (signal.SIGINT, changed)):
        before = stored(out, 1)
        process = start(out, tiny_bundle)
        process.stdin.writelines(f"{path}\n" for path in paths[:9])
        process.stdin.flush()
        wait(lambda before=before: rows_ahead(out) == 8 and stored(out, 1) != before)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert rows_ahead(out) == 8, err
        assert stored(out, 1) != before, "the killed listing had other inputs"
        assert not Layout(out).plan.exists()
        kept = kept or stored(out, 0)
        assert stored(out, 0) == kept
    assert "the rows encoded during the listing" in err
    assert "stopped while listing the sources. To resume: edje-index build -" in err
    for root in (out, calm):
        lines = "".join(f"{path}\n" for path in changed)
        _, err = start(root, tiny_bundle).communicate(lines, timeout=300)
        assert verify_index(root) == [], err
    assert contents(out) == contents(calm)
    assert not Path(out / "build").exists()
