"""Helper processes: they prepare the same bytes as this process, and an input that
kills or hangs one fails alone.
"""

import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

from edje_index.images.preprocessing import Preprocessor
from edje_index.inputs.helpers import Helpers
from edje_index.inputs.preparation import Preparation
from edje_index.inputs.refs import InputRef
from edje_index.models.clip_config import ClipConfig
from storage_formats.errors import EdjeError

PREPARATION = Preparation(preprocess=Preprocessor(ClipConfig("any", {}, {"size": 32})))
# A decoder that executes the comment of a JPEG. It takes the place of the real module
# in the helpers.
DECODER = """
import os, sys, time

folder = os.path.dirname(__file__)
sys.path.remove(folder)
del sys.modules["simplejpeg"]
import simplejpeg

sys.path.insert(0, folder)

decode = simplejpeg.decode_jpeg

def decode_jpeg(data, *arguments, **options):
    if b"do: " in data:
        exec(data.partition(b"do: ")[2].partition(b";")[0])
    return decode(data, *arguments, **options)

simplejpeg.decode_jpeg = decode_jpeg
"""
HANG = "time.sleep(1000)"
FAULTS = {
    3: "os.kill(os.getpid(), 11)",
    7: "os._exit(0)",
    8: "os.kill(os.getpid(), 9)",
    12: HANG,
    17: HANG,
}


@pytest.fixture
def jobs(tmp_path):
    """Twenty inputs. The last one is not an image."""
    jobs = []
    for number in range(20):
        path = tmp_path / f"{number}.jpg"
        Image.effect_noise((40 + number, 50), 90).convert("RGB").save(path, "JPEG")
        jobs.append((number, InputRef(str(path), os.fsencode(path))))
    path.write_bytes(b"text")
    return jobs


def add_faults(jobs, actions):
    for number, action in actions.items():
        with Image.open(jobs[number][1].uri) as image:
            image.load()
        image.save(jobs[number][1].uri, "JPEG", comment=f"do: {action};")


@pytest.fixture
def faulty_decoder(tmp_path, monkeypatch):
    folder = tmp_path / "decoder"
    folder.mkdir()
    (folder / "simplejpeg.py").write_text(DECODER)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = set(psutil.Process().children(recursive=True))
    yield
    wait_for_end(set(psutil.Process().children(recursive=True)) - before)


def wait_for_end(processes):
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def untimed(columns):
    return [
        {name: value for name, value in each.items() if "seconds" not in name}
        for each in columns
    ]


def prepare_all(helpers, jobs, step=4):
    parts = [jobs[start : start + step] for start in range(0, len(jobs), step)]
    with ThreadPoolExecutor(helpers.count) as pool:
        return untimed(
            [each for part in pool.map(helpers.prepare, parts) for each in part]
        )


def in_process(jobs):
    pixels = np.zeros((len(jobs), *PREPARATION.shape), np.uint8)
    return untimed([PREPARATION.run(ref, pixels[at]) for at, ref in jobs]), pixels


def test_only_inputs_that_kill_or_hang_helpers_fail(jobs, faulty_decoder):
    columns, pixels = in_process(jobs)
    assert columns[-1]["reason"] == "not-an-image"
    add_faults(jobs, FAULTS)
    helpers = Helpers(2, PREPARATION, len(jobs), seconds=1)
    prepared = prepare_all(helpers, jobs)
    helpers.close()
    failed = {
        at: each["reason"] for at, each in enumerate(prepared) if "reason" in each
    }
    assert failed == {
        **dict.fromkeys([3, 7, 8], "worker-died"),
        **dict.fromkeys([12, 17], "timed-out"),
        19: "not-an-image",
    }
    for at in {*range(20)} - failed.keys():
        assert np.array_equal(helpers.pixels[at], pixels[at])
        assert prepared[at]["width"] == columns[at]["width"]


@pytest.mark.parametrize("victim", ["helper", "server"])
def test_killed_processes_are_replaced(jobs, victim):
    """One is killed at a random time of each round, so no input dies twice."""
    expected = in_process(jobs)
    # servers of other tests
    others = {*psutil.Process().children()}
    helpers = Helpers(2, PREPARATION, len(jobs))
    helpers.prepare(jobs[:1])
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5 if victim == "helper" else 1):
            helpers.pixels[:] = 0
            prepared = pool.submit(prepare_all, helpers, jobs)
            time.sleep(rng.uniform(0, 0.02))
            (server,) = {*psutil.Process().children()} - others
            (server.children()[0] if victim == "helper" else server).kill()
            assert prepared.result() == expected[0]
            assert np.array_equal(helpers.pixels, expected[1])
    helpers.close()


def test_helpers_that_cannot_start_are_one_clear_error(jobs, monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", [])
    helpers = Helpers(1, PREPARATION, len(jobs))
    with pytest.raises(EdjeError, match="die before they begin"):
        helpers.prepare(jobs)
    helpers.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


ENDLESS = """
import pickle, sys
from edje_index.inputs.helpers import Helpers
from edje_index.inputs.refs import InputRef

good, bad = (InputRef(name, name.encode()) for name in sys.argv[1:3])
helpers = Helpers(2, pickle.loads(bytes.fromhex(sys.argv[3])), 1)
helpers.prepare([(0, good)])
print("started", flush=True)
helpers.prepare([(0, bad)])
"""


def test_nothing_is_left_of_a_killed_process(jobs, faulty_decoder):
    add_faults(jobs, {0: HANG})
    command = [sys.executable, "-c", ENDLESS, jobs[1][1].uri, jobs[0][1].uri]
    with subprocess.Popen(
        [*command, pickle.dumps(PREPARATION).hex()],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout.readline() == b"started\n"
        time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        # The input at which a helper hangs may be the first of another helper.
        # the server and one or two helpers
        assert len(children) in (2, 3)
        process.kill()
    wait_for_end(set(children))
