"""The tables and figures of the EDJE paper, how each of their rows is measured, and
the steps that they consist of: train, fine-tune, index and evaluate.

`published.toml` has the titles, the columns, the published values, and the model of
each row.

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
import math
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.numpy import load_file

from benchmarks import fetch
from benchmarks.harness import READER, Report, Say, select
from edje_index.bundles.info import JOINT_WEIGHTS
from edje_index.captions.reading import read_captions
from edje_index.evaluation.recall import Estimate
from edje_index.evaluation.report import table
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError

Values: TypeAlias = Sequence[float | Estimate | None]
"""Measured values of a row, in the order of the columns. None is an unknown value.
Unknown values at the end can be left out.
"""
EXPERIMENTS: Mapping[str, Report] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text()
)
"""The experiments of `bench paper`, by name."""
OF_A_MODEL = ("zero-shot", "prior-art", "pool-size", "quantization")
"""The experiments in which a trained model can be measured without further training."""
_DIRECTIONS = ("t2i", "i2t")
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
# number of pairs, or of images, in a timed batch, as in the paper
_BATCH = 64
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

    @property
    def folder(self) -> Path:
        """Directory with the folder of each step."""
        return self.out / "steps"

    def images(self, part: str, *, full: bool = False) -> Path:
        """Write a list of images with their captions, as a source of `edje-index
        build`, and return its path.

        Args:
            part: a training phase, "pretrain" or "finetune", or the test data of a
                benchmark, "flickr" or "coco".
            full: list the images of all splits.

        Raises:
            MissingDataError: the caption files are missing. The methods below also
                raise this error.
        """
        split = None
        if part == "pretrain":
            base = self.data / part
            kinds = (".jsonl", ".json", ".parquet", ".tar")
            files = sorted(path for path in base.glob("*") if path.suffix in kinds)
            if not files:
                raise MissingDataError(
                    f"{base} has no caption files; put the caption files of the"
                    " pre-training images there"
                )
        else:
            folder = self.data / "coco"
            base = folder
            if part == "flickr":
                folder = self.data / "flickr30k"
                base = folder / "flickr30k-images"
            files = [folder / f"dataset_{folder.name}.json"]
            if not files[0].is_file():
                raise MissingDataError(
                    f"{files[0]} is missing; put the Karpathy split file there"
                )
            if not full:
                split = "train" if part == "finetune" else "test"
        out = self.folder / "images" / f"{part}-{split or 'all'}.jsonl"
        if not out.exists():
            rows: dict[str, Report] = {}
            for file in files:
                for item in read_captions(file, base, split):
                    row: Report = {"path": item.path, "split": item.split}
                    row = rows.setdefault(item.path, row | {"captions": []})
                    row["captions"] += item.captions
            out.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(row) + "\n" for row in rows.values())
            write_bytes_atomic(out, "".join(lines).encode())
        return out

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
        if stored.exists():
            return folder, json.loads(stored.read_bytes())
        report: Report = {}
        command = [argument.replace(OUT, str(folder)) for argument in template]
        line = shlex.join(["edje-index", *command])
        if line not in self._listed:
            self.say(line)
        self._listed.add(line)
        if not self.listing:
            folder.mkdir(parents=True, exist_ok=True)
            words = [sys.executable, "-m", "pipelines.cli", *command, "--json"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise EdjeError(
                    f"edje-index {command[0]} ended with exit code {done.returncode}:"
                    " fix the cause in the output above and run the study again, which"
                    f" keeps finished steps; the command was: {line}"
                )
            report = json.loads(done.stdout)
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
        self.images(phase)
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
        reduction = ("--adapter", variant.adapter, "--tokens", variant.tokens)
        features = self.command(
            "features",
            *("model", "features", self.tower(variant.tower), f"{OUT}/model"),
            *(() if keeps_patches else reduction),
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
        """Index the images of `part`, with their captions. The arguments `part` and
        `full` are those of `images`.

        Returns:
            The path of the index, and the report of the build.
        """
        out = f"{OUT}/images.edje"
        options = ("--model", bundle, "--out", out)
        images = self.images(part, full=full)
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
        index = self.build(bundle, benchmark, full=full)[0]
        command = ["eval", index, "--pool", pool, "--score", score, *options]
        # All images of the index are candidates, but only test images are queries.
        command += ["--full", "--split", "test"] if full else []
        results: list[Report] = self.command("eval", *command)[1].get("results", [])
        return results


def run_experiments(names: Sequence[str], study: Study) -> dict[str, Report]:
    """Run experiments and write their tables to the folder of the study. Return the
    tables by name.
    """
    reports = {}
    for name in names:
        reports[name] = measured(EXPERIMENTS[name], study)
        if not study.listing:
            text = "\n".join([*table_lines(reports[name]), ""])
            write_bytes_atomic(study.out / f"{name}.md", text.encode())
    return reports


def measured(experiment: Report, study: Study) -> Report:
    """Measure all rows of an experiment.

    Returns:
        The table as a JSON object. If a row cannot be measured because data are
        missing, the key `missing` of the row names these data. Of the rows that have a
        measurement, all have values if `state` is "complete", some if it is "partial",
        and none if it is "needs data".
    """
    columns = experiment["columns"]
    rows = []
    has_values = []
    for label, options in experiment["rows"].items():
        values: Values = ()
        missing = None
        arguments = dict(options)
        published = arguments.pop("paper")
        if "model" in arguments:
            variant = Variant(**arguments.pop("model"))
            try:
                values = _MEASURES[experiment["measure"]](study, variant, **arguments)
            except MissingDataError as error:
                missing = str(error)
            has_values.append(any(value is not None for value in values))
        own = dict(zip(columns, values, strict=False))
        estimates = {
            column: value
            for column, value in own.items()
            if isinstance(value, Estimate)
        }
        rows.append(
            {
                "label": label,
                "own": own | {name: each.value for name, each in estimates.items()},
                "intervals": {
                    name: each.bounds
                    for name, each in estimates.items()
                    if each.low is not None
                },
                "paper": {
                    column: value
                    for column, value in zip(columns, published, strict=False)
                    if not math.isnan(value)
                },
                "missing": missing,
            }
        )
    state = "needs data"
    if any(has_values):
        state = "complete" if all(has_values) else "partial"
    return {"notes": (), **experiment, "state": state, "rows": rows}


def table_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"## {report['title']}"
    yield ""
    yield (
        f"{report['source']}. Each cell: measured value [95 % interval] (published"
        " value)."
    )
    yield ""
    rows = report["rows"]
    lines = [
        [row["label"], *(_cell(row, column) for column in report["columns"])]
        for row in rows
    ]
    yield from table(("", *report["columns"]), lines)
    yield ""
    yield from (f"- {note}" for note in report["notes"])
    # Several rows can lack the same data. Only the first of these rows is named.
    missing = {row["missing"]: row["label"] for row in reversed(rows) if row["missing"]}
    yield from (
        f"- {label} was not measured: {text}" for text, label in missing.items()
    )


def _cell(row: Report, column: str) -> str:
    own = row["own"].get(column)
    text = "-"
    if own is not None:
        text = f"{own:,.1f}" if abs(own) >= 1 else f"{own:.3g}"
    if column in row["intervals"]:
        text += " [{:.1f}, {:.1f}]".format(*row["intervals"][column])
    if column in row["paper"]:
        text += f" ({row['paper'][column]:.4g})"
    return text


def _select(
    results: Sequence[Report],
    cutoffs: Sequence[int] = (1, 5, 10),
    pool: int | None = POOL,
    precision: str | None = "bf16",
) -> list[Estimate | None]:
    """Return the recalls in percent, first from text to image and then from image to
    text; None for a recall that `results` do not contain.

    `pool` and `precision` are None for the embeddings alone, without re-ranking.
    """
    wanted = (pool, precision)
    recalls = {
        result["direction"]: result["recall"]
        for result in results
        if (result.get("pool"), result.get("precision")) == wanted
    }
    return [
        Estimate(**recalls[direction][str(cutoff)]) if direction in recalls else None
        for direction in _DIRECTIONS
        for cutoff in cutoffs
    ]


def _recalls(
    study: Study,
    variant: Variant,
    pool: int = POOL,
    cutoffs: Sequence[int] = (1, 5, 10),
) -> Values:
    """Return the recalls on Flickr30k after the first training phase. If `pool` is 0,
    return the recalls of the embeddings alone.
    """
    if pool:
        results = study.results(study.trained(variant), "flickr", pool)
        return _select(results, cutoffs, pool)
    results = study.results(study.tower(variant.tower), "flickr", score="embedding")
    return _select(results, cutoffs, None, None)


def _first_hits(study: Study, variant: Variant, pool: int = POOL) -> Values:
    """Return R@1 of both directions, first on Flickr30k after the first training phase,
    then on COCO after the second phase. If `pool` is 0, return R@1 of the embeddings
    alone on Flickr30k.
    """
    flickr = _recalls(study, variant, pool, (1,))
    if not pool:
        return flickr
    coco = study.results(study.trained(variant, "finetune"), "coco")
    return [*flickr, *_select(coco, (1,))]


def _prior_art(study: Study, variant: Variant) -> Values:
    recalls = _first_hits(study, variant)
    tokens, width = _block_shape(study, variant)
    rows = _search(study, variant)
    vision = _vision_milliseconds(study, variant)
    # There is no report if commands are only listed.
    if not rows:
        return recalls
    # The last row of this batch size is that of the largest number of threads.
    *_, scored = (row for row in rows if row["case"].startswith(f"batch {_BATCH},"))
    milliseconds = _BATCH / scored["values"]["pairs/s"] * 1e3
    size = 2 * tokens * width / 1000
    weights = load_file(study.trained(variant) / JOINT_WEIGHTS).values()
    millions = sum(tensor.size for tensor in weights) / 1e6
    return [*recalls, size, millions, milliseconds, vision]


def _stages(study: Study, variant: Variant) -> Values:
    vision = _vision_milliseconds(study, variant)
    for row in select(_search(study, variant), table="one query"):
        values = row["values"]
        score = values["joint_encoder ms"] + values.get("other_parts ms", 0.0)
        names = ("text_tower ms", "nearest ms", "fetch ms")
        return [*(values[name] for name in names), score, vision]
    return ()


def _search(study: Study, variant: Variant) -> list[Report]:
    bundle = study.trained(variant)
    index = study.build(bundle, "flickr")[0]
    options = ("--model", bundle, "--pool", _BATCH, "--only", "rerank")
    report = study.command("search", "bench", "search", index, *options)[1]
    rows: list[Report] = report.get("rows", [])
    return rows


def _quantized(study: Study, variant: Variant, precision: str) -> Values:
    options = [word for name in _PRECISIONS for word in ("--precision", name)]
    results = study.results(study.trained(variant), "flickr", POOL, *options)
    sizes = (
        each["bytes_per_image"] / 1000
        for each in results
        if each.get("precision") == precision
    )
    recall = _select(results, (1,), POOL, precision)[0]
    return [recall, next(sizes, None)]


def _aligned(study: Study, variant: Variant) -> Values:
    local, compressed = (
        study.build(study.trained(each), "flickr")[0] for each in (LOCAL, Variant())
    )
    options = ["--captions", study.images("flickr"), "--against", compressed]
    tokens, _ = _block_shape(study, variant)
    report = study.command(
        "explain", "explain", local, *options, "--out", f"{OUT}/explain.html"
    )[1]
    if not report:
        return ()
    alignment = report["alignment"]
    scores = alignment["first" if variant == LOCAL else "second"]
    effect = None if variant == LOCAL else alignment["test"]["effect_size"]
    return [tokens, scores["mean"], scores["deviation"], effect]


def _block_shape(study: Study, variant: Variant) -> list[Any]:
    shape: list[Any] = study.command("show", "info", study.trained(variant))[1].get(
        "block_shape", [None] * 2
    )
    return shape


def _full(study: Study, variant: Variant, dataset: str) -> Values:
    phase = "pretrain" if dataset == "flickr" else "finetune"
    bundle = study.trained(variant, phase)
    results = study.results(bundle, dataset, 100, full=True)
    return _select(results, (5, 10, 20), 100)


def _fetch(study: Study, _variant: Variant) -> Values:
    make = f"bench make-synthetic {OUT}/random.edje --rows {fetch.PAPER.rows}"
    index = study.command("synthetic", *make.split())[0] / "random.edje"
    options = ["--pool", fetch.PAPER.pool]
    report = study.command("fetch", "bench", "fetch", index, *options)[1]
    rates = {
        row["table"]: row["values"].get("GB/s")
        for row in select(report.get("rows", []), subject=READER, case="cold")
    }
    contiguous = fetch.PAPER._replace(is_contiguous=True)
    return [rates.get(workload.title) for workload in (contiguous, fetch.PAPER)]


def _vision_milliseconds(study: Study, variant: Variant) -> float | None:
    """Return the milliseconds that the vision tower and the adapter take for 64 images.
    Return None if commands are only listed.
    """
    report = study.build(study.trained(variant), "flickr")[1]
    if not report:
        return None
    seconds = report["stage_seconds"]["encode"]
    return float(1e3 * _BATCH * seconds / report["indexed"])


_MEASURES: Mapping[str, Callable[..., Values]] = {
    "prior_art": _prior_art,
    "recalls": _recalls,
    "first_hits": _first_hits,
    "quantized": _quantized,
    "aligned": _aligned,
    "full": _full,
    "fetch": _fetch,
    "stages": _stages,
}
