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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.report import table, write_report
from benchmarks.rerank import CAPTION
from benchmarks.synthetic import make_synthetic
from edje_index.bundles.bundle import ModelBundle
from edje_index.fetching.device_decode import decode_records_torch
from edje_index.fetching.device_fetcher import DeviceFetcher
from edje_index.fetching.token_dataset import TokenDataset
from edje_index.images.decode import decode_rgb
from edje_index.indexing.faiss_index import AnnRequest, add_ann
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.devices import autocast, resolve_device, resolve_dtype
from pipelines.environment import environment
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
    *(
        "loop.steps=6",
        f"loop.batch_size={_PAIRS}",
        "alignment.steps=0",
        "augmentation.views=0",
        "architecture.dropout=0",
    ),
    *("run.log_every=1", "fitting.pooled_dim=0", "fitting.hubness_bank=0"),
)
_EXTENSIONS = {".jpg", ".jpeg", ".png"}


_COLUMNS = ("part", "compared with the CPU", "unit", "rate", "bare loop", "limit")
Line: TypeAlias = tuple[str, str, str, float, float | None, float | None]
"""A value for each of `_COLUMNS`."""


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
        size, self.rows = (8192, 4096) if cuda else (1024, 512)
        square = torch.randn(size, size, device=device).to(self.dtype)
        self.flops = 2 * size**3 / self.seconds(lambda: square @ square)
        large = torch.ones(
            (256 if cuda else 64) << 20, dtype=torch.uint8, device=device
        )
        # each byte is read and written
        self.memory = 2 * len(large) / self.seconds(large.clone)
        host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=cuda)
        part = large[: len(host)]
        self.copy = len(host) / self.seconds(
            lambda: part.copy_(host, non_blocking=True)
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of `work`, which may return before the device
        has ended.
        """
        times = []
        # the first run is the warm-up
        for _ in range(1 + self.repeats):
            started = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def decoding(self) -> Iterator[Line]:
        """Decode stored records on the device. The bits must be those of the codecs."""
        blocks = np.random.default_rng(0).standard_normal(
            (512, *_SHAPE), dtype=np.float32
        )
        # bf16 needs no decoding
        for name in _PRECISIONS[1:]:
            entry = codec(name, _SHAPE)
            records = torch.from_numpy(entry.encode(blocks.astype("bfloat16"))).to(
                self.device
            )
            decoded = decode_records_torch(name, records, _SHAPE)
            expected = entry.decode(records.numpy(force=True))
            if not np.array_equal(
                decoded.view(torch.int16).numpy(force=True), expected.view(np.int16)
            ):
                raise EdjeError(
                    f"decoding {name} on {self.device} gives other bits than the codec"
                )
            rate = (
                decoded.nbytes
                / self.seconds(partial(decode_records_torch, name, records, _SHAPE))
                / 1e9
            )
            limit = (
                self.memory * decoded.nbytes / (decoded.nbytes + records.nbytes) / 1e9
            )
            yield (f"decode {name}", "equal bits", "GB/s", rate, None, limit)

    def fetching(self, index: Path) -> Iterator[Line]:
        """Fetch rows of a warm index to the device, with `DeviceFetcher` and with a
        `DataLoader`.
        """
        make_synthetic(index, IndexSpec(self.rows, self.rows, _SHAPE, 64, _PRECISIONS))
        rows = np.random.default_rng(1).permutation(self.rows)
        for name in _PRECISIONS:
            store = TokenStore.open(index, name)
            fetcher = DeviceFetcher(store, str(self.device))
            expected = store.fetch(rows)
            if not torch.equal(
                fetcher.fetch(rows).cpu().view(torch.int16),
                torch.from_numpy(expected.view(np.int16)),
            ):
                raise EdjeError(
                    f"fetching {name} to {self.device} gives other bits than the store"
                )
            records = store.fetch_records(rows)
            size = len(rows) * store.record_bytes / 1e9
            bare = size / self.seconds(partial(store.fetch_records, rows, records))
            rate = size / self.seconds(partial(fetcher.fetch, rows))
            yield (
                f"DeviceFetcher {name}",
                "equal bits",
                "GB/s read",
                rate,
                bare,
                self.copy / 1e9,
            )
        dataset = TokenDataset(index, "bf16")
        loader = DataLoader(
            dataset,
            batch_size=256,
            num_workers=min(2, usable_cpus()),
            pin_memory=self.device.type == "cuda",
        )
        loaded = torch.cat([batch.to(self.device) for batch in loader]).cpu()
        if not torch.equal(
            loaded,
            TokenStore.open(index, "bf16").fetch(np.arange(self.rows), as_torch=True),
        ):
            raise EdjeError("the batches of the DataLoader are not the stored blocks")
        size = self.rows * codec("bf16", _SHAPE).record_bytes / 1e9
        rate = size / self.seconds(lambda: [batch.to(self.device) for batch in loader])
        yield ("DataLoader", "equal bits", "GB/s", rate, None, self.copy / 1e9)

    def building(self, photos: Path, model: Path, scratch: Path) -> Iterator[Line]:
        """Encode photos, alone and in a build."""
        paths = _photos(photos)
        encoder, reference = (
            ImageEncoder.open(model, device=each) for each in (str(self.device), "cpu")
        )
        pixels = torch.stack(
            [encoder.preprocess(decode_rgb(path.read_bytes())) for path in paths]
        )
        expected = reference.encode(pixels)[0]
        on_device = pixels.to(self.device)

        def compared(tokens: Blocks) -> str:
            first, second = (
                torch.from_numpy(each.astype(np.float32)) for each in (tokens, expected)
            )
            cosine = float(
                torch.nn.functional.cosine_similarity(first, second, dim=2).min()
            )
            if cosine < 0.98:
                raise EdjeError(
                    f"a token of {self.device} has a cosine of {cosine:.3f} with that"
                    " of the CPU"
                )
            return f"tokens: cosine of at least {cosine:.4f}"

        @torch.inference_mode()
        def bare() -> object:
            with autocast(encoder.dtype, self.device):
                return encoder.adapter(encoder.vision.encode(on_device)[0])

        limit = len(pixels) * self.flops / _flops(bare)
        rate, bare_rate = (
            len(pixels) / self.seconds(work)
            for work in (lambda: encoder.encode(pixels), bare)
        )
        agreed = compared(encoder.encode(pixels)[0])
        yield ("encode images", agreed, "images/s", rate, bare_rate, limit)
        index = scratch / "photos.edje"
        command = [
            "build",
            photos,
            "--out",
            index,
            "--model",
            model,
            "--engine",
            "inline",
            "--device",
            self.device,
        ]
        report = _command(*command)
        rows = {
            row["uri"]: row["row_id"]
            for row in read_all_rows(
                CommittedIndex.open(index), ("uri", "row_id")
            ).to_pylist()
        }
        agreed = compared(
            TokenStore.open(index).fetch([rows[str(path.absolute())] for path in paths])
        )
        rate = report["indexed"] / report["stage_seconds"]["encode"]
        yield ("build, its model stage", agreed, "images/s", rate, bare_rate, limit)

    def scoring(self, model: Path) -> Iterator[Line]:
        """Score pairs with the joint encoder."""
        bundles = [
            ModelBundle.load(model, device=each, verify=False)
            for each in (str(self.device), "cpu")
        ]
        joint = bundles[0].joint
        captions = [CAPTION] * 256
        joint.compute_dtype = self.dtype
        blocks = torch.randn(
            256, *bundles[0].block_shape, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        scorer = joint.scorer()
        logits = scorer.score(captions, blocks).cpu()
        expected = bundles[1].joint.scorer().score(captions, blocks)
        difference = float((logits - expected).abs().max())
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

        rate, bare_rate = (
            256 / self.seconds(work)
            for work in (lambda: scorer.score(captions, blocks), bare)
        )
        limit = len(captions) * self.flops / _flops(bare)
        yield (
            "re-rank",
            f"logits differ by at most {difference:.2g}",
            "pairs/s",
            rate,
            bare_rate,
            limit,
        )

    def training(self, photos: Path, model: Path, scratch: Path) -> Iterator[Line]:
        """Train the model for a few steps on photos, with made-up captions. The
        losses must be those of the CPU.
        """
        words = json.dumps(
            [
                f"a picture of {word}"
                for word in ("dogs", "snow", "a red car", "two people")
            ]
        )
        lines = [
            f'{{"image": "{path.absolute()}", "captions": {words}}}\n'
            for path in _photos(photos)
        ]
        captions = scratch / "captions.jsonl"
        losses = []
        rates = []
        captions.write_text(
            "".join(
                line.replace("picture of", f"picture {at} of")
                for at, line in enumerate(lines)
            )
        )
        for device in (str(self.device), "cpu"):
            out = scratch / f"trained-{device.replace(':', '-')}"
            if not out.exists():
                changes = (
                    *_TRAINING,
                    f"run.device={device}",
                    f"loop.dtype={str(self.dtype).removeprefix('torch.')}",
                )
                options = [part for change in changes for part in ("--set", change)]
                _command(
                    "train",
                    captions,
                    "--model",
                    model,
                    "--init",
                    model,
                    "--out",
                    out,
                    *options,
                )
            log = out.with_suffix(".run") / "log.jsonl"
            steps = [json.loads(line) for line in log.read_text().splitlines()]
            losses.append(np.array([step["loss"] for step in steps if "loss" in step]))
            rates.append(
                _PAIRS
                / statistics.median(
                    step["step_seconds"] for step in steps if "step_seconds" in step
                )
            )
        difference = float(np.abs(losses[0] - losses[1]).max())
        if difference > 0.05:
            raise EdjeError(
                f"losses of {self.device} differ by {difference:.3f} from those of"
                " the CPU"
            )
        yield (
            "train step",
            f"losses differ by at most {difference:.2g}",
            "pairs/s",
            rates[0],
            None,
            None,
        )

    def neighbours(self, index: Path) -> Iterator[Line]:
        """Build a nearest-neighbour index. FAISS uses the GPU if the package
        faiss-gpu is installed.
        """
        has_gpu = self.device.type == "cuda" and "faiss-gpu-cu12" in {
            each.name for each in distributions()
        }
        started = time.perf_counter()
        recall = add_ann(index, AnnRequest("IVF16,Flat")).ann["recall"]["value"]
        rate = self.rows / (time.perf_counter() - started)
        yield (
            f"FAISS on the {'GPU' if has_gpu else 'CPU'}",
            f"recall of {recall:.3f}",
            "rows/s",
            rate,
            None,
            None,
        )


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


def _command(*arguments: object) -> dict[str, Any]:
    """Run a command of the package with `--json`, and return what it prints."""
    command = [
        sys.executable,
        "-m",
        "pipelines.cli",
        *map(str, arguments),
        "--json",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdjeError(
            f"edje-index {arguments[0]} failed: {done.stderr.strip()[-500:]}"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


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
            (*_COLUMNS, "share of the limit"),
            [
                (
                    *words,
                    *("" if number is None else f"{number:,.4g}" for number in numbers),
                    share,
                )
                for *words, rate, bare, limit in report["lines"]
                for numbers, share in [
                    ((rate, bare, limit), f"{rate / limit:.2f}" if limit else "")
                ]
            ],
        ),
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
    text = report_lines(result)
    print("\n".join(text))
    if given.report is not None:
        write_report(result, given.report, "gpu-check", text)
