"""Checkpoints from strangers: whatever is in them, reading one is one clear error in bounded memory and time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
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


def unchanged(path: Path) -> None:
    """The checkpoint that the others are made from."""


def code(path: Path) -> None:
    torch.save({"model": {}, "config": Code(path.parent / "marker")}, path)


def code_in_a_plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model": {}, "config": Code(path.parent / "marker")}))


def code_of_the_tokenizer(path: Path) -> None:
    file = path.parent / "tokenizer/tokenizer_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))


def with_tensor(path: Path, name: str, *shape: int) -> None:
    """Replace a tensor by one of `shape`. The file stores a single element of the new tensor."""
    content = torch.load(path, weights_only=True)
    content["model"][name] = torch.zeros(()).expand(shape)
    torch.save(content, path)


def many_words(path: Path) -> None:
    with_tensor(path, WORDS, 10**12, 16)


def many_positions(path: Path) -> None:
    with_tensor(path, POSITIONS, 10**12, 16)


def wide_head(path: Path) -> None:
    with_tensor(path, "text_projection.weight", 10**12, 16)


def wide_adapter(path: Path) -> None:
    with_tensor(path, "vision_projection.mlp.fc1.weight", 10**12, 24)


def tensors_without_dimensions(path: Path) -> None:
    with_tensor(path, WORDS)


def deep_language_model(path: Path) -> None:
    file = path.parent / "tokenizer/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 10**9}))


def not_finite(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["model"]["text_projection.bias"][0] = float("nan")
    torch.save(content, path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def enormous(path: Path) -> None:
    os.truncate(path, 64 << 30)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def compressed(path: Path) -> None:
    """A small compressed member that takes 1.3 GB."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, bytes(5 << 28) if name.endswith("/data/0") else content)


def deep_lists(path: Path) -> None:
    path.write_bytes(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".")


REFUSED = "refused to read"
CASES = {
    code: REFUSED,
    code_in_a_plain_pickle: REFUSED,
    code_of_the_tokenizer: "names code ('auto_map'",
    many_words: "larger model than",
    many_positions: "larger model than",
    wide_head: "larger model than",
    wide_adapter: "larger model than",
    tensors_without_dimensions: "",
    deep_language_model: "larger model than",
    not_finite: "the tensor text_projection.bias of the joint encoder of",
    truncated: "",
    enormous: "",
    fifo: "no checkpoint file",
    compressed: "",
    deep_lists: "",
}
"""A part of the message of each."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of reading each checkpoint, by case; and that none of their code ran."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = [*CASES, unchanged]
    for case in cases:
        write_case(folder / case.__name__, Case())
        case(folder / case.__name__ / "checkpoint.pth")
    paths = [str(folder / case.__name__ / "checkpoint.pth") for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.load_model", "checkpoint", *paths],
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
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


def test_the_checkpoint_that_the_others_are_made_from_is_read(outcomes):
    assert outcomes[unchanged] == {"checkpoint": "loaded"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_hostile_checkpoint_is_refused_in_one_line(outcomes, case):
    assert set(outcomes[case]) == {"checkpoint"}, outcomes[case]
    message = outcomes[case]["checkpoint"]
    assert message.startswith("ModelError: ")
    assert CASES[case] in message
    assert "\n" not in message
