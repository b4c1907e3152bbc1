"""The Dockerfile and the systemd unit: their own steps are run, and systemd's own checks are asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tests.conftest import REPO

DEPLOY = REPO / "deploy"
GOLDEN = REPO / "tests" / "golden" / "release_0_1"
HIGHEST_EXPOSURE = 20  # tenths; systemd calls a service with at most 2.0 well protected


class Image:
    """Runs a Dockerfile in a folder that stands for the root directory. Base images are this machine's Python."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDJE"))}
        self.variables["PIP_NO_DEPS"] = "1"  # the packages of this environment are borrowed, see `run`
        self.command: list[str] = []
        self.entry_point: list[str] = []
        self.health: list[str] = []
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "python").symlink_to(sys.executable)
        self.variables["PATH"] = f"{root / 'bin'}:{self.variables['PATH']}"

    def inside(self, text: str) -> str:
        """`text` with absolute paths moved into the root."""
        return re.sub(r"(?<![\w./:])/(?=(opt|source|data|tmp)\b)", f"{self.root}/", text)

    def build(self, dockerfile: Path, arguments: dict[str, str]) -> None:
        lines = re.sub(r"\\\n", "", dockerfile.read_text()).splitlines()
        for line in lines:
            if line and not line.startswith("#"):
                instruction, _, rest = line.partition(" ")
                getattr(self, f"do_{instruction.lower()}")(rest, arguments)

    def do_from(self, rest: str, _: dict[str, str]) -> None:
        assert re.fullmatch(r"python:3\.1\d-slim( AS \w+)?", rest)

    def do_arg(self, rest: str, arguments: dict[str, str]) -> None:
        name, _, value = rest.partition("=")
        self.variables[name] = arguments.get(name, value)

    def do_env(self, rest: str, _: dict[str, str]) -> None:
        self.variables |= {name: self.inside(value) for name, value in (word.split("=", 1) for word in rest.split())}

    def do_workdir(self, rest: str, _: dict[str, str]) -> None:
        self.folder = Path(self.inside(rest))
        self.folder.mkdir(parents=True)

    def do_copy(self, rest: str, _: dict[str, str]) -> None:
        *options, source, target = rest.split()
        if options:
            assert options == ["--from=build"]
            assert Path(self.inside(source)).is_dir()
            return
        patterns = (DEPLOY / "Dockerfile.dockerignore").read_text().split()

        def ignored(folder: str, names: list[str]) -> set[str]:
            place = Path(folder).relative_to(REPO)
            return {name for name in names if any(matches(place / name, pattern) for pattern in patterns)}

        shutil.copytree(REPO / source, self.folder / target, ignore=ignored, symlinks=True, dirs_exist_ok=True)

    def do_run(self, rest: str, _: dict[str, str]) -> None:
        subprocess.run(self.inside(rest), shell=True, check=True, cwd=self.folder, env=self.variables, timeout=600)
        for packages in self.root.glob("opt/*/lib/python*/site-packages"):
            (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def do_user(self, rest: str, _: dict[str, str]) -> None:
        assert rest != "root"

    def do_expose(self, rest: str, _: dict[str, str]) -> None:
        assert rest == "8000"

    def do_healthcheck(self, rest: str, _: dict[str, str]) -> None:
        self.health = json.loads(self.inside(rest[rest.index("CMD ") + 4 :]))

    def do_entrypoint(self, rest: str, _: dict[str, str]) -> None:
        self.entry_point = json.loads(self.inside(rest))

    def do_cmd(self, rest: str, _: dict[str, str]) -> None:
        self.command = json.loads(self.inside(rest))


def matches(path: Path, pattern: str) -> bool:
    """Whether a line of a .dockerignore file leaves `path` out."""
    return fnmatch(path.name, pattern[3:]) if pattern.startswith("**/") else fnmatch(str(path), pattern)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_give_a_service_that_answers(tmp_path):
    image = Image(tmp_path / "root")
    image.build(DEPLOY / "Dockerfile", {"PIP_EXTRA_INDEX_URL": ""})
    shutil.copytree(GOLDEN / "index", tmp_path / "root" / "data" / "photos.edje")
    shutil.copytree(GOLDEN / "model", tmp_path / "root" / "data" / "model")
    port = str(free_port())
    command = [*image.entry_point, *image.command, "--port", port]
    with subprocess.Popen(command, cwd=tmp_path, env=image.variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == f"http://0.0.0.0:{port}"
            body = {"query": "a dog", "k": 2}
            assert len(httpx.post(f"http://127.0.0.1:{port}/search", json=body, timeout=60).json()["hits"]) == 2
            health = [word.replace("8000", port) for word in image.health]
            subprocess.run(health, check=True, cwd=tmp_path, env=image.variables)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert subprocess.run(health, check=False, capture_output=True, env=image.variables).returncode == 1
        finally:
            process.kill()


def exec_start() -> list[str]:
    lines = (DEPLOY / "edje-index.service").read_text().splitlines()
    (command,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    return shlex.split(command)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit_and_calls_it_protected(tmp_path):
    unit = tmp_path / "edje-index.service"
    text = (DEPLOY / "edje-index.service").read_text()
    unit.write_text(text.replace(exec_start()[0], sys.executable))  # systemd looks for the program
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={HIGHEST_EXPOSURE}", str(unit)]
    told = subprocess.run(security, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout[-200:]


@pytest.mark.slow
def test_the_command_of_the_unit_serves(tmp_path):
    paths = {"/srv/edje/photos.edje": str(GOLDEN / "index"), "/srv/edje/model": str(GOLDEN / "model")}
    port = str(free_port())
    words = [paths.get(word, word).replace("8000", port) for word in exec_start()[1:]]
    command = [sys.executable, "-m", "pipelines.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == f"http://127.0.0.1:{port}"
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert time.monotonic() - started < 45
        finally:
            process.kill()
