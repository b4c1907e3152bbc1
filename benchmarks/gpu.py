"""Checks whether the results on a GPU are those of the CPU, and measures how near the
rates come to the limits of the device.

Models have the sizes of the EDJE paper and random weights, so no model files are
needed. Without a GPU, everything runs on the CPU, and the report says so. In a
rehearsal with `tiny`, all models and numbers are small enough for a CPU. A result that
is wrong is a problem of its row.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.build import METHOD, find_photos
from benchmarks.fetch import make_synthetic
from benchmarks.harness import Report, Say, Task, median_seconds, run
from benchmarks.search import CAPTION
from edje_index.bundles.bundle import write_feature_bundle
from edje_index.bundles.random_bundle import (
    TINY,
    UntrainedSizes,
    create_untrained_bundle,
    untrained_joint_encoder,
)
from edje_index.fetching.device_fetcher import DeviceFetcher, decode_records_torch
from edje_index.images.decode import decode_rgb
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.joint_scorer import JointScorer
from edje_index.search.token_index import TokenIndex
from edje_index.training.checkpoints import read_log
from pipelines.jobs.build import build_index
from pipelines.jobs.training.run import train
from storage_formats.arrays import Floats
from storage_formats.codecs import BF16, codec, precisions
from storage_formats.token_store import TokenStore

_SHAPE = (64, 384)
# sizes of a model with each vision tower of the EDJE paper, and the number of photos
# that are encoded with it
_TOWERS = {
    "ViT-L/16 at 384": (UntrainedSizes(384, 16, 1024, 24, adapter_hidden=8192), 8192),
    "ViT-B/16 at 224": (UntrainedSizes(224, 16, 768, 12, adapter_hidden=8192), 24576),
}
PARTS = ("limits", "decode", "score", "pool", "search", "train")
"""The parts, which are methods of `_Check`."""
_METHOD = f"""- Limits: what the rates below can reach at most.
- Decode, pool: GB/s of stored bytes. Score, pool: pairs of a MiniLM-L12 per second.
- Difference: largest difference from the result of the CPU. Wrong results are problems,
  which are listed above.
{METHOD}"""


def bench_gpu(
    photos: Path,
    say: Say,
    report_folder: Path | None = None,
    *,
    device: str = "auto",
    parts: Sequence[str] = (),
    tiny: bool = False,
) -> Report:
    """Run the check, and return the report.

    The arguments are options of `edje-index bench gpu`.

    Raises:
        UsageError: `photos` contains no photos.
    """
    find_photos(photos)
    folder = str(photos.resolve())
    kind = resolve_device(device)
    name = "the CPU: nothing was measured on a GPU"
    if kind.type == "cuda":
        name = torch.cuda.get_device_name(kind)
    tasks = [
        Task(
            "GPU",
            part,
            str(kind),
            "benchmarks.gpu:measure",
            [part, folder, str(kind), tiny],
        )
        for part in parts or PARTS
    ]
    if not parts:
        tasks += [
            Task(
                "Builds",
                f"{count} photos, {tower}",
                f"{engine}, {workers} workers",
                "benchmarks.build:measure",
                [
                    engine,
                    workers,
                    tower.replace("/", "-"),
                    asdict(TINY if tiny else sizes),
                    folder,
                    64 if tiny else count,
                    kind.type,
                    False,
                ],
            )
            for tower, (sizes, count) in _TOWERS.items()
            for engine, workers in (("inline", 1), ("ray", 4))
        ]
    about = {
        "name": "gpu",
        "title": f"Results and rates on {name}",
        "settings": {},
        "subjects": {},
        "reference": "",
        "notes": [],
        "method": _METHOD,
    }
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory, "scratch")
        return run(about, tasks, scratch, scratch, say, report_folder=report_folder)


def measure(part: str, photos: str, device: str, tiny: bool) -> Iterator[Report]:
    """Yield the results of a part."""
    yield from getattr(_Check(Path(photos), device, tiny), part)()


def _result(case: str, values: dict[str, float], is_right: bool = True) -> Report:
    result: Report = {"case": case, "values": values or {"equal": 1}}
    return result if is_right else result | {"problem": f"WRONG: {values}"}


class _Check:
    """The parts of the check. They keep models in the working directory."""

    def __init__(self, photos: Path, device: str, tiny: bool) -> None:
        self.device = torch.device(device)
        self.dtype = resolve_dtype("auto", self.device)
        self._tiny = tiny
        self._photos = find_photos(photos)[:64]

    def _rate(self, amount: float, work: Callable[[], object]) -> float:
        """Return `amount` divided by the median seconds of a call of `work`. If `work`
        only queues kernels, the seconds include the time until they have ended.
        """

        def ended() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return amount / median_seconds(ended, 1 if self._tiny else 5)

    def limits(self) -> Iterator[Report]:
        """The limits of the device."""
        size = 512 if self._tiny else 8192
        square = torch.randn(size, size, device=self.device).to(self.dtype)
        rate = self._rate(2 * size**3, lambda: square @ square)
        yield _result(f"matrix product, {self.dtype}", {"TFLOP/s": rate / 1e12})
        host = torch.ones(64 << 20, dtype=torch.uint8)
        if self.device.type == "cuda":
            host = host.pin_memory()
        copied = host.to(self.device)
        # A copy moves each byte twice, because it reads and writes the byte.
        rate = self._rate(2 * len(host), copied.clone)
        yield _result("copy in the memory", {"GB/s": rate / 1e9})
        copy = partial(copied.copy_, host, non_blocking=True)
        rate = self._rate(len(host), copy)
        yield _result("copy from pinned memory", {"GB/s": rate / 1e9})

    def decode(self) -> Iterator[Report]:
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
            yield _result(name, {"GB/s": rate / 1e9}, is_right)

    def _scorer(self, dtype: torch.dtype, device: str) -> JointScorer:
        torch.manual_seed(0)
        joint = untrained_joint_encoder(
            _SHAPE[1],
            words=16000,
            width=_SHAPE[1],
            intermediate=4 * _SHAPE[1],
            layers=1 if self._tiny else 12,
            heads=12,
        ).to(device)
        joint.compute_dtype = dtype
        return joint.scorer()

    def score(self) -> Iterator[Report]:
        """The joint encoder alone."""
        count = 64 if self._tiny else 4096
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randn(count, *_SHAPE, generator=generator).bfloat16()
        there = blocks.to(self.device)
        words = CAPTION.split() * 4
        mixed = [" ".join(words[: 4 + at % 40]) for at in range(count)]
        reference = self._scorer(torch.float32, "cpu")
        for dtype in dict.fromkeys((self.dtype, torch.float32)):
            scorer = self._scorer(dtype, str(self.device))
            for kind, captions in (("one caption", [CAPTION]), ("mixed", mixed)):
                expected = reference.score(captions[:32], blocks[:32])
                # The first calls run kernel by kernel. Later calls replay a recorded
                # graph, whose result is checked.
                for _ in range(3):
                    actual = scorer.score(captions[:32], there[:32])
                difference = float((actual - expected).abs().max())
                is_right = difference < (1e-3 if dtype == torch.float32 else 0.05)
                rate = self._rate(count, partial(scorer.score, captions, there))
                values = {"pairs/s": rate, "difference": difference}
                yield _result(f"{dtype}, {kind}", values, is_right)
            rate = self._rate(1, partial(scorer.score, CAPTION, there[:100]))
            yield _result(f"{dtype}, pools of 100", {"pools/s": rate})

    def pool(self) -> Iterator[Report]:
        """A pool of 50,000 candidates, from files in the page cache to logits."""
        pool = 512 if self._tiny else 50000
        stored = ("bf16", "fp8", "nvfp4")
        index = Path("tokens.edje")
        make_synthetic(index, rows=pool, precisions=stored, shard_size=4096)
        rows = np.random.default_rng(2).permutation(pool)
        scorer = self._scorer(self.dtype, str(self.device))
        for name in stored:
            store = TokenStore.open(index, name)
            fetcher = DeviceFetcher(store, str(self.device))
            fetch = partial(fetcher.fetch, rows)
            expected = store.fetch(rows[:512], as_torch=True)
            actual = fetch()[:512].cpu()
            is_right = torch.equal(actual.view(torch.int16), expected.view(torch.int16))
            rate = self._rate(pool * store.record_bytes / 1e9, fetch)
            yield _result(f"{name}, fetched", {"GB/s": rate}, is_right)
            rate = self._rate(pool, partial(_fetch_and_score, fetch, scorer))
            yield _result(f"{name}, fetched and scored", {"pairs/s": rate})

    def search(self) -> Iterator[Report]:
        """Builds on the device by both engines, and searches on both devices."""
        create_untrained_bundle("tiny", sizes=TINY)
        blocks = []
        for engine in ("inline", "ray"):
            build_index(
                self._photos, engine, "tiny", engine=engine, device=self.device.type
            )
            store = TokenStore.open(engine)
            blocks.append(store.fetch(range(len(store))).tobytes())
        yield _result("builds inline and by Ray", {}, blocks[0] == blocks[1])
        tokens = []
        hits = []
        for device in ("cpu", str(self.device)):
            encoder = ImageEncoder.open("tiny", device=device)
            pixels = encoder.new_batch(len(self._photos))
            for image, path in zip(pixels, self._photos, strict=True):
                encoder.preprocess(decode_rgb(path.read_bytes()), image)
            encoded = torch.from_numpy(encoder.encode(pixels)[0].view(np.int16))
            tokens.append(encoded.view(torch.bfloat16).float())
            is_right = torch.equal(encoder.tokens(pixels).cpu().float(), tokens[-1])
            yield _result(f"tokens of recorded kernels on {device}", {}, is_right)
            index = TokenIndex.open("inline", "tiny", device=device, dtype="float32")
            found = index.search([CAPTION, "a dog", "snow"], k=10, pool=40)
            hits.append([[hit.row_id for hit in each] for each in found])
        cosines = torch.nn.functional.cosine_similarity(tokens[0], tokens[1], 2)
        cosine = float(cosines.min())
        yield _result("least cosine of a token", {"cosine": cosine}, cosine > 0.98)
        yield _result("hits of three queries in float32", {}, hits[0] == hits[1])

    def train(self) -> Iterator[Report]:
        """The losses of the first training steps on the CPU and on the device, in one
        chunk and in several chunks per batch.
        """
        if not Path("tiny").exists():
            create_untrained_bundle("tiny", sizes=TINY)
        here = self.device.type
        lines = []
        losses = list[Floats]()
        for at, path in enumerate(self._photos):
            captions = [f"a picture {at} of {thing}" for thing in ("dogs", "a red car")]
            lines.append(json.dumps({"path": str(path), "captions": captions}))
        Path("captions.jsonl").write_text("\n".join(lines))
        write_feature_bundle("tiny", "features")
        build_index(
            "captions.jsonl", "captions.edje", "features", engine="inline", max_failed=1
        )
        for device, chunk in (("cpu", 8), (here, 8), (here, 2)):
            out = f"{device}-{chunk}"
            train(
                "captions.edje",
                out,
                loop={"steps": 6, "batch_size": 8, "dtype": "float32"},
                architecture={"dropout": 0.0},
                inputs={"init": "tiny"},
                run={"log_every": 1, "device": device, "chunk_pairs": chunk},
            )
            steps = [step for step in read_log(Path(f"{out}.run")) if "loss" in step]
            losses.append(np.array([step["loss"] for step in steps]))
            difference = float(np.abs(losses[0] - losses[-1]).max())
            yield _result(
                f"losses on {device}, chunks of {chunk} of 8 pairs",
                {"difference": difference},
                difference < 0.01,
            )


def _fetch_and_score(fetch: Callable[[], torch.Tensor], scorer: JointScorer) -> object:
    return scorer.score(CAPTION, fetch())
