"""Bundles and checkpoints from strangers: loading one is one clear error in bounded
memory and time.

It runs no code of theirs and asks no hub.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edje_index.bundles import info
from edje_index.errors import ModelError
from edje_index.models.joint_inputs import load_joint_tokenizer
from tests.command_line import environment
from tests.edje_index.published_cases import Case, write_case

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertTokenizer
class Evil(BertTokenizer): pass
class EvilConfig(BertConfig): pass
"""


VISION = "vision/open_clip_config.json"
JOINT = "joint/config.json"
AUTO_MAP = {
    "auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.EvilConfig"}
}
TRUSTING = {
    "hf_tokenizer_name": "evil",
    "tokenizer_kwargs": {"trust_remote_code": True},
}
TEXT_TOWER = {"hf_model_name": "evil/text"}
WRAPPED = {"model_type": "timm_wrapper", "architecture": "hf-hub:evil/tower"}


def change(file, *keys, **values):
    """Set entries of the JSON object below `keys` in a file, which is created if it
    is missing.
    """
    content = json.loads(file.read_text()) if file.exists() else {}
    part = content
    for key in keys:
        part = part[key]
    part.update(values)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def sized(name, *keys, **values):
    return lambda bundle: change(bundle / name, *keys, **values)


def add_code(folder):
    (folder / "evil.py").write_text(
        EVIL.format(marker=str(folder.parents[1] / "marker"))
    )


def remote_tokenizer(bundle):
    """The text tower's tokenizer is a Python file of the bundle, and the bundle
    says to trust it.
    """
    change(bundle / VISION, "model_cfg", "text_cfg", **TRUSTING)
    change(bundle / "vision/config.json", model_type="evil", **AUTO_MAP)
    change(bundle / "vision/tokenizer_config.json", tokenizer_class="Evil", **AUTO_MAP)
    add_code(bundle / "vision")


def text_tower_that_wraps_a_hub_model(bundle):
    change(bundle / VISION, "model_cfg", "text_cfg", **TEXT_TOWER)
    change(bundle / "vision/hf_text/config.json", **WRAPPED)


CODE = {
    "remote tokenizer": (remote_tokenizer, "names code ('auto_map'"),
    "trusting options": (
        sized(VISION, "model_cfg", "text_cfg", **TRUSTING),
        "names code ('trust_remote_code'",
    ),
    "no options": (
        sized(VISION, "model_cfg", "text_cfg", tokenizer_kwargs=["clean"]),
        "not an open_clip configuration",
    ),
    "auto_map of the joint encoder": (
        sized("joint/tokenizer_config.json", tokenizer_class="Evil", **AUTO_MAP),
        "names code ('auto_map'",
    ),
    "Python file": (lambda bundle: add_code(bundle / "joint"), "evil.py is code"),
    "kernel from the hub": (
        sized(JOINT, attn_implementation="evil/kernel"),
        "names code ('attn_implementation'",
    ),
    "tower from the hub": (
        sized(VISION, "model_cfg", "vision_cfg", timm_model_name="hf-hub:evil/tower"),
        "names the timm model 'hf-hub:evil/tower'",
    ),
    "text tower that wraps a hub model": (
        text_tower_that_wraps_a_hub_model,
        "of type 'timm_wrapper'",
    ),
}
"""An edit of a bundle, and a part of the message that refuses it."""

TOO_LARGE = "the configuration describes a larger model than"
ALL = ("bundle", "encoder", "search")
BUNDLE = ("bundle",)
ENCODER = ("bundle", "encoder")
INFO = info.INFO_FILE
VISION_CFG = ("model_cfg", "vision_cfg")
SIZES = {
    "wide adapter": (sized(INFO, "adapter", hidden_dim=10**9), ENCODER, TOO_LARGE),
    "adapter of many tokens": (
        sized(INFO, "adapter", num_tokens=10**12),
        ENCODER,
        TOO_LARGE,
    ),
    "text as a size": (
        sized(INFO, "adapter", hidden_dim="wide"),
        ENCODER,
        "cannot build the model for the weights",
    ),
    "wide vision tower": (
        sized(VISION, *VISION_CFG, width=10**8, head_width=10**8),
        ENCODER,
        TOO_LARGE,
    ),
    "enormous images": (
        sized(VISION, *VISION_CFG, image_size=10**7),
        ENCODER,
        TOO_LARGE,
    ),
    "deep joint encoder": (sized(JOINT, num_hidden_layers=10**9), BUNDLE, TOO_LARGE),
    "wide head": (sized(INFO, "joint", text_embed_dim=10**12), BUNDLE, TOO_LARGE),
    "wide pooled similarity": (
        sized(INFO, "joint", pooled_similarity={"words": 10**9, "dim": 10**9}),
        ("bundle", "search"),
        TOO_LARGE,
    ),
}
"""An edit, the ways to load that must refuse the bundle, and a part of their
messages.
"""


def replaced(name, make):
    """Remove a file, and call `make` with its path."""
    return lambda bundle: ((bundle / name).unlink(), make(bundle / name))


def weights(header, length=None):
    """Replace the weights of the adapter by a header, which claims to have `length`
    bytes.
    """
    content = (len(header) if length is None else length).to_bytes(8, "little") + header
    return lambda bundle: (
        (bundle / "adapter.safetensors").write_bytes(content),
        sign(bundle),
    )


LARGE_TENSOR = {"query": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
FILES = {
    "FIFO for weights": (
        replaced("adapter.safetensors", os.mkfifo),
        ALL,
        "not a regular file",
    ),
    "device for a tokenizer": (
        replaced("joint/tokenizer.json", lambda path: path.symlink_to("/dev/zero")),
        ALL,
        "leads outside the directory",
    ),
    "link out of the bundle": (
        replaced("joint/tokenizer.json", lambda path: path.symlink_to(__file__)),
        ALL,
        "leads outside the directory",
    ),
    "list of files": (sized(INFO, files=[]), ALL, "is damaged"),
    "enormous tokenizer": (
        lambda bundle: os.truncate(bundle / "joint/tokenizer.json", 64 << 30),
        ALL,
        "too many for a file without",
    ),
    "deep description": (
        lambda bundle: (bundle / INFO).write_text("[" * 10**6),
        ALL,
        "cannot read",
    ),
    "deep tokenizer": (
        lambda bundle: (
            (bundle / "joint/tokenizer.json").write_text('{"model":' + "[" * 10**6),
            sign(bundle),
        ),
        ("bundle", "search"),
        "",
    ),
    "weights with a long header": (
        weights(b"{}", 2**60),
        ENCODER,
        "cannot read the weights",
    ),
    "weights with a large tensor": (
        weights(json.dumps(LARGE_TENSOR).encode()),
        ENCODER,
        "cannot read the weights",
    ),
}


def sign(bundle):
    """Write the hashes of the files as they are now: the author of a bundle does so
    too.
    """
    file = bundle / info.INFO_FILE
    content = json.loads(file.read_text())
    for name, entry in content["files"].items():
        path = bundle / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            entry.update(bytes=path.stat().st_size, sha256=info._sha256(path))
    content["fingerprint"] = info._stored_fingerprint(content)
    content["encoder_fingerprint"] = info.encoder_fingerprint(
        content["adapter"], content["files"]
    )
    file.write_text(json.dumps(content))


WORDS = "language_model.bert.embeddings.word_embeddings.weight"


class Code:
    """Unpickling this makes a directory."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def with_tensor(name, *shape):
    """Replace a tensor by one of `shape`. The file stores a single element of the
    new tensor.
    """

    def edit(path):
        content = torch.load(path, weights_only=True)
        content["model"][name] = torch.zeros(()).expand(shape)
        torch.save(content, path)

    return edit


def with_code(path):
    return {"model": {}, "config": Code(path.parent / "marker")}


def not_finite(path):
    content = torch.load(path, weights_only=True)
    content["model"]["text_projection.bias"][0] = float("nan")
    torch.save(content, path)


REFUSED = "refused to read"
DEEP_LISTS = b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."
CHECKPOINTS = {
    "code": (lambda path: torch.save(with_code(path), path), REFUSED),
    "code in a plain pickle": (
        lambda path: path.write_bytes(pickle.dumps(with_code(path))),
        REFUSED,
    ),
    "code of the tokenizer": (
        lambda path: change(
            path.parent / "tokenizer/tokenizer_config.json",
            auto_map={"AutoTokenizer": "evil.Evil"},
        ),
        "names code ('auto_map'",
    ),
    "many words": (with_tensor(WORDS, 10**12, 16), "is larger than its file"),
    "wide adapter of a checkpoint": (
        with_tensor("vision_projection.mlp.fc1.weight", 10**12, 24),
        "is larger than its file",
    ),
    "deep language model": (
        lambda path: change(
            path.parent / "tokenizer/config.json", num_hidden_layers=10**9
        ),
        TOO_LARGE,
    ),
    "not finite": (
        not_finite,
        "the tensor text_projection.bias of the joint encoder of",
    ),
    "enormous": (lambda path: os.truncate(path, 64 << 30), ""),
    "FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "there is no model at"),
    "deep lists": (lambda path: path.write_bytes(DEEP_LISTS), ""),
}
"""An edit of a checkpoint, and a part of the message that refuses it."""


def load_all(arguments, folder):
    """What each way to load each model gives, in a process that loads them all."""
    # Nothing listens on the discard port: a request to the hub would be named in the
    # message.
    hub = {"HF_ENDPOINT": "https://localhost:9", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.load_model", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=500,
        env={**environment(), **hub, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    # no code of a stranger ran
    assert not list(folder.rglob("marker"))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hostile_bundles_and_checkpoints_are_refused_in_one_line(tiny_bundle, tmp_path):
    """One test, because one process loads them all."""
    bundles = {**CODE, **SIZES, **FILES}
    arguments = []
    for case, (edit, *_) in {"sound": (lambda _: None,), **bundles}.items():
        bundle = Path(shutil.copytree(tiny_bundle, tmp_path / case / "bundle"))
        edit(bundle)
        if case not in FILES:
            sign(bundle)
        arguments += ["bundle", str(bundle)]
    write_case(tmp_path / "checkpoint", Case())
    for case, (edit, _) in {"": (lambda _: None, ""), **CHECKPOINTS}.items():
        folder = shutil.copytree(
            tmp_path / "checkpoint", tmp_path / f"checkpoint {case}"
        )
        edit(folder / "checkpoint.pth")
        arguments += ["checkpoint", str(folder / "checkpoint.pth")]
    outcomes = load_all(arguments, tmp_path)
    by_case = dict(zip(["sound", *bundles, "", *CHECKPOINTS], outcomes, strict=True))
    assert by_case.pop("sound") == dict.fromkeys(ALL, "loaded")
    assert by_case.pop("") == {"checkpoint": "loaded"}
    refused = {case: (BUNDLE, expected) for case, (_, expected) in CODE.items()}
    refused |= {case: each[1:] for case, each in {**SIZES, **FILES}.items()}
    refused |= {case: (("checkpoint",), each[1]) for case, each in CHECKPOINTS.items()}
    for case, (ways, expected) in refused.items():
        for way, message in by_case[case].items():
            if way not in ways and message == "loaded":
                continue
            assert message.startswith("ModelError: "), (case, way, message)
            assert "\n" not in message
            assert expected in message or way not in ways, (case, way, message)


def test_tokenizers_with_code_are_refused_outside_of_bundles(tmp_path):
    """Without a bundle's check of its whole folder: a folder of a Hugging Face
    model.
    """
    change(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": "evil.Evil"})
    with pytest.raises(ModelError, match="names code"):
        load_joint_tokenizer(tmp_path)
