"""Builds the image of deploy/Dockerfile with docker or podman, and searches with it as docs/serve.md says.

python -m tests.container --tool podman --build-arg PIP_EXTRA_INDEX_URL=
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RELEASE = REPO / "tests/golden/release_0_1"
TAG = "edje-index:smoke"
KEY = "only-for-this-test"
CONFINED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
START_SECONDS = 300  # a busy machine is no failure


def build(tool: str, arguments: Sequence[str]) -> None:
    """Build the image. `arguments` are the build arguments, each as NAME=VALUE."""
    words = [word for argument in arguments for word in ("--build-arg", argument)]
    if tool == "podman":
        words += ["--format", "docker"]  # the other format has no health check
    subprocess.run([tool, "build", "--file", "deploy/Dockerfile", "--tag", TAG, *words, "."], cwd=REPO, check=True)


@contextmanager
def running(tool: str, data: Path) -> Iterator[tuple[str, str]]:
    """The name and the address of a container that serves the index in `data`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    name = f"edje-index-smoke-{port}"
    mounts = ["--publish", f"127.0.0.1:{port}:8000", "--volume", f"{data}:/data:ro"]
    command = [tool, "run", "--detach", "--name", name, *CONFINED, *mounts, "--env", f"EDJE_API_KEYS={KEY}", TAG]
    subprocess.run(command, check=True)
    try:
        yield name, f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([tool, "logs", name], check=False)
        subprocess.run([tool, "rm", "--force", name], check=True, stdout=subprocess.DEVNULL)


def wait_until_healthy(url: str) -> None:
    """Wait until the service answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/healthz", timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the service does not answer after {START_SECONDS} s: {error}") from None
            time.sleep(0.5)


def search(url: str, key: str) -> int:
    """Number of hits of a search for two; the HTTP status if it is refused."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/search", json.dumps({"query": "a dog", "k": 2}).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return len(json.load(response)["hits"])
    except urllib.error.HTTPError as error:
        return error.code


def expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise SystemExit(f"{what}: {actual!r}, expected {expected!r}")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check(tool: str, data: Path) -> None:
    """Start the service on the index and the model of the first release, search, and stop it."""
    shutil.copytree(RELEASE / "index", data / "photos.edje")
    shutil.copytree(RELEASE / "model", data / "model")
    data.chmod(0o755)  # the user of the image reads it
    with running(tool, data) as (name, url):
        wait_until_healthy(url)
        expect(search(url, KEY), 2, "number of hits")
        expect(search(url, "another"), 401, "status of a search with a wrong key")
        expect(output(tool, "exec", name, "id", "-u"), "10001", "user of the service")
        subprocess.run([tool, "stop", "--time", "60", name], check=True, stdout=subprocess.DEVNULL)
        expect(output(tool, "inspect", "--format", "{{.State.ExitCode}}", name), "0", "exit code after SIGTERM")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the image, and try it."""
    parser = argparse.ArgumentParser(description="Build the container image and smoke-test it.")
    parser.add_argument("--tool", default="docker", choices=("docker", "podman"))
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    options = parser.parse_args(arguments)
    build(options.tool, options.build_arg)
    with tempfile.TemporaryDirectory(prefix="edje-container-") as folder:
        check(options.tool, Path(folder))
    print(f"{TAG}: ok")


if __name__ == "__main__":
    main()
