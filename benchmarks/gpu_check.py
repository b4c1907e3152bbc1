"""`make gpu-check`: are the results on a GPU right, and how near do the rates come to
the limits of the device?

    python -m benchmarks.gpu_check PHOTOS MODEL --report DIRECTORY

Each part first compares its results with those of the CPU. Then it measures its rate
beside a bare loop that does nothing else, and beside a limit of the device: the
products of a large matrix, a copy within its memory, or a copy from pinned memory.
Without a GPU, everything runs on the CPU, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.process import run_command
from benchmarks.rerank import CAPTION
from benchmarks.synthetic import make_synthetic
from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation.report import table, write_report
from edje_index.fetching.device_decode import decode_records_torch
from edje_index.fetching.device_fetcher import DeviceFetcher
from edje_index.fetching.token_dataset import TokenDataset
from edje_index.images.decode import decode_rgb
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.devices import autocast, resolve_device, resolve_dtype
from pipelines.environment import environment
from pipelines.jobs.ann import add_ann
from storage_formats.codecs import Blocks, codec
from storage_formats.errors import EdjeError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_all_rows
from storage_formats.threads import usable_cpus
from storage_formats.token_store import TokenStore

_SHAPE = (64, 384)
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
_REPEATS = 5
_PAIRS = 8
_TRAINING = (
    "loop.steps=6",
    f"loop.batch_size={_PAIRS}",
    "alignment.steps=0",
    "augmentation.views=0",
    "architecture.dropout=0",
    "run.log_every=1",
    "fitting.pooled_dim=0",
)
_SUBJECTS = ("dogs", "snow", "a red car", "two people")
_EXTENSIONS = {".jpg", ".jpeg", ".png"}


class Line(NamedTuple):
    """One rate, in `unit` per second.

    Attributes:
        agreed: how the results compare with those of the CPU.
        bare: rate of a loop that does nothing else; None if there is none.
        limit: rate that the device allows; None if it is not known.
    """

    part: str
    agreed: str
    unit: str
    rate: float
    bare: float | None = None
    limit: float | None = None


def gpu_check(
    photos: Path, model: Path, *, device: str = "auto", repeats: int = _REPEATS
) -> dict[str, Any]:
    """Run all parts. Return the report.

    Raises:
        EdjeError: a result on the device is not that of the CPU.
    """
    target = resolve_device(device)
    check = _Check(target, repeats)
    with tempfile.TemporaryDirectory() as scratch:
        lines = [
            *check.decoding(),
            *check.fetching(Path(scratch) / "tokens.edje"),
            *check.building(photos, model, Path(scratch)),
            *check.scoring(model),
            *check.training(photos, model, Path(scratch)),
            *check.neighbours(Path(scratch) / "tokens.edje"),
        ]
    name = (
        torch.cuda.get_device_name(target)
        if target.type == "cuda"
        else "the CPU: nothing was measured on a GPU"
    )
    limits = {
        "product_tflops": check.flops / 1e12,
        "memory_gb_s": check.memory / 1e9,
        "copy_gb_s": check.copy / 1e9,
    }
    return {
        "environment": environment(),
        "device": name,
        "limits": limits,
        "lines": lines,
    }


class _Check:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        self.dtype = resolve_dtype("auto", device)
        cuda = device.type == "cuda"
        self.rows = 4096 if cuda else 512
        size = 8192 if cuda else 1024
        square = torch.randn(size, size, device=device).to(self.dtype)
        self.flops = self.rate(2 * size**3, lambda: square @ square)
        mebibytes = 256 if cuda else 64
        large = torch.ones(mebibytes << 20, dtype=torch.uint8, device=device)
        # each byte is read and written
        self.memory = self.rate(2 * len(large), large.clone)
        host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=cuda)
        part = large[: len(host)]
        self.copy = self.rate(len(host), lambda: part.copy_(host, non_blocking=True))

    def rate(self, amount: float, work: Callable[[], object]) -> float:
        """Return `amount` per median second of `work`, which may return before the
        device has ended.
        """
        times = []
        # the first run is the warm-up
        for _ in range(1 + self.repeats):
            started = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return amount / statistics.median(times[1:])

    def decoding(self) -> Iterator[Line]:
        """Decode stored records on the device. The bits must be those of the codecs."""
        blocks = np.random.default_rng(0).standard_normal(
            (512, *_SHAPE), dtype=np.float32
        )
        # bf16 needs no decoding
        for name in _PRECISIONS[1:]:
            entry = codec(name, _SHAPE)
            encoded = entry.encode(blocks.astype("bfloat16"))
            records = torch.from_numpy(encoded).to(self.device)
            decode = partial(decode_records_torch, name, records, _SHAPE)
            decoded = decode()
            expected = torch.from_numpy(entry.decode(encoded).view(np.int16))
            agreed = _same_bits(f"decoding {name} on {self.device}", decoded, expected)
            size = decoded.nbytes / 1e9
            limit = self.memory * size / (decoded.nbytes + records.nbytes)
            yield Line(
                f"decode {name}", agreed, "GB/s", self.rate(size, decode), None, limit
            )

    def fetching(self, index: Path) -> Iterator[Line]:
        """Fetch rows of a warm index to the device, with `DeviceFetcher` and with a
        `DataLoader`.
        """
        make_synthetic(index, IndexSpec(self.rows, self.rows, _SHAPE, 64, _PRECISIONS))
        rows = np.random.default_rng(1).permutation(self.rows)
        limit = self.copy / 1e9
        for name in _PRECISIONS:
            store = TokenStore.open(index, name)
            fetch = partial(DeviceFetcher(store, str(self.device)).fetch, rows)
            expected = store.fetch(rows, as_torch=True)
            agreed = _same_bits(f"fetching {name} to {self.device}", fetch(), expected)
            records = store.fetch_records(rows)
            size = records.nbytes / 1e9
            bare = self.rate(size, partial(store.fetch_records, rows, records))
            rate = self.rate(size, fetch)
            yield Line(f"DeviceFetcher {name}", agreed, "GB/s read", rate, bare, limit)
        loader = DataLoader(
            TokenDataset(index, "bf16"),
            batch_size=256,
            num_workers=min(2, usable_cpus()),
            pin_memory=self.device.type == "cuda",
        )
        loaded = torch.cat([batch.to(self.device) for batch in loader])
        expected = TokenStore.open(index, "bf16").fetch(range(self.rows), as_torch=True)
        agreed = _same_bits("the DataLoader", loaded, expected)
        rate = self.rate(
            loaded.nbytes / 1e9, lambda: [batch.to(self.device) for batch in loader]
        )
        yield Line("DataLoader", agreed, "GB/s", rate, None, limit)

    def building(self, photos: Path, model: Path, scratch: Path) -> Iterator[Line]:
        """Encode photos, alone and in a build."""
        paths = _photos(photos)
        encoder = ImageEncoder.open(model, device=str(self.device))
        reference = ImageEncoder.open(model, device="cpu")
        pixels = torch.stack(
            [encoder.preprocess(decode_rgb(path.read_bytes())) for path in paths]
        )
        expected = reference.encode(pixels)[0]
        on_device = pixels.to(self.device)

        @torch.inference_mode()
        def bare() -> object:
            with autocast(encoder.dtype, self.device):
                return encoder.adapter(encoder.vision.encode(on_device)[0])

        limit = len(pixels) * self.flops / _flops(bare)
        rate = self.rate(len(pixels), lambda: encoder.encode(pixels))
        bare_rate = self.rate(len(pixels), bare)
        agreed = self._similar(encoder.encode(pixels)[0], expected)
        yield Line("encode images", agreed, "images/s", rate, bare_rate, limit)
        index = scratch / "photos.edje"
        options = ["--model", model, "--engine", "inline", "--device", self.device]
        report = run_command("build", photos, "--out", index, "--quiet", *options)
        stored = read_all_rows(CommittedIndex.open(index), ("uri", "row_id"))
        rows = {row["uri"]: row["row_id"] for row in stored.to_pylist()}
        row_ids = [rows[str(path.absolute())] for path in paths]
        agreed = self._similar(TokenStore.open(index).fetch(row_ids), expected)
        rate = report["indexed"] / report["stage_seconds"]["encode"]
        yield Line("build, its model stage", agreed, "images/s", rate, bare_rate, limit)

    def _similar(self, tokens: Blocks, expected: Blocks) -> str:
        first = torch.from_numpy(tokens.astype(np.float32))
        second = torch.from_numpy(expected.astype(np.float32))
        cosines = torch.nn.functional.cosine_similarity(first, second, dim=2)
        cosine = float(cosines.min())
        if cosine < 0.98:
            raise EdjeError(
                f"a token of {self.device} has a cosine of {cosine:.3f} with that"
                " of the CPU"
            )
        return f"tokens: cosine of at least {cosine:.4f}"

    def scoring(self, model: Path) -> Iterator[Line]:
        """Score pairs with the joint encoder."""
        bundle = ModelBundle.load(model, device=str(self.device), verify=False)
        reference = ModelBundle.load(model, device="cpu", verify=False)
        joint = bundle.joint
        joint.compute_dtype = self.dtype
        captions = [CAPTION] * 256
        blocks = torch.randn(
            256, *bundle.block_shape, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        score = partial(joint.scorer().score, captions, blocks)
        expected = reference.joint.scorer().score(captions, blocks)
        difference = float((score().cpu() - expected).abs().max())
        if difference > (0.2 if self.dtype == torch.bfloat16 else 1e-3):
            raise EdjeError(
                f"a logit of {self.device} differs by {difference:.3f} from that of"
                " the CPU"
            )
        inputs = joint.tokenizer.inputs(captions, blocks.shape[1])
        on_device = blocks.to(self.device)

        @torch.inference_mode()
        def bare() -> object:
            return joint(inputs, on_device)

        yield Line(
            "re-rank",
            f"logits differ by at most {difference:.2g}",
            "pairs/s",
            self.rate(256, score),
            self.rate(256, bare),
            256 * self.flops / _flops(bare),
        )

    def training(self, photos: Path, model: Path, scratch: Path) -> Iterator[Line]:
        """Train the model for a few steps on photos, with made-up captions. The
        losses must be those of the CPU.
        """
        captions = scratch / "captions.jsonl"
        with captions.open("w") as file:
            for at, path in enumerate(_photos(photos)):
                texts = [f"a picture {at} of {subject}" for subject in _SUBJECTS]
                line = {"image": str(path.absolute()), "captions": texts}
                file.write(json.dumps(line) + "\n")
        losses = []
        rates = []
        for device in (str(self.device), "cpu"):
            out = scratch / f"trained-{device.replace(':', '-')}"
            if not out.exists():
                settings = (
                    *_TRAINING,
                    f"run.device={device}",
                    f"loop.dtype={str(self.dtype).removeprefix('torch.')}",
                )
                options = [f"--set={setting}" for setting in settings]
                models = ["--model", model, "--init", model]
                run_command("train", captions, "--out", out, *models, *options)
            log = out.with_suffix(".run") / "log.jsonl"
            steps = [json.loads(line) for line in log.read_text().splitlines()]
            losses.append(np.array([step["loss"] for step in steps if "loss" in step]))
            seconds = [step["step_seconds"] for step in steps if "step_seconds" in step]
            rates.append(_PAIRS / statistics.median(seconds))
        difference = float(np.abs(losses[0] - losses[1]).max())
        if difference > 0.05:
            raise EdjeError(
                f"losses of {self.device} differ by {difference:.3f} from those of"
                " the CPU"
            )
        agreed = f"losses differ by at most {difference:.2g}"
        yield Line("train step", agreed, "pairs/s", rates[0])

    def neighbours(self, index: Path) -> Iterator[Line]:
        """Build a nearest-neighbour index. FAISS uses the GPU if the package
        faiss-gpu is installed.
        """
        has_gpu = self.device.type == "cuda" and "faiss-gpu-cu12" in {
            each.name for each in distributions()
        }
        processor = "GPU" if has_gpu else "CPU"
        started = time.perf_counter()
        recall = add_ann(index, AnnRequest("IVF16,Flat")).ann["recall"]["value"]
        rate = self.rows / (time.perf_counter() - started)
        yield Line(
            f"FAISS on the {processor}", f"recall of {recall:.3f}", "rows/s", rate
        )


def _same_bits(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    if not torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16)):
        raise EdjeError(f"{what} gives other bits than the codec on the CPU")
    return "equal bits"


def _photos(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in _EXTENSIONS
    )[:64]


def _flops(work: Callable[[], object]) -> int:
    """Count the operations of `work`. Linear layers of oneDNN are not counted, so a
    CPU's limit is too high.
    """
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the report as Markdown."""
    limits = report["limits"]
    return [
        f"# Results and rates on {report['device']}, {report['environment']['date']}",
        "",
        (
            f"Limits: products {limits['product_tflops']:.4g} TFLOP/s, copies within"
            f" the memory {limits['memory_gb_s']:.4g} GB/s, copies from pinned memory"
            f" {limits['copy_gb_s']:.4g} GB/s."
        ),
        "",
        *table(
            (
                "part",
                "compared with the CPU",
                "unit",
                "rate",
                "bare loop",
                "limit",
                "share of the limit",
            ),
            [_cells(line) for line in report["lines"]],
        ),
    ]


def _cells(line: Line) -> list[str]:
    share = line.limit and line.rate / line.limit
    numbers = (line.rate, line.bare, line.limit, share)
    return [
        *line[:3],
        *("" if number is None else f"{number:,.4g}" for number in numbers),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("model", type=Path, help="directory of the model bundle")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--report", type=Path, help="directory for the report, in Markdown and JSON"
    )
    given = parser.parse_args()
    try:
        result = gpu_check(given.photos, given.model, device=given.device)
    except EdjeError as problem:
        sys.exit(f"error: {problem}")
    text = "\n".join(report_lines(result))
    print(text)
    if given.report is not None:
        dated = f"{result['environment']['date']}-gpu-check"
        write_report(given.report, f"{text}\n", result, dated)
