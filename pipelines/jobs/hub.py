"""Copies of indexes and models to repositories of the Hugging Face Hub, and of models
from there.

An index in a repository is read through its URL like one on a web server, so
`copy_index` copies it from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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
from edje_index.errors import ModelError, NotABundleError
from pipelines.jobs.resources import check_free_disk
from pipelines.pages import render
from pipelines.progress.events import (
    OnEvent,
    Progress,
    ShouldStop,
    ignore,
    never,
    stop_at_events,
)
from pipelines.progress.wording import counted, human_bytes
from storage_formats.atomic import replacing, write_bytes_atomic
from storage_formats.errors import EdjeError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import (
    HUB_CREDENTIALS,
    IndexLocation,
    hub_address,
    hub_kind,
    local_path,
)

_CARD = "README.md"
_OURS = b"<!-- edje-index replaces this card"
# those that come from a URL are kept in memory
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
    """Send files to a repository of the Hub, in one commit. A repository that does not
    exist is created, and private.

    Args:
        kind: "datasets" for an index, "models" for a model.
        files: functions that return the path or the contents of each file, by name.
        on_event: called after a part of the files is sent. It may raise an error.
        is_removed: returns True for the name of a file of the repository that the
            commit removes.
        card: values that the card describes. A card that is not from this package is
            kept.

    Returns:
        The names of the files that were sent: those that the repository did not have,
        and small text files.
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
    # this function reports its progress itself
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    api = HfApi(
        server, token=headers.get("Authorization", "").removeprefix("Bearer ") or None
    )
    of_kind: Any = {
        "repo_id": repository.removeprefix("datasets/"),
        "repo_type": kind.removesuffix("s"),
    }
    of_branch: Any = {**of_kind, "revision": revision}
    try:
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
    except EdjeError:
        raise
    except Exception as error:
        # the HTTP library differs between versions of huggingface_hub
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        advice = (
            "check the network, and HF_ENDPOINT if it is set; then run the copy again,"
            " which continues it"
        )
        if status in (401, 403, 404):
            advice = f"check the name of the repository; {HUB_CREDENTIALS}"
        if status in (409, 412):
            advice = "another writer has changed the repository; run the copy again"
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise EdjeError(
            f"the copy to {url} failed: {reason[:300]}; {advice}"
        ) from error


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

    All files are compared with the hashes in ``bundle.json``. Call the function again
    to resume a stopped copy. The other arguments are those of `build_index`.

    Args:
        model: directory of the bundle, or its URL, for example `hf://OWNER/NAME` or
            `hf://OWNER/NAME@REVISION`.
        out: URL of a repository, which is created and private if it does not exist, or
            a new directory.

    Returns:
        The content of the ``bundle.json`` of the copy.

    Raises:
        UsageError: `out` exists, or an argument is not valid.
        ModelError: `model` is not a bundle, or a file is missing or differs from its
            hash.
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
    path = local_path(out)
    folder = ObjectFolder.open(str(model))
    if path.exists():
        raise UsageError(
            f"{path} exists already; give another path, or remove {path}",
            parameter="out",
        )
    try:
        description = folder.read(INFO_FILE, MAX_INFO_BYTES).data
    except FileNotFoundError as error:
        raise NotABundleError(
            f"there is no bundle at {model}; the URL of an index has datasets/ before"
            " OWNER"
        ) from error
    # A stopped copy leaves this directory, and a copy of the same bundle continues it.
    staging = path.with_name(
        f".{path.name}.{hashlib.sha256(description).hexdigest()[:16]}"
    )
    staging.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(staging / INFO_FILE, description)
    # refuses names that lead out of the directory
    info = read_bundle_info(staging)
    sizes = {name: int(file["bytes"]) for name, file in info.files.items()}
    check_free_disk(
        staging,
        {"files": sum(sizes.values())},
        f"a copy of {counted(len(sizes), 'file')}",
    )
    for done, (name, length) in enumerate(sizes.items(), 1):
        file = staging / name
        if not file.is_file() or file.stat().st_size != length:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with replacing(file) as opened:
                    opened.writelines(folder.chunks(name, length))
            except (EOFError, FileNotFoundError) as error:
                raise ModelError(
                    f"{model} lacks {name} or a part of it; copy the model there again"
                ) from error
        on_event(Progress("copying files", done, len(sizes)))
    # refuses code
    verify_files(read_bundle_info(staging))
    staging.rename(path)
    return read_bundle_info(path)
