"""`make gpu-check` checks whether the results on a GPU are right, and measures how near
the rates come to the limits of the device.

    python -m benchmarks.gpu_check PHOTOS --report DIRECTORY

Models have the sizes of the EDJE paper and random weights, so no model files are
needed. Each line is printed and saved as soon as it is measured. If a part fails, the
next part still runs. A part is skipped if too little time is left for it. Without a
GPU, everything runs on the CPU, and the report says so. `--tiny` uses small models,
which are fast enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.process import run_command
from benchmarks.rerank import CAPTION
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import (
    TINY,
    UntrainedSizes,
    create_untrained_bundle,
    untrained_joint_encoder,
)
from edje_index.evaluation.report import table, write_report
from edje_index.fetching.device_decode import decode_records_torch
from edje_index.fetching.device_fetcher import DeviceFetcher
from edje_index.indexing.image_encoder import ImageEncoder, image_tokens
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.joint_scorer import JointScorer
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.codecs import BF16, codec, precisions
from storage_formats.errors import EdjeError
from storage_formats.token_store import TokenStore
from storage_formats.writing.index_writer import IndexWriter

_SHAPE = (64, 384)
_STORED = ("bf16", "fp8", "nvfp4")
_WORDS = 16000
_EXTENSIONS = {".jpg", ".jpeg", ".png"}
# For each vision tower of the EDJE paper, the sizes of a model with this tower, and the
# number of images in the index that is built with the model.
_TOWERS = {
    "ViT-L/16 at 384": (
        UntrainedSizes(384, 16, 1024, 24, adapter_hidden=8192, language_layers=12),
        8192,
    ),
    "ViT-B/16 at 224": (
        UntrainedSizes(224, 16, 768, 12, adapter_hidden=8192),
        24576,
    ),
}
_BATCH = 128
# A part is skipped if fewer than this number of seconds are left.
_SECONDS = {
    "limits": 10,
    "decode": 20,
    "score": 30,
    "pool": 45,
    "search": 60,
    "prepare": 20,
    "encode": 120,
    "ray": 90,
    "train": 30,
    "step": 90,
}


class Line(NamedTuple):
    """One result.

    Attributes:
        value: a rate per second, a difference, or a text.
        unit: what the rate counts per second; empty if `value` is not a rate.
        of_limit: share of the limit that the rate reaches. The limit is the highest
            rate that the device allows, or the rate of a bare loop. None if there is no
            limit.
        is_right: False if a result differs from the expected result, for example from
            that of the CPU.
    """

    part: str
    what: str
    value: float | str
    unit: str = ""
    of_limit: float | None = None
    is_right: bool = True


class GpuCheck:
    """Runs the parts of the check. Each public method that yields lines is a part.

    Attributes:
        lines: all results so far.
    """

    def __init__(
        self, photos: Path, report: Path, *, device: str = "auto", tiny: bool = False
    ) -> None:
        self.device = resolve_device(device)
        self.dtype = resolve_dtype("auto", self.device)
        self.lines: list[Line] = []
        self._report = report
        self._tiny = tiny
        self._repeats = 1 if tiny else 5
        self._photos = sorted(
            path for path in photos.rglob("*") if path.suffix.lower() in _EXTENSIONS
        )[:64]
        if not self._photos:
            raise EdjeError(f"{photos} has no photos: give a folder with JPEG files")

    def run(self, parts: list[str], seconds: float) -> bool:
        """Run `parts`, for about `seconds` at most. Return True if all results are
        right.
        """
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            self._scratch = Path(scratch)
            for part in parts:
                left = seconds - (time.perf_counter() - started)
                if left < _SECONDS[part] and not self._tiny:
                    self._add(Line(part, "skipped", f"{left:.0f} s left"))
                    continue
                try:
                    for line in getattr(self, part)():
                        self._add(line)
                # The error of a part must not stop the next parts.
                except Exception as error:
                    traceback.print_exc()
                    message = f"{type(error).__name__}: {str(error)[:200]}"
                    self._add(Line(part, "failed", message, is_right=False))
        return all(line.is_right for line in self.lines)

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        print(*_cells(line), sep="  ", flush=True)
        where = environment()
        report = {
            "environment": where,
            "device": self._name,
            "lines": [line._asdict() for line in self.lines],
        }
        header = ("part", "what", "value", "unit", "of the limit", "right")
        text = [
            f"# Results and rates on {self._name}, {where['date']}",
            "",
            f"torch {torch.__version__}, {os.cpu_count()} CPUs.",
            "",
            *table(header, map(_cells, self.lines)),
        ]
        name = f"{where['date']}-gpu-check"
        write_report(self._report, "\n".join([*text, ""]), report, name)

    @property
    def _name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return "the CPU: nothing was measured on a GPU"

    def _rate(self, amount: float, work: Callable[[], object]) -> float:
        """Return `amount` divided by the median seconds of a call of `work`. If `work`
        only queues kernels, the seconds include the time until they have ended.
        """
        times = []
        # The first two runs are the warm-up, which compiles kernels.
        for _ in range(2 + self._repeats):
            started = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return amount / statistics.median(times[2:])

    @cached_property
    def _product(self) -> float:
        """Operations per second of a matrix product."""
        size = 512 if self._tiny else 8192
        square = torch.randn(size, size, device=self.device).to(self.dtype)
        return self._rate(2 * size**3, lambda: square @ square)

    @cached_property
    def _bus(self) -> float:
        """Bytes per second of a copy from pinned memory."""
        cuda = self.device.type == "cuda"
        host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=cuda)
        copied = torch.empty_like(host, device=self.device)
        return self._rate(len(host), lambda: copied.copy_(host, non_blocking=True))

    def limits(self) -> Iterator[Line]:
        """The limits of the device."""
        dtype = str(self.dtype).removeprefix("torch.")
        yield Line("limits", f"matrix product, {dtype}", self._product / 1e12, "TFLOP")
        large = torch.ones(64 << 20, dtype=torch.uint8, device=self.device)
        # A copy moves each byte twice, because it reads and writes the byte.
        memory = self._rate(2 * len(large), large.clone)
        yield Line("limits", "copy in the memory", memory / 1e9, "GB")
        yield Line("limits", "copy from pinned memory", self._bus / 1e9, "GB")

    def decode(self) -> Iterator[Line]:
        """Decoding of stored records. The results must have the same bits as those that
        the codecs decode on the CPU.
        """
        count = 64 if self._tiny else 4096
        rng = np.random.default_rng(0)
        blocks = rng.standard_normal((64, *_SHAPE), dtype=np.float32).astype(BF16)
        for name in precisions():
            entry = codec(name, _SHAPE)
            encoded = np.tile(entry.encode(blocks), (count // 64, 1))
            records = torch.from_numpy(encoded).to(self.device)
            decode = partial(decode_records_torch, name, records, _SHAPE)
            expected = torch.from_numpy(entry.decode(encoded).view(np.int16))
            is_right = torch.equal(decode().cpu().view(torch.int16), expected)
            rate = self._rate(records.nbytes, decode)
            what = f"{name}, stored bytes; the limit is the bus"
            yield Line("decode", what, rate / 1e9, "GB", rate / self._bus, is_right)

    @cached_property
    def _index(self) -> Path:
        """An index of random blocks in several precisions."""
        rng = np.random.default_rng(0)
        tokens = rng.standard_normal((512, *_SHAPE), dtype=np.float32).astype(BF16)
        embeddings = rng.standard_normal((512, 64), dtype=np.float32)
        out = self._scratch / "tokens.edje"
        with IndexWriter.create(
            out,
            block_shape=_SHAPE,
            embed_dim=64,
            precisions=_STORED,
            shard_size=4096,
            encoder="synthetic",
        ) as writer:
            for _ in range(2 if self._tiny else 118):
                writer.append(tokens, embeddings)
        return out

    def _scorer(self, layers: int, dtype: torch.dtype, device: str) -> JointScorer:
        sizes = {
            "words": _WORDS,
            "width": _SHAPE[1],
            "intermediate": 4 * _SHAPE[1],
            "layers": 1 if self._tiny else layers,
            "heads": 12,
        }
        torch.manual_seed(0)
        joint = untrained_joint_encoder(_SHAPE[1], **sizes).to(device)
        joint.compute_dtype = dtype
        return joint.scorer()

    def score(self) -> Iterator[Line]:
        """The joint encoder alone."""
        count = 64 if self._tiny else 4096
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randn(count, *_SHAPE, generator=generator).bfloat16()
        there = blocks.to(self.device)
        words = CAPTION.split() * 4
        mixed = [" ".join(words[: 4 + at % 40]) for at in range(count)]
        for layers in (6, 12):
            reference = self._scorer(layers, torch.float32, "cpu")
            for dtype in dict.fromkeys((self.dtype, torch.float32)):
                scorer = self._scorer(layers, dtype, str(self.device))
                name = f"MiniLM-L{layers} {str(dtype).removeprefix('torch.')}"
                for kind, captions in (("one caption", [CAPTION]), ("mixed", mixed)):
                    few = captions[:32]
                    expected = reference.score(few, blocks[:32])
                    # The first calls run kernel by kernel. Later calls replay a
                    # recorded graph, whose result is checked.
                    for _ in range(3):
                        actual = scorer.score(few, there[:32])
                    worst = float((actual - expected).abs().max())
                    allowed = 1e-3 if dtype == torch.float32 else 0.05
                    what = f"{name}, {kind}: largest difference of a logit"
                    yield Line("score", what, worst, is_right=worst < allowed)
                    rate = self._rate(count, partial(scorer.score, captions, there))
                    share = rate * _pair_flops(layers, CAPTION) / self._product
                    yield Line("score", f"{name}, {kind}", rate, "pairs", share)
                pool = partial(scorer.score, CAPTION, there[:100])
                yield Line(
                    "score", f"{name}, pools of 100", self._rate(1, pool), "pools"
                )

    def pool(self) -> Iterator[Line]:
        """A pool of 50,000 candidates, from files in the page cache to logits."""
        pool = 512 if self._tiny else 50000
        store = TokenStore.open(self._index)
        rows = np.random.default_rng(2).permutation(len(store))[:pool]
        for name in _STORED:
            store = TokenStore.open(self._index, name)
            size = pool * store.record_bytes
            fetcher = DeviceFetcher(store, str(self.device))
            expected = store.fetch(rows[:512], as_torch=True)
            actual = fetcher.fetch(rows)[:512].cpu()
            is_right = torch.equal(actual.view(torch.int16), expected.view(torch.int16))
            rate = self._rate(size, partial(fetcher.fetch, rows))
            what = f"{name}, fetched, stored bytes; the limit is the bus"
            yield Line("pool", what, rate / 1e9, "GB", rate / self._bus, is_right)
            for layers in (12, 6):
                scorer = self._scorer(layers, self.dtype, str(self.device))
                rate = self._rate(
                    pool, partial(_fetch_and_score, fetcher, scorer, rows)
                )
                what = f"{name}, fetched and scored by MiniLM-L{layers}"
                yield Line("pool", what, rate, "pairs")

    def search(self) -> Iterator[Line]:
        """Build an index on the device, twice, and search it on both devices."""
        model = self._scratch / "model"
        create_untrained_bundle(model, sizes=TINY)
        photos = self._links(self._scratch / "few", len(self._photos))
        given = ("--engine", "inline", "--device", self.device)
        first_build = self._build("first", photos, model, *given)
        second_build = self._build("second", photos, model, *given)
        is_right = np.array_equal(first_build, second_build)
        yield Line(
            "search", "two builds", "equal" if is_right else "differ", is_right=is_right
        )
        on_cpu = ImageEncoder.open(model, device="cpu")
        with_device = ImageEncoder.open(model, device=str(self.device))
        pixels = torch.stack([on_cpu.preprocess(_rgb(path)) for path in self._photos])
        first, second = (
            torch.from_numpy(encoder.encode(pixels)[0].astype(np.float32))
            for encoder in (on_cpu, with_device)
        )
        cosine = float(torch.nn.functional.cosine_similarity(first, second, 2).min())
        what = "least cosine of a token with that of the CPU"
        yield Line("search", what, cosine, is_right=cosine > 0.98)
        hits = []
        for device in ("cpu", str(self.device)):
            index = TokenIndex.open(
                self._scratch / "first.edje", device=device, dtype="float32"
            )
            found_there = index.search([CAPTION, "a dog", "snow"], k=10, pool=40)
            hits.append([[hit.row_id for hit in each] for each in found_there])
        same = hits[0] == hits[1]
        what = "hits of three queries in float32"
        yield Line("search", what, "equal" if same else "differ", is_right=same)

    def _links(self, folder: Path, count: int) -> Path:
        folder.mkdir()
        for at in range(count):
            source = self._photos[at % len(self._photos)]
            # The first link of a photo is a copy, and all others are hard links to it.
            first = folder / f"{at % len(self._photos):06d}.jpg"
            if at < len(self._photos):
                shutil.copy(source, first)
            else:
                os.link(first, folder / f"{at:06d}.jpg")
        return folder

    def prepare(self) -> Iterator[Line]:
        """Photos decoded and resized by threads of one process, without a GPU."""
        for name in _TOWERS:
            encoder = ImageEncoder.open(self._bundle(name), device="cpu")
            files = [path.read_bytes() for path in self._photos]
            files *= 1 if self._tiny else 32
            for threads in dict.fromkeys((1, 4, os.cpu_count() or 1)):
                with ThreadPoolExecutor(threads) as pool:
                    work = partial(_prepare_all, pool, encoder, files)
                    rate = self._rate(len(files), work)
                what = f"photos for {name}, {threads} threads"
                yield Line("prepare", what, rate, "images")

    def encode(self) -> Iterator[Line]:
        """Vision towers: a bare loop, the encoder, and a build from photos."""
        for name, (sizes, count) in _TOWERS.items():
            given = TINY if self._tiny else sizes
            model = self._bundle(name)
            encoder = ImageEncoder.open(model, device=str(self.device))
            batch = 8 if self._tiny else _BATCH
            images = [encoder.preprocess(_rgb(path)) for path in self._photos]
            pixels = encoder.new_batch(batch)
            torch.stack((images * batch)[:batch], out=pixels)
            with torch.inference_mode():
                bare = self._bare_rate(model, batch, given.image_size)
            yield Line("encode", f"{name}, bare loop", bare, "images")
            eager = encoder.tokens(pixels).cpu()
            actual = torch.from_numpy(encoder.encode(pixels)[0].view(np.int16))
            is_right = torch.equal(actual, eager.view(torch.int16))
            what = f"{name}, tokens with recorded kernels"
            equal = "equal" if is_right else "differ"
            yield Line("encode", what, equal, is_right=is_right)
            rate = self._rate(batch, partial(encoder.encode, pixels))
            what = f"{name}, the encoder; the limit is the bare loop"
            yield Line("encode", what, rate, "images", rate / bare)
            photos = self._links(
                self._scratch / f"links-{model.name}", 32 if self._tiny else count
            )
            given_device = ("--engine", "inline", "--device", self.device)
            # two shards, because a GPU encodes two at once
            rate = self._build_rate(photos, model, 2, *given_device)
            what = f"{name}, a build; the limit is the bare loop"
            yield Line("encode", what, rate, "images", rate / bare)

    def ray(self) -> Iterator[Line]:
        """Builds by workers of Ray that share a GPU."""
        device = ("--device", self.device.type)
        model = self._bundle("ViT-B/16 at 224")
        few = self._links(self._scratch / "shared", len(self._photos))
        inline = self._build("inline", few, model, "--engine", "inline", *device)
        same = np.array_equal(inline, self._build("ray", few, model, *device))
        result = "equal" if same else "differ"
        yield Line("ray", "builds inline and by Ray", result, is_right=same)
        for name, (_, count) in _TOWERS.items():
            model = self._bundle(name)
            photos = self._links(
                self._scratch / f"ray-{model.name}", 64 if self._tiny else count
            )
            for workers in (1,) if self._tiny else (2, 4, 8):
                given = ("--workers", workers, *device)
                rate = self._build_rate(photos, model, workers, *given)
                what = f"{name}, workers of Ray: {workers}"
                yield Line("ray", what, rate, "images")

    def _bundle(self, tower: str) -> Path:
        model = self._scratch / tower.replace("/", "-").replace(" ", "-")
        if not model.exists():
            sizes = TINY if self._tiny else _TOWERS[tower][0]
            create_untrained_bundle(model, sizes=sizes)
        return model

    def _bare_rate(self, model: Path, batch: int, side: int) -> float:
        """Return the images per second of a loop that only runs the model, on one batch
        in the memory of the device. On a GPU, this is the higher of two rates: without
        and with compiled layers.
        """
        bundle = ModelBundle.load(model, device=str(self.device), verify=False)
        vision = bundle.vision.to(self.dtype)
        adapter = bundle.adapter.to(self.dtype)
        pixels = torch.randn(batch, 3, side, side, device=self.device, dtype=self.dtype)
        work = partial(image_tokens, vision, adapter, pixels)
        rates = [self._rate(batch, work)]
        if self.device.type == "cuda":
            # All layers have the same shapes, so PyTorch compiles only the first one,
            # and uses the result for the others.
            layers = vision.visual.transformer.resblocks
            for at, layer in enumerate(layers):
                layers[at] = torch.compile(layer, dynamic=False)
            rates.append(self._rate(batch, work))
        return max(rates)

    def _build(
        self, name: str, photos: Path, model: Path, *given: object
    ) -> NDArray[np.uint16]:
        """Build an index of `photos`, and return its first 1,024 blocks. `name` is the
        name of the index and of its log.
        """
        out = self._scratch / f"{name}.edje"
        log = ("--log", self._scratch / f"{name}.jsonl")
        options = ("--out", out, "--model", model, "--quiet", *given)
        run_command(*log, "build", photos, *options)
        opened = TokenStore.open(out)
        return opened.fetch(range(min(len(opened), 1024))).view(np.uint16)

    def _build_rate(
        self, photos: Path, model: Path, at_once: int, *given: object
    ) -> float:
        """Return the images per second of a build that encodes `at_once` shards at the
        same time. The first `at_once` shards are not counted, because they include the
        start of the build.
        """
        shard = 8 if self._tiny else 256
        batch = 8 if self._tiny else _BATCH
        name = f"{model.name}-{len(list(self._scratch.glob('*.edje')))}"
        sizes = ("--batch-size", batch, "--shard-size", shard)
        self._build(name, photos, model, *sizes, *given)
        ends = _shard_ends(self._scratch / f"{name}.jsonl")
        first = ends[at_once - 1]
        return shard * (len(ends) - at_once) / (ends[-1] - first)

    def train(self) -> Iterator[Line]:
        """Compare the losses of the first training steps on the CPU with those on the
        device, in one chunk and in several chunks per batch.
        """
        model = self._scratch / "start"
        create_untrained_bundle(model, sizes=TINY)
        losses = []
        for device, chunk in (("cpu", 8), (str(self.device), 8), (str(self.device), 2)):
            steps = self._train(
                model,
                self._photos,
                device,
                "loop.batch_size=8",
                "loop.dtype=float32",
                f"run.chunk_pairs={chunk}",
            )
            losses.append(np.array([step["loss"] for step in steps if "loss" in step]))
            worst = float(np.abs(losses[0] - losses[-1]).max())
            what = (
                f"{device}, chunks of {chunk} of 8 pairs, largest difference of a loss"
            )
            yield Line("train", what, worst, is_right=worst < 0.01)

    def step(self) -> Iterator[Line]:
        """Training steps of the EDJE paper's size."""
        model = self._bundle("ViT-L/16 at 384")
        pairs = 8 if self._tiny else 256
        photos = self._links(self._scratch / "photos", 4 * pairs)
        for chunk in (pairs // 4, pairs // 2, pairs):
            steps = self._train(
                model,
                sorted(photos.iterdir()),
                str(self.device),
                f"loop.batch_size={pairs}",
                f"run.chunk_pairs={chunk}",
            )
            timed = [step for step in steps if "step_seconds" in step]
            rate = pairs / statistics.median(step["step_seconds"] for step in timed)
            what = f"steps of {pairs} pairs in chunks of {chunk}, 12 layers"
            yield Line("step", what, rate, "pairs")
            peak = max(step["gpu_bytes"] for step in timed) / 1e9
            yield Line("step", f"{what}: most memory, GB", peak)

    def _train(
        self, model: Path, photos: list[Path], device: str, *settings: str
    ) -> list[dict[str, Any]]:
        """Train `model` for 6 steps on photos with made-up captions. Return the events
        of the log.
        """
        name = f"trained-{len(list(self._scratch.glob('*.run')))}"
        captions = self._scratch / f"{name}.jsonl"
        subjects = ("dogs", "snow", "a red car", "two people that walk to the sea")
        with captions.open("w") as file:
            for at, path in enumerate(photos):
                texts = [f"a picture {at} of {subject}" for subject in subjects]
                line = {"image": str(path.absolute()), "captions": texts}
                file.write(json.dumps(line) + "\n")
        out = self._scratch / name
        given = (
            *settings,
            "loop.steps=6",
            "alignment.steps=0",
            "augmentation.views=0",
            "architecture.dropout=0",
            "run.log_every=1",
            "fitting.pooled_dim=0",
            f"run.device={device}",
        )
        options = [f"--set={setting}" for setting in given]
        run_command(
            "train", captions, "--out", out, "--model", model, "--init", model, *options
        )
        log = out.with_suffix(".run") / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()]


def _prepare_all(
    pool: ThreadPoolExecutor, encoder: ImageEncoder, files: list[bytes]
) -> None:
    from edje_index.images.decode import decode_rgb

    for _ in pool.map(lambda data: encoder.preprocess(decode_rgb(data)), files):
        pass


def _shard_ends(log: Path) -> list[float]:
    """Return the time at which each shard of a build ended, in seconds since 1970, from
    the log of the build.
    """
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        datetime.fromisoformat(event["time"]).timestamp()
        for event in events
        if event["event"] == "shard"
    ]


def _fetch_and_score(
    fetcher: DeviceFetcher, scorer: JointScorer, rows: NDArray[np.int64]
) -> object:
    return scorer.score(CAPTION, fetcher.fetch(rows))


def _rgb(path: Path) -> Any:
    from edje_index.images.decode import decode_rgb

    return decode_rgb(path.read_bytes())


def _pair_flops(layers: int, caption: str) -> float:
    """Return the number of floating-point operations that the joint encoder needs for
    one pair. The last layer computes the keys and values of all tokens, but the query
    of the first token only, because the score depends only on the output for this
    token.
    """
    # A pair has one token per word, [CLS], two [SEP], and the tokens of the image.
    tokens = len(caption.split()) + 3 + _SHAPE[0]
    width = _SHAPE[1]
    layer = tokens * (24 * width**2 + 4 * tokens * width)
    last = tokens * 4 * width**2 + 20 * width**2 + 4 * tokens * width
    return (layers - 1) * layer + last


def _cells(line: Line) -> list[str]:
    value = line.value if isinstance(line.value, str) else f"{line.value:,.5g}"
    rate = f"{line.unit}/s" if line.unit else ""
    share = "" if line.of_limit is None else f"{line.of_limit:.2f}"
    return [line.part, line.what, value, rate, share, "" if line.is_right else "WRONG"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--report", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--parts", default=",".join(_SECONDS), help="separated by ,")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit")
    parser.add_argument("--tiny", action="store_true", help="small models")
    options = parser.parse_args()
    try:
        check = GpuCheck(
            options.photos, options.report, device=options.device, tiny=options.tiny
        )
    except EdjeError as problem:
        sys.exit(f"error: {problem}")
    sys.exit(not check.run(options.parts.split(","), options.seconds))
