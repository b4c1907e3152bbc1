"""The data of the experiments, and the steps that they consist of: train, fine-tune,
index and evaluate.

The data folder:

    pretrain/                         caption files of CC12M, CC3M, SBU, Visual
                                      Genome and COCO, and their images
    flickr30k/dataset_flickr30k.json  Karpathy split file with captions
    flickr30k/flickr30k-images/       images
    coco/dataset_coco.json            Karpathy split file with captions
    coco/train2014/, coco/val2014/    images
    towers/NAME/                      bundles of `edje-index model get MODEL:TAG`
    languages/NAME/                   language models of the Hugging Face Hub
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness import Say, run_command
from benchmarks.report import Report
from edje_index.captions.reading import read_captions
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError

TOWERS = {
    "clip-b16-224": "ViT-B-16:openai",
    "clip-l14-224": "ViT-L-14:openai",
    "clip-l14-336": "ViT-L-14-336:openai",
    "dfn-l14-224": "ViT-L-14-quickgelu:dfn2b",
    "metaclip-l14-224": "ViT-L-14-quickgelu:metaclip_fullcc",
    "siglip2-b16-384": "ViT-B-16-SigLIP2-384:webli",
    "siglip2-l16-384": "ViT-L-16-SigLIP2-384:webli",
}
"""The towers of the paper, as open_clip names them."""
LANGUAGES = {
    "minilm-l12": "microsoft/MiniLM-L12-H384-uncased",
    "bert-base": "google-bert/bert-base-uncased",
}
"""The language models of the paper, as the Hugging Face hub names them."""
MAIN_TOWER = "siglip2-l16-384"
MAIN_LANGUAGE = "minilm-l12"
OUT = "{out}"
"""Placeholder in the arguments of a step's command. It stands for the step's folder."""
POOL = 10
"""Number of candidates per query in most experiments of the paper."""


class MissingDataError(Exception):
    """The data folder lacks data for an experiment. The message names the path, and
    the data to put there.
    """


@dataclass(frozen=True)
class Variant:
    """A model of the EDJE paper.

    Attributes:
        tower: name of the towers, a key of `TOWERS`.
        tokens: stored tokens per image; ignored by the adapter "local".
        language: name of the language model, a key of `LANGUAGES`.
        distilled: True if the model is distilled from the local model with the same
            towers; ignored by the adapter "local".
        miner: name of the towers whose embeddings mine hard negatives; None means
            `tower`.
        settings: additional settings of `edje-index train`, in the form
            GROUP.KEY=VALUE.
    """

    tower: str = MAIN_TOWER
    adapter: str = "compressed"
    tokens: int = 64
    language: str = MAIN_LANGUAGE
    distilled: bool = True
    miner: str | None = None
    settings: Sequence[str] = ()


LOCAL = Variant(adapter="local")
"""The uncompressed model, which is the teacher of the other models."""


@dataclass
class Study:
    """Makes each model, index and evaluation of the experiments once.

    A step runs an `edje-index` command in a folder of its own and stores the command's
    report there. Experiments share steps, and an interrupted study continues after the
    last finished step. If `model` is given, it is used as the main towers and as the
    compressed model with 64 tokens, and no model is trained. `say` receives one line of
    text per step. The other arguments are options of `edje-index bench paper`.
    """

    data: Path
    out: Path
    say: Say
    config: Path | None = None
    listing: bool = False
    model: Path | None = None
    _listed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # The paths are made absolute, because the arguments of a command identify its
        # step. The study then finds its finished steps from any working directory.
        for name in ("data", "out", "config", "model"):
            path = getattr(self, name)
            setattr(self, name, path and path.absolute())

    @property
    def folder(self) -> Path:
        """Directory with the folder of each step."""
        return self.out / "steps"

    def captions(self, part: str) -> tuple[list[Path], Path, str | None]:
        """Return the caption files, the base directory of their images, and the split
        to read. The split is None if all images are read.

        Args:
            part: a training phase, "pretrain" or "finetune", or the test data of a
                benchmark, "flickr" or "coco".

        Raises:
            MissingDataError: the files are missing. The methods below also raise this
                error.
        """
        if part == "pretrain":
            folder = self.data / "pretrain"
            kinds = (".jsonl", ".json", ".parquet", ".tar")
            files = sorted(path for path in folder.glob("*") if path.suffix in kinds)
            if not files:
                raise MissingDataError(
                    f"{folder} has no caption files; put the caption files of the"
                    " pre-training images there"
                )
            return files, folder, None
        name = "coco"
        images = "."
        if part == "flickr":
            name = "flickr30k"
            images = "flickr30k-images"
        folder = self.data / name
        file = folder / f"dataset_{name}.json"
        if not file.is_file():
            raise MissingDataError(
                f"{file} is missing; put the Karpathy split file there"
            )
        return [file], folder / images, "train" if part == "finetune" else "test"

    def tower(self, name: str) -> Path:
        """Return the path of the bundle with the towers `name`, a key of `TOWERS`."""
        if self.model is not None and name == MAIN_TOWER:
            return self.model
        path = self.data / "towers" / name
        if not path.is_dir():
            remedy = f"edje-index model get {TOWERS[name]} --out {path}"
            raise MissingDataError(
                f"{path} is missing; make this bundle with `{remedy}`"
            )
        return path

    def command(self, name: str, *arguments: object) -> tuple[Path, Report]:
        """Run `edje-index ARGUMENTS --json`, or read the stored report if this command
        has run before.

        The name of the step's folder begins with `name`. `OUT` in the arguments means
        this folder.

        Returns:
            The folder, and the report that the command printed. The report is empty if
            commands are only listed.

        Raises:
            EdjeError: the command failed.
        """
        template = [str(argument) for argument in arguments]
        # The digest must not depend on the directory of the steps, so that a study can
        # be moved.
        portable = [
            argument.replace(str(self.folder), "{steps}") for argument in template
        ]
        digest = hashlib.sha256(json.dumps([name, portable]).encode()).hexdigest()
        folder = self.folder / f"{name}-{digest[:12]}"
        stored = folder / "report.json"
        report: Report = {}
        if stored.exists():
            report = json.loads(stored.read_bytes())
            return folder, report
        command = [argument.replace(OUT, str(folder)) for argument in template]
        line = shlex.join(["edje-index", *command])
        if line not in self._listed:
            self.say(line)
        self._listed.add(line)
        if not self.listing:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                report = run_command(*command)
            except EdjeError as error:
                raise EdjeError(
                    f"{error}: fix the cause in the output above and run the study"
                    f" again, which keeps finished steps; the command was: {line}"
                ) from None
            write_bytes_atomic(stored, json.dumps(report, indent=1).encode())
        return folder, report

    def trained(self, variant: Variant, phase: str = "pretrain") -> Path:
        """Return the bundle of a model after the training phase `phase`, and train it
        if necessary. The phase "finetune" follows "pretrain" and uses COCO.
        """
        if self.model is not None:
            if variant == Variant():
                return self.model
            raise MissingDataError(f"it is another model than {self.model}")
        # If data are missing, this raises an error before anything is computed.
        self.captions(phase)
        if phase == "pretrain":
            language = self.data / "languages" / variant.language
            if not language.is_dir():
                remedy = (
                    f"download {LANGUAGES[variant.language]} from the Hugging Face hub"
                )
                raise MissingDataError(f"{language} is missing; {remedy}")
            preset = "paper"
            settings = [f"inputs.language={language}"]
        else:
            preset = "paper-finetune"
            settings = [f"inputs.init={self.trained(variant)}"]
        # An adapter that selects or merges patches is trained on the reduced patches,
        # and any other adapter on all patches.
        keeps_patches = variant.adapter in ("compressed", LOCAL.adapter)
        features = self.command(
            "features",
            *("model", "features", self.tower(variant.tower), f"{OUT}/model"),
            *(() if keeps_patches else ("--adapter", variant.adapter)),
            *(() if keeps_patches else ("--tokens", variant.tokens)),
        )[0]
        data = self.build(features / "model", phase)[0]
        command: list[object] = ["train", data, "--preset", preset]
        command += ["--out", f"{OUT}/model"]
        # Unless there is --config, use the settings of the published run: 45 epochs in
        # the first phase and 5 in the second, in batches of 256 pairs (8 workers with
        # 32 pairs each).
        if self.config is not None:
            command += ["--config", self.config]
        else:
            epochs = 45 if phase == "pretrain" else 5
            settings += [f"loop.epochs={epochs}", "loop.batch_size=256"]
        settings += [
            f"architecture.adapter={variant.adapter}",
            f"architecture.tokens={variant.tokens}",
        ]
        if variant.miner:
            mined = self.build(self.tower(variant.miner), phase)[0]
            settings.append(f"inputs.miner={mined}")
        if variant.distilled and variant.adapter != LOCAL.adapter:
            teacher = self.trained(
                replace(LOCAL, tower=variant.tower, language=variant.language), phase
            )
            settings.append(f"inputs.teacher={teacher}")
            # The teacher reads the features of all patches. If the student is trained
            # on others, the tokens of the teacher come from an index that is built
            # with the teacher.
            if not keeps_patches:
                settings.append(
                    f"inputs.teacher_features={self.build(teacher, phase)[0]}"
                )
        command += [
            word
            for setting in (*settings, *variant.settings)
            for word in ("--set", setting)
        ]
        return self.command(phase, *command)[0] / "model"

    def build(
        self, bundle: Path, part: str, *, full: bool = False
    ) -> tuple[Path, Report]:
        """Index the images of `part`, with their captions. `part` has the values that
        `captions` describes. If `full` is True, index the images of all splits.

        Returns:
            The path of the index, and the report of the build.
        """
        files, base, split = self.captions(part)
        split = None if full else split
        images = self.folder / "lists" / f"{part}-{split or 'all'}.jsonl"
        if not images.exists():
            captions: dict[str, list[str]] = {}
            for file in files:
                for item in read_captions(file, base, split):
                    captions.setdefault(item.path, []).extend(item.captions)
            images.parent.mkdir(parents=True, exist_ok=True)
            lines = (
                json.dumps({"path": path, "captions": texts}) + "\n"
                for path, texts in captions.items()
            )
            write_bytes_atomic(images, "".join(lines).encode())
        out = f"{OUT}/images.edje"
        options = ("--model", bundle, "--out", out)
        folder, report = self.command("build", "build", images, *options)
        return folder / "images.edje", report

    def results(
        self,
        bundle: Path,
        benchmark: str,
        pool: int = POOL,
        *options: str,
        full: bool = False,
        score: str = "logit",
    ) -> list[Report]:
        """Index the test images of a benchmark, and evaluate a bundle on them.

        `benchmark` is "flickr" or "coco". The other arguments are options of
        `edje-index eval`.

        Returns:
            The list `results` of the report, which is empty if commands are only
            listed.
        """
        files, images, split = self.captions(benchmark)
        command: list[object] = [
            "eval",
            self.build(bundle, benchmark, full=full)[0],
            files[0],
            "--images",
            images,
        ]
        command += ["--split", split] if split else []
        command += [
            "--pool",
            pool,
            "--score",
            score,
            *options,
            *(["--full"] if full else []),
        ]
        results: list[Report] = self.command("eval", *command)[1].get("results", [])
        return results
