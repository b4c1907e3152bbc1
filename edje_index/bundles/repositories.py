"""Finds the files of models that are not bundles, on this machine or in a repository of
the Hugging Face Hub, ``hf://ORG/REPO[@REVISION][/PATH]``.

Downloads go through ``huggingface_hub`` into its cache, which other programs share. Its
environment variables apply: ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and
``HF_TOKEN``. Only weights, JSON and text files are downloaded. Each downloaded file is
compared with the hash that the Hub reports for it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.models.safety import read_configuration
from storage_formats.atomic import Json
from storage_formats.errors import EdjeError
from storage_formats.extras import name_missing_extra
from storage_formats.format.index_files import relative_path
from storage_formats.remote.urls import HUB_CREDENTIALS, hub_address, hub_kind

Say = Callable[[str], None]
"""Function that gets a line of text for the user before a download starts."""


def silent(text: str) -> None:
    """Show nothing to the user."""


_TEXT_SUFFIXES = (".json", ".txt", ".model")
# suffixes of weights files, the most preferred first
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
# pattern of the end of the name of a shard of weights, without the file suffix
_SHARD = re.compile(r"-\d+-of-(\d+)$")
# beginnings of the names of files that training code saves beside the weights
_OTHER_STATES = ("optimizer", "rng_state", "scheduler", "training_args")


@dataclass(frozen=True)
class Source:
    """Files of a model.

    Attributes:
        folder: directory of the files.
        label: name of the source for messages. For a repository, it contains the
            commit.
        names: names of the files, relative to `folder`.
        file: name of the weights file, if the user named a file; None if `weights`
            chooses the file.
    """

    folder: Path
    label: str
    names: list[str] = field(repr=False)
    file: str | None = None

    def weights(self) -> list[Path]:
        """Return the weights files: one, or all shards of a sharded file.

        Raises:
            ModelError: there is no weights file, there are several, or a shard is
                missing.
        """
        files = [self.file] if self.file else weights_among(self.names, self.label)
        if shard := _SHARD.search(PurePosixPath(files[0]).stem):
            whole = _whole(files[0])
            files = sorted(name for name in self.names if _whole(name) == whole)
            if len(files) != int(shard[1]):
                raise ModelError(
                    f"{self.label} has {len(files)} of the {int(shard[1])} shards of"
                    f" {whole}; copy the whole directory again"
                )
        return [self.folder / name for name in files]

    def config(self, name: str = "config.json") -> Json:
        """Return the content of a JSON file; empty if there is no such file."""
        return read_configuration(self.folder / name) if name in self.names else {}


def weights_among(names: Iterable[str], label: str) -> list[str]:
    """Return the name of the weights file among `names`, or the names of all shards of
    a sharded file.

    safetensors files are preferred to files of ``torch.save``.

    Raises:
        ModelError: there is no weights file, or several could be meant. The message
            names the model by `label`.
    """
    names = [
        name
        for name in sorted(names)
        if "/" not in name and not name.startswith(_OTHER_STATES)
    ]
    for suffix in _WEIGHT_SUFFIXES:
        files = [name for name in names if name.endswith(suffix)]
        whole = [name for name in files if not _SHARD.search(PurePosixPath(name).stem)]
        usual = {"model.safetensors", "pytorch_model.bin"} & set(whole)
        if usual or len(whole) == 1:
            return sorted(usual) or whole
        if whole:
            raise ModelError(
                f"{label} has several files with weights ({', '.join(whole[:5])}); give"
                " the path of one of them"
            )
        if files:
            return files
    raise ModelError(
        f"{label} has no weights: none of its files ends with"
        f" {', '.join(_WEIGHT_SUFFIXES)}; its files are:"
        f" {', '.join(names[:20]) or 'none'}"
    )


def all_files(names: list[str], label: str) -> list[str]:
    """Return the names of the configurations, the tokenizers and the weights among
    `names`.
    """
    return [*text_files(names, label), *weights_among(names, label)]


def text_files(names: list[str], _label: str) -> list[str]:
    """Return the names of the configurations and the tokenizers among `names`."""
    return [name for name in names if name.endswith(_TEXT_SUFFIXES)]


def open_source(
    source: str | Path | Source,
    choose: Callable[[list[str], str], list[str]] = all_files,
    say: Say = silent,
) -> Source:
    """Return the files of a model. If `source` is a repository of the Hub, the files
    are downloaded.

    Args:
        source: path of a weights file, whose directory has the other files of the
            model; path of a directory; or a URL ``hf://ORG/REPO``. A `Source` is
            returned unchanged.
        choose: function that returns the names of the files to download, given the
            names of all files and the label of the source.
        say: receives a line before a download.

    Raises:
        HubUnreachableError: the Hub cannot be reached, and the files are not in its
            cache.
        ModelError: there is nothing at `source`, or a download is not what the Hub
            describes.
    """
    if isinstance(source, Source):
        return source
    if hub_kind(source) is not None:
        return _download(str(source), choose, say)
    path = Path(source)
    if path.is_file():
        siblings = [each.name for each in path.parent.iterdir() if each.is_file()]
        return Source(path.parent, path.name, siblings, path.name)
    if not path.is_dir():
        raise ModelError(
            f"there is no model at {path}; give a file, a directory or hf://ORG/REPO"
        )
    names = [
        each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()
    ]
    return Source(path, str(path), names)


def _download(
    url: str, choose: Callable[[list[str], str], list[str]], say: Say
) -> Source:
    with name_missing_extra():
        from huggingface_hub import (
            HfApi,
            constants,
            snapshot_download,
            try_to_load_from_cache,
        )

    if hub_kind(url) != "models":
        raise ModelError(f"{url} is no model; give a URL such as hf://ORG/REPO")
    try:
        _, repository, revision, path, _ = hub_address(url)
    except ValueError as error:
        raise ModelError(str(error)) from error
    endpoint = os.environ.get("HF_ENDPOINT")
    with hub_errors(f"cannot download {url}", remedy="demo"):
        try:
            info = HfApi(endpoint).model_info(
                repository, revision=revision, files_metadata=True
            )
        except Exception as error:
            if getattr(error, "response", None) is not None:
                raise
            try:
                # The empty list of patterns accepts a cache that contains only some of
                # the files.
                cached = snapshot_download(
                    repository,
                    revision=revision,
                    local_files_only=True,
                    allow_patterns=[],
                )
            except FileNotFoundError:
                raise error from None
            source = open_source(Path(cached, path))
            return replace(source, label=f"{repository}@{Path(cached).name[:12]}")
        try:
            files = {
                relative_path(each.rfilename): each for each in info.siblings or ()
            }
        except ValueError as error:
            raise ModelError(f"{url}: {error}; do not use this model") from error
        label = f"{repository}@{str(info.sha)[:12]}"
        # `prefix` is the directory that the URL names. If it names a file, it is the
        # directory of the file.
        is_file = path in files
        prefix = f"{path.rpartition('/')[0] if is_file else path}/".lstrip("/")
        names = [name.removeprefix(prefix) for name in files if name.startswith(prefix)]
        file = path.removeprefix(prefix) if is_file else None
        chosen = choose(names, label)
        if file is not None:
            shards = [name for name in names if _whole(name) == _whole(file)]
            chosen = [*text_files(names, label), *shards]
        if not chosen:
            raise ModelError(f"{url} has no files of a model; give another repository")
        of_hub = {prefix + name: files[prefix + name] for name in chosen}
        size = sum(
            expected.size or 0
            for name, expected in of_hub.items()
            if try_to_load_from_cache(repository, name, revision=info.sha) is None
        )
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(cache).free):
            raise ModelError(
                f"{label} has {size} bytes, but {cache} has only {free} free bytes: set"
                " HF_HOME to a directory on a larger disk"
            )
        if size:
            say(f"downloading {label} from the Hugging Face Hub ({size / 1e6:,.1f} MB)")
        snapshot = Path(
            snapshot_download(
                repository,
                revision=revision,
                endpoint=endpoint,
                allow_patterns=[glob.escape(name) for name in of_hub],
            )
        )
        if snapshot.name != info.sha:
            raise ModelError(
                f"{url} has changed during the download; run this again, or give a"
                " commit as hf://ORG/REPO@COMMIT"
            )
        for name, expected in of_hub.items():
            _check_content(snapshot / name, expected, f"{name} of {label}")
        return Source(snapshot / prefix, label, chosen, file)


def _check_content(file: Path, expected: Any, label: str) -> None:
    """Compare a downloaded file with the hash that the Hub reports for it. If the
    hashes differ, remove the file from the cache, and raise ModelError.
    """
    if expected.lfs is not None:
        wanted = expected.lfs.sha256
        new_hash = hashlib.sha256
    else:
        # The Hub reports the Git hash of a file that is not in Git LFS: the SHA-1 of
        # this header and the content.
        wanted = expected.blob_id
        new_hash = partial(hashlib.sha1, b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, new_hash)
    if digest.hexdigest() != wanted:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        raise ModelError(
            f"{label} is not the file that the Hub describes, because its hash differs;"
            " download the model again, and check HF_ENDPOINT and the proxy"
        )


@contextmanager
def hub_errors(action: str, remedy: str | None = None) -> Iterator[None]:
    """Convert the exceptions of ``huggingface_hub`` to ModelError. The message begins
    with `action` and says what to do.

    If the Hub cannot be reached, the error is a HubUnreachableError with this `remedy`,
    which `EdjeError` explains.
    """
    try:
        yield
    except EdjeError:
        raise
    except Exception as error:
        # The response is read by attribute names, because versions of huggingface_hub
        # use different HTTP libraries with different exceptions.
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        kind: type[ModelError] = ModelError
        if status in (401, 403, 404):
            advice = f"check the name of the repository; {HUB_CREDENTIALS}"
        else:
            kind = HubUnreachableError
            advice = (
                "check the network, and HF_ENDPOINT and HF_HUB_OFFLINE if they are set;"
                " then run this again, which continues the transfer"
            )
        if kind is ModelError:
            remedy = None
        raise kind(f"{action}: {reason[:300]}; {advice}", remedy=remedy) from error


def _whole(name: str) -> str:
    """Return `name` without the shard number, which is the same for all shards of a
    file. The name of a file that is not sharded is returned unchanged.
    """
    path = PurePosixPath(name)
    return str(path.with_name(f"{_SHARD.sub('', path.stem)}{path.suffix}"))
