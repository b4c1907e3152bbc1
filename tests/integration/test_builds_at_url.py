"""Machines without a shared file system build an index on a real S3-compatible server.
Two Ray nodes see neither each other's files nor those of the driver.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import TokenStore, read_rows, verify_index
from storage_formats.format.rows import TIMING_COLUMNS
from storage_formats.remote.objects import ObjectFolder
from tests.command_line import command, run_here
from tests.integration.builds import make_photos
from tests.integration.ray_nodes import RayNodes
from tests.object_store import s3_server, use_endpoint

pytestmark = pytest.mark.slow

PHOTOS = 60
URL = "s3://bucket/photos.edje"
SECONDS = 300


def contents(location):
    """What a reader finds."""
    with TokenStore.open(location) as store:
        row_ids = store.row_ids()
        blocks = store.fetch(row_ids)
    rows = read_rows(location).drop_columns(list(TIMING_COLUMNS)).to_pylist()
    return row_ids.tolist(), blocks.tobytes(), rows


def build(out, model):
    sizes = ["--shard-size", "4", "--batch-size", "4", "--threads", "1", "--dedupe"]
    return ["build", "s3://bucket/photos", "--out", out, "--model", model, *sizes]


def test_two_machines_without_a_common_directory(tmp_path, monkeypatch):
    private = tmp_path / "private"
    model = tmp_path / "model"
    make_photos(private / "photos", PHOTOS)
    create_untrained_bundle(model, sizes=TINY)
    monkeypatch.setenv("EDJE_CACHE", str(private / "cache"))
    # The paths of the sockets of Ray must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as ray_folder,
        s3_server() as endpoint,
    ):
        use_endpoint(monkeypatch, endpoint)
        photos = ObjectFolder.open("s3://bucket/photos")
        for path in sorted((private / "photos").iterdir()):
            data = path.read_bytes()
            photos.put(
                path.name, lambda data=data: [data], length=len(data), metadata={}
            )
        local = private / "local.edje"
        run_here(*build(local, model), "--engine", "inline", "--max-failed", "1")
        # The nodes inherit the environment with the address of the server.
        nodes = RayNodes(Path(ray_folder))
        try:
            nodes.start_head()
            nodes.add(2, hidden=private)
            nodes.add(3, hidden=private)
            address = ["--address", nodes.address, "--max-failed", "1", "--json"]
            arguments = command(*build(URL, model), *address)

            def start():
                return subprocess.Popen(
                    arguments,
                    env=nodes.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )

            index = ObjectFolder.open(URL)
            driver = start()
            deadline = time.monotonic() + SECONDS
            while len(index.list_sizes("build/receipts")) < 3:
                assert driver.poll() is None, driver.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for worker in nodes.workers(2):
                worker.kill()
            time.sleep(0.5)
            if driver.poll() is None:
                driver.send_signal(signal.SIGKILL)
            driver.communicate()
            # the same command takes over the claim of the killed driver
            driver = start()
            out, err = driver.communicate(timeout=SECONDS)
            assert driver.returncode == 0, err
            assert json.loads(out)["inputs"] == PHOTOS
        finally:
            nodes.kill_all()
        assert contents(URL) == contents(local)
        more = tmp_path / "more"
        make_photos(more, 5)
        for change in (
            ["append", more, "--engine", "inline", "--max-failed", "1"],
            ["delete", "--rows", "2"],
            ["quantize", "--to", "fp8"],
        ):
            for each in (URL, local):
                run_here(change[0], each, *change[1:])
        assert contents(URL) == contents(local)
        assert verify_index(URL) == []
        found, expected = (
            run_here("search", each, "a dog", "--model", model)["hits"]
            for each in (URL, local)
        )
        assert [hit["row_id"] for hit in found] == [hit["row_id"] for hit in expected]
        assert not any(key.startswith("build/") for key in index.list_sizes())
