"""Finds the captions, images, towers and language models for the experiments of the EDJE paper.

Full data in the data folder:

    pretrain/                             caption files of CC12M, CC3M, SBU, Visual Genome and COCO, and their images
    flickr30k/dataset_flickr30k.json      Karpathy split file with captions
    flickr30k/flickr30k-images/           images
    coco/dataset_coco.json                Karpathy split file with captions
    coco/train2014/, coco/val2014/        images
    towers/NAME/                          bundles that `edje-index model from-open-clip` wrote
    languages/NAME/                       folders of language models from the Hugging Face hub

Small data in the data folder: images of Flickr8k with `flickr8k/captions_train.jsonl` and
`flickr8k/captions_dev.jsonl`, and the language model `weights/minilm_l6_h384`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edje_index.captions.reading import read_captions

TOWERS: Mapping[str, str] = {
    "clip-b16-224": "ViT-B-16:openai",
    "clip-l14-224": "ViT-L-14:openai",
    "clip-l14-336": "ViT-L-14-336:openai",
    "dfn-l14-224": "ViT-L-14-quickgelu:dfn2b",
    "metaclip-l14-224": "ViT-L-14-quickgelu:metaclip_fullcc",
    "siglip2-b16-384": "ViT-B-16-SigLIP2-384:webli",
    "siglip2-l16-384": "ViT-L-16-SigLIP2-384:webli",
}
"""The towers of the paper, as open_clip names them."""

LANGUAGES: Mapping[str, str] = {
    "minilm-l12": "microsoft/MiniLM-L12-H384-uncased",
    "bert-base": "google-bert/bert-base-uncased",
}
"""The language models of the paper, as the Hugging Face hub names them."""

MAIN_TOWER = "siglip2-l16-384"
MAIN_LANGUAGE = "minilm-l12"


class MissingDataError(Exception):
    """The data folder lacks data for an experiment. The message names the path, and the data to put there."""


@dataclass(frozen=True)
class Captions:
    """Caption files, the base directory of their images, and an optional split.

    Attributes:
        files: paths of caption files.
        images: base directory of relative image paths.
        split: split to read; None reads all images.
    """

    files: tuple[Path, ...]
    images: Path
    split: str | None = None


@dataclass(frozen=True)
class FullData:
    """The full data of the EDJE paper. The module docstring lists the files.

    All methods raise MissingDataError if their files are missing.

    Attributes:
        root: the data folder.
        train_options: options of `edje-index train` in both training phases, for example `--config FILE`.
        pretrain_options: additional options of the first phase.
        finetune_options: additional options of the second phase.
        evaluation_options: options of `edje-index eval`.
        fetch_rows: rows of the index in the experiment `io-test`.
    """

    root: Path
    train_options: tuple[str, ...] = ()
    pretrain_options: tuple[str, ...] = ("--epochs", "10")
    finetune_options: tuple[str, ...] = ("--epochs", "5")
    evaluation_options: tuple[str, ...] = ()
    fetch_rows: int = 100_000

    def pretraining(self) -> Captions:
        """Return the captions of the first training phase."""
        folder = self.root / "pretrain"
        kinds = (".jsonl", ".json", ".parquet", ".tar")
        files = sorted(path for path in folder.iterdir() if path.suffix in kinds) if folder.is_dir() else []
        if not files:
            raise MissingDataError(
                f"{folder} has no caption files; put the caption files of the pre-training images there"
            )
        return Captions(tuple(files), folder)

    def finetuning(self) -> Captions:
        """Return the captions of the second training phase."""
        return self._karpathy("coco", "train")

    def benchmark(self, name: str) -> Captions:
        """Return the test captions of the benchmark "flickr" or "coco"."""
        return self._karpathy(name, "test")

    def tower(self, name: str) -> Path:
        """Return the path of a bundle; `name` is a key of `TOWERS`."""
        path = self.root / "towers" / name
        if not path.is_dir():
            remedy = f"edje-index model from-open-clip {TOWERS[name]} --out {path}"
            raise MissingDataError(f"{path} is missing; make this bundle with `{remedy}`")
        return path

    def language(self, name: str) -> Path:
        """Return the path of a language model; `name` is a key of `LANGUAGES`."""
        path = self.root / "languages" / name
        if not path.is_dir():
            raise MissingDataError(f"{path} is missing; download {LANGUAGES[name]} from the Hugging Face hub")
        return path

    def _karpathy(self, name: str, split: str) -> Captions:
        folder, file, images = {
            "flickr": ("flickr30k", "dataset_flickr30k.json", "flickr30k-images"),
            "coco": ("coco", "dataset_coco.json", "."),
        }[name]
        path = self.root / folder / file
        if not path.is_file():
            raise MissingDataError(f"{path} is missing; put the Karpathy split file there")
        return Captions((path,), self.root / folder / images, split)


_PHOTOS = 64  # largest number of images in a part of the small data
SMALL_MODEL = ("loop.batch_size=8", "architecture.language_layers=1", "architecture.adapter_hidden=64")


@dataclass(frozen=True)
class SmallData:
    """Parts of Flickr8k instead of the full data, to run every experiment within minutes.

    The results only show that an experiment runs. They do not show how good the method is. The attributes and methods
    of `FullData` have the same meaning here.

    Attributes:
        root: the data folder.
        model: bundle with the towers to use instead of the main towers of the EDJE paper.
        folder: folder for the caption files of the parts.
    """

    root: Path
    model: Path
    folder: Path
    train_options: tuple[str, ...] = ()
    pretrain_options: tuple[str, ...] = ("--steps", "8")
    finetune_options: tuple[str, ...] = ("--steps", "8")
    evaluation_options: tuple[str, ...] = ("--queries", "32", "--bootstrap", "0")
    fetch_rows: int = 2_000

    def pretraining(self) -> Captions:
        return self._part("train", "pretrain", half=0)

    def finetuning(self) -> Captions:
        return self._part("train", "finetune", half=1)

    def benchmark(self, name: str) -> Captions:
        return self._part("dev", name, half={"flickr": 0, "coco": 1}[name])

    def tower(self, name: str) -> Path:
        if name != MAIN_TOWER:
            raise MissingDataError(f"--small has no tower {name}, only {MAIN_TOWER}; use the full data")
        return self.model

    def language(self, name: str) -> Path:
        path = self.root / "weights" / "minilm_l6_h384"
        if name != MAIN_LANGUAGE:
            raise MissingDataError(f"--small has no language model {name}, only {MAIN_LANGUAGE}; use the full data")
        if not path.is_dir():
            raise MissingDataError(f"{path} is missing; put the language model MiniLM-L6-H384 there")
        return path

    def _part(self, source: str, name: str, *, half: int) -> Captions:
        """Write the first images of one half of a caption file to a new caption file.

        Args:
            source: "train" or "dev", the caption file to read.
            name: name of the new caption file.
            half: 0 for the first half, 1 for the second half.
        """
        file = self.root / "flickr8k" / f"captions_{source}.jsonl"
        if not file.is_file():
            raise MissingDataError(f"{file} is missing; put the captions of Flickr8k there")
        part = self.folder / f"{name}-{_PHOTOS}.jsonl"
        if not part.exists():
            items = read_captions(file)
            first = half * (len(items) // 2)
            items = items[first : first + min(_PHOTOS, len(items) // 2)]
            lines = [json.dumps({"image": item.path, "captions": item.captions}) + "\n" for item in items]
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(lines))
        return Captions((part,), self.root)
