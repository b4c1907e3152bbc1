"""Compares builds with a loop that only prepares and encodes photos. Linux only.

Without a model, the encoder returns constants, which costs nothing. The rates are then
the highest that a build can reach, at which photos are read, decoded and resized.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import Report, Say, Task, run
from edje_index import __version__
from edje_index.bundles.random_bundle import UntrainedSizes, create_untrained_bundle
from edje_index.images.decode import decode_rgb
from edje_index.indexing.image_encoder import ImageEncoder
from pipelines.jobs.build import build_index
from storage_formats.codecs import BF16
from storage_formats.errors import UsageError

BARE = "bare loop"
_BATCH = {"cpu": 8, "cuda": 128}
# sizes of the images that are prepared if there is no model, and of its bundle
_SIZES = (224, 384)
_FREE = {"patch_size": 32, "vision_width": 64, "vision_layers": 2}
# option of prctl(2), from <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_SAMPLE_SECONDS = 0.5
_EXTENSIONS = {".jpg", ".jpeg", ".png"}
METHOD = """- photos/s: of a build, from the end of its first shards to the end of the
  last. The bare loop decodes, resizes and encodes in one thread.
- CPU: processor time per photo of the process and its descendants, with their start.
- Memory: largest sum of the proportional set sizes of all processes.
- Read, decode, wait, encode, write: seconds of a build. The model waits for photos."""


def bench_build(
    photos: Path,
    say: Say,
    report_folder: Path | None = None,
    *,
    model: Path | None = None,
    images: int = 1000,
    device: str = "cpu",
    repeats: int = 3,
) -> Report:
    """Run the benchmark and return the report.

    The arguments are options of `edje-index bench build`.

    Raises:
        UsageError: `photos` contains no photos.
    """
    find_photos(photos)
    bundles: dict[str, tuple[str, Report | None]] = {
        f"no model, {size} pixels": (f"../{size}", {**_FREE, "image_size": size})
        for size in _SIZES
    }
    workers = {BARE: 1, "inline": 1}
    if model is not None:
        bundles = {model.name: (str(model.resolve()), None)}
        workers["ray"] = 2
    given = [str(photos.resolve()), images, device, model is None]
    tasks = [
        Task(
            "Builds",
            f"{images} photos, {name}",
            subject,
            "benchmarks.build:measure",
            [subject, count, *bundle, *given],
            repeat,
        )
        for name, bundle in bundles.items()
        for repeat in range(repeats)
        for subject, count in workers.items()
    ]
    about = {
        "name": "build",
        "title": "Builds",
        "settings": {},
        "subjects": {
            name: (__version__, f"{count} workers") for name, count in workers.items()
        },
        "reference": BARE,
        "notes": [],
        "method": METHOD,
    }
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory, "scratch")
        return run(about, tasks, scratch, scratch, say, report_folder=report_folder)


def find_photos(folder: Path) -> list[Path]:
    """Return the photos in `folder`."""
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in _EXTENSIONS]
    if not paths:
        raise UsageError(f"{folder} has no photos: give a folder with JPEG files")
    return sorted(paths)


def measure(
    subject: str,
    workers: int,
    model: str,
    sizes: Report | None,
    photos: str,
    images: int,
    device: str,
    is_free: bool,
) -> Iterator[Report]:
    """Encode `images` photos of the folder `photos`, from the first again after the
    last.

    Args:
        subject: `BARE`, or the engine of a build.
        model: directory of the bundle.
        sizes: if the bundle is missing, one with random weights of these
            `UntrainedSizes` is written.
        is_free: True if the encoder returns constants.
    """
    if sizes is not None and not Path(model).exists():
        create_untrained_bundle(model, sizes=UntrainedSizes(**sizes))
    if is_free:
        ImageEncoder.encode = _constants  # type: ignore[method-assign, assignment]
    paths = [*itertools.islice(itertools.cycle(find_photos(Path(photos))), images)]
    with costs() as cost, tempfile.TemporaryDirectory(dir=".") as folder:
        if subject == BARE:
            values = bare_loop(paths, model, device)
        else:
            values = build(paths, Path(folder), model, device, subject, workers)
    values |= {
        "CPU ms": 1e3 * cost["cpu"] / images,
        "memory MiB": cost["peak"] / 2**20,
    }
    yield {"case": "", "values": values}


def build(
    photos: Sequence[Path],
    folder: Path,
    model: str,
    device: str,
    engine: Any,
    workers: int,
) -> dict[str, float]:
    """Build an index of photos. A photo may occur several times. Return the rate of the
    build and the seconds of each stage.
    """
    source = folder / "photos.jsonl"
    lines = (json.dumps({"path": str(path)}) + "\n" for path in photos)
    source.write_text("".join(lines))
    # Small shards would measure what each shard costs, such as flushing its files.
    shard = max(2 * _BATCH[device], len(photos) // 8)
    ends = [time.perf_counter()]

    def on_event(event: Any) -> None:
        if getattr(event, "finished_shard", None) is not None:
            ends.append(time.perf_counter())

    result = build_index(
        source,
        folder / "index",
        model,
        engine=engine,
        workers=workers,
        shard_size=shard,
        device=device,
        on_event=on_event,
    )
    # The first shard of each worker includes its start.
    skipped = workers if len(ends) > workers + 1 else 0
    rate = (len(photos) - skipped * shard) / (ends[-1] - ends[skipped])
    stages = result.stage_seconds or {}
    return {"photos/s": rate} | {f"{name} s": each for name, each in stages.items()}


def bare_loop(paths: Sequence[Path], model: str, device: str) -> dict[str, float]:
    """Decode, resize and encode photos in this thread. Return the rate."""
    encoder = ImageEncoder.open(model, device=device)
    batch = encoder.new_batch(_BATCH[device])
    started = time.perf_counter()
    for start in range(0, len(paths), len(batch)):
        part = paths[start : start + len(batch)]
        for position, path in enumerate(part):
            encoder.preprocess(decode_rgb(path.read_bytes()), batch[position])
        encoder.encode(batch[: len(part)])
    return {"photos/s": len(paths) / (time.perf_counter() - started)}


def _constants(encoder: ImageEncoder, pixels: Any) -> tuple[Any, Any]:
    embeddings = np.zeros((len(pixels), encoder.embed_dim), np.float32)
    embeddings[:, 0] = 1
    return np.zeros((len(pixels), *encoder.block_shape), BF16), embeddings


@contextlib.contextmanager
def costs() -> Iterator[dict[str, float]]:
    """Yield a dictionary that has, after the block, the processor seconds `cpu` and the
    memory `peak` in bytes of this process and its descendants. `peak` is the largest
    sum of the proportional set sizes.
    """
    # Daemons of Ray outlive the process that started them. As a subreaper, this process
    # becomes their parent and can measure them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    here = psutil.Process()
    seconds: dict[int, float] = {}
    cost = {"peak": 0.0}
    before = time.process_time()
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            memory = 0
            for process in [here, *here.children(recursive=True)]:
                # psutil raises an error if the process ended after it was listed.
                with contextlib.suppress(psutil.Error):
                    memory += process.memory_full_info().pss
                    seconds[process.pid] = sum(process.cpu_times()[:2])
            cost["peak"] = max(cost["peak"], memory)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield cost
    finally:
        ended.set()
        sampler.join()
    cost["cpu"] = sum(seconds.values()) - before
