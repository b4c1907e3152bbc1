"""The steps that several experiments use: train, fine-tune, index and evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.data import MAIN_LANGUAGE, MAIN_TOWER, Captions, Data
from benchmarks.paper.steps import OUT, Steps
from edje_index.captions.reading import read_captions
from storage_formats.atomic import write_bytes_atomic

POOL = 10
"""Candidates per query in the experiments of the paper. A few experiments use other numbers."""


@dataclass(frozen=True)
class Variant:
    """A model of the EDJE paper.

    Attributes:
        tower: name of the towers, a key of `benchmarks.paper.data.TOWERS`.
        adapter: kind of adapter.
        tokens: stored tokens per image; ignored by the adapter "local".
        language: name of the language model, a key of `benchmarks.paper.data.LANGUAGES`.
        distilled: True to distil from the local model with the same towers.
        miner: name of the towers that mine hard negatives; None for `tower`.
        settings: additional settings of `edje-index train`, in the form GROUP.KEY=VALUE.
    """

    tower: str = MAIN_TOWER
    adapter: str = "compressed"
    tokens: int = 64
    language: str = MAIN_LANGUAGE
    distilled: bool = True
    miner: str | None = None
    settings: tuple[str, ...] = ()


LOCAL = Variant(adapter="local", distilled=False)
"""The uncompressed model, which is the teacher of the other models."""


@dataclass(frozen=True)
class Study:
    """Makes each model and index of the experiments once.

    Attributes:
        data: data of the experiments.
        steps: finished steps.
    """

    data: Data
    steps: Steps

    def pretrained(self, variant: Variant) -> Path:
        """Return the bundle of a model after the first training phase."""
        captions = self.data.pretraining()
        language = ("--language", self.data.language(variant.language))
        return self._trained(
            "pretrain", variant, captions, ["--preset", "paper", *language, *self.data.budget.pretrain]
        )

    def finetuned(self, variant: Variant) -> Path:
        """Return the bundle of a model after the second training phase, which uses COCO."""
        captions, start = self.data.finetuning(), self.pretrained(variant)
        phase = ["--preset", "paper-finetune", "--init", start, *self.data.budget.finetune]
        return self._trained("finetune", variant, captions, phase)

    def recall(
        self, bundle: Path, benchmark: str, pools: Sequence[int] = (POOL,), *options: str, full: bool = False
    ) -> Recall:
        """Evaluate the logit of a bundle on the test images of a benchmark. The images are indexed first.

        Args:
            bundle: path of the model bundle.
            benchmark: "flickr" or "coco".
            pools: numbers of candidates per query.
            *options: additional options of `edje-index eval`.
            full: True to use all images and captions of the dataset as candidates.
        """
        captions, index = self.data.benchmark(benchmark), self.index(bundle, benchmark, full=full)
        command = ["eval", index, captions.files[0], "--images", captions.images, *self.data.budget.evaluation]
        command += [word for pool in pools for word in ("--pool", str(pool))]
        command += ["--split", captions.split] if captions.split else []
        command += ["--score", "logit", "--cache", f"{OUT}/scores", *options, *(["--full"] if full else [])]
        return Recall(self.steps.command("eval", *command).report)

    def index(self, bundle: Path, benchmark: str, *, full: bool = False) -> Path:
        """Return the index of the images of a benchmark. Only the test split is indexed, unless `full` is True."""
        captions = self.data.benchmark(benchmark)
        return self._index_of(bundle, captions, None if full else captions.split, benchmark)

    def _index_of(self, bundle: Path, captions: Captions, split: str | None, name: str) -> Path:
        images = self._image_list(captions, split, name)
        command = ["build", images, "--model", bundle, "--out", f"{OUT}/images.edje", "--quiet"]
        return self.steps.command("build", *command).folder / "images.edje"

    def _trained(self, name: str, variant: Variant, captions: Captions, phase: Sequence[object]) -> Path:
        teacher = self._teacher(name, variant)
        reduced = variant.adapter in ("strided", "clustered", "pruned")
        command: list[object] = ["train", *captions.files, "--images", captions.images, *phase]
        command += ["--model", self.data.tower(variant.tower), "--out", f"{OUT}/model", *self.data.budget.train]
        command += ["--teacher", teacher] if teacher else []
        settings = [f"architecture.adapter={variant.adapter}", f"architecture.tokens={variant.tokens}"]
        settings += [f"inputs.split={captions.split}"] if captions.split else []
        settings += [f"inputs.miner={self.data.tower(variant.miner)}"] if variant.miner else []
        if teacher and reduced:  # the stored features of these adapters are not those that the teacher reads
            settings.append(f"inputs.teacher_features={self._index_of(teacher, captions, captions.split, name)}")
        settings += variant.settings
        command += [word for setting in settings for word in ("--set", setting)]
        return self.steps.command(name, *command).folder / "model"

    def _teacher(self, phase: str, variant: Variant) -> Path | None:
        if not variant.distilled:
            return None
        teacher = Variant(variant.tower, "local", language=variant.language, distilled=False)
        return self.pretrained(teacher) if phase == "pretrain" else self.finetuned(teacher)

    def _image_list(self, captions: Captions, split: str | None, name: str) -> Path:
        path = self.steps.folder / "lists" / f"{name}-{split or 'all'}.jsonl"
        if not path.exists():
            items = (item for file in captions.files for item in read_captions(file, captions.images, split))
            images = dict.fromkeys(item.path for item in items)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(path, "".join(json.dumps({"path": image}) + "\n" for image in images).encode())
        return path


@dataclass(frozen=True)
class Recall:
    """The report of one evaluation. The report is empty if commands are only listed."""

    report: dict[str, Any]

    def at(self, direction: str, cutoff: int, pool: int | None = POOL, precision: str | None = "bf16") -> float | None:
        """Return R@`cutoff` in percent; None if the report does not contain this recall.

        Args:
            direction: "t2i" or "i2t".
            cutoff: number k of hits in R@k.
            pool: number of candidates; None for the recall of the embeddings alone, without re-ranking.
            precision: precision of the tokens; ignored if `pool` is None.
        """
        if pool is None:
            precision = None
        for result in self.report.get("results", ()):
            same = (result["direction"], result.get("pool"), result.get("precision"))
            if same == (direction, pool, precision):
                return float(result["recall"][str(cutoff)]["value"])
        return None

    def columns(self, prefix: str, cutoff: int, pool: int | None = POOL) -> dict[str, float | None]:
        """Return R@`cutoff` of both directions in percent, by column name.

        Args:
            prefix: start of the column names; "T2I" and "I2T" are appended.
            cutoff: as for `at`.
            pool: as for `at`.
        """
        return {f"{prefix} {name}": self.at(name.lower(), cutoff, pool) for name in ("T2I", "I2T")}
