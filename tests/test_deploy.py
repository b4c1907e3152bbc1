"""The Dockerfile and the systemd unit: their commands are run, and systemd's own
checks are asked.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.conftest import REPO, golden_index

DEPLOY = REPO / "deploy"
# tenths; systemd calls a service with at most 2.0 well protected
HIGHEST_EXPOSURE = 20
KEY = "a-key-of-enough-letters"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def in_dockerfile(instruction):
    """The words of an instruction in the form of a JSON list."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(instruction)]
    words: list[str] = json.loads(line[line.index("[") :])
    return words


def exec_start():
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
    threshold = f"--threshold={HIGHEST_EXPOSURE}"
    for words in (["verify"], ["security", "--offline=true", threshold]):
        command = ["systemd-analyze", *words, unit]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-200:] + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("of", ["unit", "image"])
def test_the_command_serves(tmp_path, of):
    paths = {}
    for home in ("/data", "/srv/edje"):
        paths[f"{home}/photos.edje"] = str(golden_index())
        paths[f"{home}/model"] = str(REPO / "tests/golden/release_0_1/model")
    port = str(free_port())
    words = (
        exec_start()
        if of == "unit"
        else [*in_dockerfile("ENTRYPOINT"), *in_dockerfile("CMD"), "--port", "8000"]
    )
    words = [paths.get(word, word) for word in words[1:]]
    serve, health = (
        [sys.executable, *(word.replace("8000", port) for word in each)]
        for each in (
            ["-m", "pipelines.cli", *words],
            in_dockerfile("HEALTHCHECK")[1:],
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO), "EDJE_API_KEYS": KEY}
    with subprocess.Popen(
        serve, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
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
            process.send_signal(signal.SIGTERM)
            assert process.wait(45) == 0
            assert subprocess.run(health, capture_output=True).returncode == 1
        finally:
            process.kill()
