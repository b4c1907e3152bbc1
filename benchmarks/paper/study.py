"""The steps that the experiments consist of: train, fine-tune, index and evaluate.

A step runs an `edje-index` command in a folder of its own and stores the command's report there. Experiments share
steps, and an interrupted study continues after the last finished step.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.paper.data import MAIN_LANGUAGE, MAIN_TOWER, Captions, FullData, SmallData
from benchmarks.report import Say
from edje_index.captions.reading import read_captions
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError

OUT = "{out}"
"""In the arguments of a command, this text is replaced by the folder of the step."""
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


@dataclass
class Study:
    """Makes each model, index and evaluation of the experiments once.

    Attributes:
        data: data of the experiments.
        folder: folder that contains one folder per step.
        say: function that receives one line of text per step.
        listing: True to print the commands instead of running them.
    """

    data: FullData | SmallData
    folder: Path
    say: Say
    listing: bool = False
    _listed: set[str] = field(default_factory=set)

    def command(self, name: str, *arguments: object) -> tuple[Path, dict[str, Any]]:
        """Run `edje-index ARGUMENTS --json`, unless an earlier run had the same arguments.

        Args:
            name: start of the name of the step's folder.
            *arguments: arguments of the command. In each argument, `OUT` is replaced by the folder of the step.

        Returns:
            The folder of the step, and the report that the command printed; empty if commands are only listed.

        Raises:
            EdjeError: the command failed.
        """
        template = [str(argument) for argument in arguments]
        folder = self._folder(name, template)
        command = [argument.replace(OUT, str(folder)) for argument in template]
        line = shlex.join(["edje-index", *command])

        def work() -> dict[str, Any]:
            """Print progress and errors of the command to standard error, and return its report."""
            words = [sys.executable, "-m", "pipelines.cli", *command, "--json"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise EdjeError(
                    f"edje-index {command[0]} ended with exit code {done.returncode}: fix the cause in the output "
                    f"above and run the study again, which keeps finished steps; the command was: {line}"
                )
            report: dict[str, Any] = json.loads(done.stdout)
            return report

        return folder, self._once(folder, line, work)

    def measure(self, name: str, settings: Sequence[object], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work()`. Return the stored result if an earlier call had the same name and settings."""
        words = [str(value) for value in settings]
        return self._once(self._folder(name, words), f"measure {name} of {' '.join(words)}", work)

    def _folder(self, name: str, template: Sequence[str]) -> Path:
        """Return the folder of a step. The name of the folder does not depend on `self.folder`."""
        portable = [argument.replace(str(self.folder), "{steps}") for argument in template]
        digest = hashlib.sha256(json.dumps([name, portable]).encode()).hexdigest()
        return self.folder / f"{name}-{digest[:12]}"

    def _once(self, folder: Path, line: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        stored = folder / "report.json"
        if stored.exists():
            report: dict[str, Any] = json.loads(stored.read_bytes())
            return report
        if self.listing:
            if line not in self._listed:
                self._listed.add(line)
                self.say(line)
            return {}
        self.say(line)
        folder.mkdir(parents=True, exist_ok=True)
        report = work()
        write_bytes_atomic(stored, json.dumps(report, indent=1, default=str).encode())
        return report

    def pretrained(self, variant: Variant) -> Path:
        """Return the bundle of a model after the first training phase."""
        captions, language = self.data.pretraining(), self.data.language(variant.language)
        phase = ["--preset", "paper", "--language", language, *self.data.pretrain_options]
        return self._trained("pretrain", variant, captions, phase)

    def finetuned(self, variant: Variant) -> Path:
        """Return the bundle of a model after the second training phase, which uses COCO."""
        captions, start = self.data.finetuning(), self.pretrained(variant)
        phase = ["--preset", "paper-finetune", "--init", start, *self.data.finetune_options]
        return self._trained("finetune", variant, captions, phase)

    def _trained(self, name: str, variant: Variant, captions: Captions, phase: Sequence[object]) -> Path:
        command: list[object] = ["train", *captions.files, "--images", captions.images, *phase]
        command += ["--model", self.data.tower(variant.tower), "--out", f"{OUT}/model", *self.data.train_options]
        settings = [f"architecture.adapter={variant.adapter}", f"architecture.tokens={variant.tokens}"]
        settings += [f"inputs.split={captions.split}"] if captions.split else []
        settings += [f"inputs.miner={self.data.tower(variant.miner)}"] if variant.miner else []
        if variant.distilled:
            of_teacher = replace(LOCAL, tower=variant.tower, language=variant.language)
            teacher = self.pretrained(of_teacher) if name == "pretrain" else self.finetuned(of_teacher)
            command += ["--teacher", teacher]
            if variant.adapter != "compressed":  # other adapters do not store the features that the teacher reads
                settings.append(f"inputs.teacher_features={self._index_of(teacher, captions, captions.split, name)}")
        command += [word for setting in (*settings, *variant.settings) for word in ("--set", setting)]
        return self.command(name, *command)[0] / "model"

    def index(self, bundle: Path, benchmark: str, *, full: bool = False) -> Path:
        """Return the index of the images of a benchmark. Only the test split is indexed, unless `full` is True."""
        captions = self.data.benchmark(benchmark)
        return self._index_of(bundle, captions, None if full else captions.split, benchmark)

    def _index_of(self, bundle: Path, captions: Captions, split: str | None, name: str) -> Path:
        images = self.folder / "lists" / f"{name}-{split or 'all'}.jsonl"
        if not images.exists():
            items = (item for file in captions.files for item in read_captions(file, captions.images, split))
            paths = dict.fromkeys(item.path for item in items)
            images.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(images, "".join(json.dumps({"path": path}) + "\n" for path in paths).encode())
        command = ["build", images, "--model", bundle, "--out", f"{OUT}/images.edje", "--quiet"]
        return self.command("build", *command)[0] / "images.edje"

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
        command = ["eval", index, captions.files[0], "--images", captions.images, *self.data.evaluation_options]
        command += [word for pool in pools for word in ("--pool", str(pool))]
        command += ["--split", captions.split] if captions.split else []
        command += ["--score", "logit", "--cache", f"{OUT}/scores", *options, *(["--full"] if full else [])]
        return Recall(self.command("eval", *command)[1])


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
        wanted = (direction, pool, None if pool is None else precision)
        for result in self.report.get("results", ()):
            if (result["direction"], result.get("pool"), result.get("precision")) == wanted:
                return float(result["recall"][str(cutoff)]["value"])
        return None
