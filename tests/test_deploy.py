"""The Dockerfile and the systemd unit: their commands are run, and systemd's own
checks are asked.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.conftest import REPO, golden_index

DEPLOY = REPO / "deploy"
# tenths; systemd calls a service with at most 2.0 well protected
HIGHEST_EXPOSURE = 20
KEY = "a-key-of-enough-letters"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def in_dockerfile(instruction: str) -> list[str]:
    """The words of an instruction in the form of a JSON list."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(instruction)]
    words: list[str] = json.loads(line[line.index("[") :])
    return words


def exec_start() -> list[str]:
    lines = (DEPLOY / "edje-index.service").read_text().splitlines()
    (command,) = [
        line.removeprefix("ExecStart=")
        for line in lines
        if line.startswith("ExecStart=")
    ]
    return shlex.split(command)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit_and_calls_it_protected(tmp_path):
    unit = tmp_path / "edje-index.service"
    text = (DEPLOY / "edje-index.service").read_text()
    # systemd looks for the program
    unit.write_text(text.replace(exec_start()[0], sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    security = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={HIGHEST_EXPOSURE}",
        str(unit),
    ]
    told = subprocess.run(security, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout[-200:]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["unit", "image"])
def test_the_command_serves(tmp_path, of):
    paths = {
        "/data/photos.edje": str(golden_index()),
        "/data/model": str(REPO / "tests/golden/release_0_1/model"),
    }
    paths |= {name.replace("/data", "/srv/edje"): path for name, path in paths.items()}
    port = str(free_port())
    words = (
        exec_start()
        if of == "unit"
        else [*in_dockerfile("ENTRYPOINT"), *in_dockerfile("CMD"), "--port", "8000"]
    )
    words = [paths.get(word, word).replace("8000", port) for word in words[1:]]
    command = [sys.executable, "-m", "pipelines.cli", *words]
    health = [
        sys.executable,
        *(word.replace("8000", port) for word in in_dockerfile("HEALTHCHECK")[1:]),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "EDJE_API_KEYS": KEY}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline().strip().endswith(f":{port}")
            subprocess.run(health, check=True)
            answer = httpx.post(
                f"http://127.0.0.1:{port}/search",
                json={"query": "a dog", "k": 2},
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=60,
            )
            assert len(answer.json()["hits"]) == 2
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert time.monotonic() - started < 45
            assert (
                subprocess.run(health, check=False, capture_output=True).returncode == 1
            )
        finally:
            process.kill()
