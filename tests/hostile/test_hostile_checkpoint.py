"""Checkpoints from strangers: whatever is in them, reading one is one clear error in bounded memory and time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command_line import environment
from tests.edje_index.published_cases import Case, write_case

WORDS = "language_model.bert.embeddings.word_embeddings.weight"
POSITIONS = "language_model.bert.embeddings.position_embeddings.weight"


class Code:
    """Unpickling this makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


Edit = Callable[[Path], object]


def with_tensor(name: str, *shape: int) -> Edit:
    """Replace a tensor by one of `shape`. The file stores a single element of the new tensor."""

    def edit(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        content["model"][name] = torch.zeros(()).expand(shape)
        torch.save(content, path)

    return edit


def with_settings(name: str, **settings: object) -> Edit:
    """Set entries of a JSON file in the directory of the tokenizer."""

    def edit(path: Path) -> None:
        file = path.parent / "tokenizer" / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**content, **settings}))

    return edit


def with_code(path: Path) -> dict[str, object]:
    return {"model": {}, "config": Code(path.parent / "marker")}


def not_finite(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["model"]["text_projection.bias"][0] = float("nan")
    torch.save(content, path)


def compressed(path: Path) -> None:
    """A small compressed member that takes 1.3 GB."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, bytes(5 << 28) if name.endswith("/data/0") else content)


REFUSED, TOO_LARGE = "refused to read", "larger model than"
DEEP_LISTS = b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."
CASES: dict[str, tuple[Edit, str]] = {
    "code": (lambda path: torch.save(with_code(path), path), REFUSED),
    "code in a plain pickle": (lambda path: path.write_bytes(pickle.dumps(with_code(path))), REFUSED),
    "code of the tokenizer": (
        with_settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        "names code ('auto_map'",
    ),
    "many words": (with_tensor(WORDS, 10**12, 16), TOO_LARGE),
    "many positions": (with_tensor(POSITIONS, 10**12, 16), TOO_LARGE),
    "wide head": (with_tensor("text_projection.weight", 10**12, 16), TOO_LARGE),
    "wide adapter": (with_tensor("vision_projection.mlp.fc1.weight", 10**12, 24), TOO_LARGE),
    "tensors without dimensions": (with_tensor(WORDS), ""),
    "deep language model": (with_settings("config.json", num_hidden_layers=10**9), TOO_LARGE),
    "not finite": (not_finite, "the tensor text_projection.bias of the joint encoder of"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
    "enormous": (lambda path: os.truncate(path, 64 << 30), ""),
    "FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "no checkpoint file"),
    "compressed": (compressed, ""),
    "deep lists": (lambda path: path.write_bytes(DEEP_LISTS), ""),
}
"""An edit of a checkpoint, and a part of the message that refuses it."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of reading each checkpoint, by case; and that none of their code ran."""
    folder = tmp_path_factory.mktemp("checkpoints")
    edits = [*(edit for edit, _ in CASES.values()), lambda path: None]
    paths = [folder / str(number) / "checkpoint.pth" for number in range(len(edits))]
    for path, edit in zip(paths, edits, strict=True):
        write_case(path.parent, Case())
        edit(path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.load_model", "checkpoint", *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=500,
        env={**environment(), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert not list(folder.rglob("marker")), "code of a checkpoint ran"
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert outcomes.pop() == {"checkpoint": "loaded"}, "the last is unchanged"
    return dict(zip(CASES, outcomes, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused_in_one_line(outcomes, case):
    assert set(outcomes[case]) == {"checkpoint"}, outcomes[case]
    message = outcomes[case]["checkpoint"]
    assert message.startswith("ModelError: ")
    assert CASES[case][1] in message
    assert "\n" not in message
