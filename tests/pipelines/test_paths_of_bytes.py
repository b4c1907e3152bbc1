"""Paths that are not UTF-8 stay addresses, from the source to the page."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_formats import TokenStore, read_rows, verify_index

NAME = os.fsdecode(b"caf\xe9")
FOLDER = os.fsdecode(b"\xff")


def folder(photos: Path) -> str:
    return NAME


def archive(photos: Path) -> str:
    name = f"{NAME}.tar"
    with tarfile.open(name, "w") as tar:
        for path in sorted(photos.glob("*.jpg"))[:3]:
            tar.add(path, os.fsdecode(b"in\xe9/") + path.name)
    return name


def list_of_paths(photos: Path) -> str:
    name = f"{NAME}.txt"
    paths = sorted(Path(NAME).glob("0*.jpg"))[:3]
    Path(name).write_bytes(b"".join(os.fsencode(path) + b"\n" for path in paths))
    return name


def pattern(photos: Path) -> str:
    return f"{NAME}/0[0-2].jpg"


def one_file(photos: Path) -> str:
    return f"{NAME}/00.jpg"


@pytest.mark.parametrize("source", [folder, archive, list_of_paths, pattern, one_file])
def test_every_command_reads_and_writes_there(
    tmp_path: Path,
    photos: Path,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[int, str, str]],
    source: Callable[[Path], str],
) -> None:
    (tmp_path / FOLDER).mkdir()
    monkeypatch.chdir(tmp_path / FOLDER)
    shutil.copytree(photos, NAME)
    index = f"{NAME}.edje"
    inline = ("--engine", "inline", "--max-failed", "1")
    built: tuple[Any, ...] = ("build", source(photos), "--out", index)
    for command in (
        (*built, "--model", tiny_bundle, *inline),
        ("info", index),
        ("update", index, "--engine", "inline"),
        ("append", index, photos / "06.jpg", "--engine", "inline"),
        ("quantize", index, "--to", "fp8"),
        ("search", index, "a dog", "--html", f"{NAME}.html"),
        ("search", index, "--image", f"{NAME}/00.jpg"),
        ("delete", index, "--rows", 0),
        ("copy", index, f"{NAME}2.edje"),
        ("compact", f"{NAME}2.edje"),
        ("merge", index, f"{NAME}2.edje", "--out", f"{NAME}3.edje"),
        ("gc", index),
        ("history", index),
    ):
        code, out, err = run(*command, "--json")
        assert code == 0, (command, out, err)
        json.loads(out)
    for root in (index, f"{NAME}2.edje", f"{NAME}3.edje"):
        assert not verify_index(root)
        assert len(TokenStore.open(root))
    # people read text, programs the bytes
    uris = read_rows(f"{NAME}3.edje", columns=["uri", "uri_raw"]).to_pylist()
    bytes_of = {row["uri"]: row["uri_raw"] for row in uris}
    assert all(("%FF" in uri) == (raw is not None) for uri, raw in bytes_of.items())
    settings = json.loads(Path(index, "index.json").read_bytes())["settings"]
    assert NAME in settings["sources"][0]
