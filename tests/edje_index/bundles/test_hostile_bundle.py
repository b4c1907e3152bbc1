"""Bundles from strangers: whatever their files say, loading them runs no code of theirs and asks no hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edje_index.errors import ModelError
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.safety import check_bundle_folder
from tests.command_line import environment

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertTokenizer
class Evil(BertTokenizer): pass
class EvilConfig(BertConfig): pass
"""
# Hashes are not compared: the author of a bundle writes its hashes too.
LOAD = """
import sys
from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
for bundle in sys.argv[1:]:
    try:
        ModelBundle.load(bundle, verify=False)
        print("loaded")
    except ModelError as error:
        print(f"ModelError: {error}")
"""


def change(file: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    edit(content)
    file.write_text(json.dumps(content))


def add_code(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL.format(marker=str(folder.parents[1] / "marker")))


def remote_tokenizer(bundle: Path) -> None:
    """The text tower's tokenizer is a Python file of the bundle, and the bundle says to trust it."""
    vision = bundle / "vision"
    options = {"hf_tokenizer_name": "evil", "tokenizer_kwargs": {"trust_remote_code": True}}
    change(vision / "open_clip_config.json", lambda content: content["model_cfg"]["text_cfg"].update(options))
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.EvilConfig"}}
    change(vision / "config.json", lambda content: content.update(model_type="evil", **auto_map))
    change(vision / "tokenizer_config.json", lambda content: content.update(tokenizer_class="Evil", **auto_map))
    add_code(vision)


def trusting_options(bundle: Path) -> None:
    options = {"hf_tokenizer_name": "evil", "tokenizer_kwargs": {"trust_remote_code": True}}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["text_cfg"].update(options))


def other_options(bundle: Path) -> None:
    options = {"tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["text_cfg"].update(options))


def auto_map_of_the_joint_encoder(bundle: Path) -> None:
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    change(bundle / "joint/tokenizer_config.json", lambda content: content.update(tokenizer_class="Evil", **auto_map))


def python_file(bundle: Path) -> None:
    add_code(bundle / "joint")


def kernel_from_the_hub(bundle: Path) -> None:
    change(bundle / "joint/config.json", lambda content: content.update(attn_implementation="evil/kernel"))


def other_tokenizer_class(bundle: Path) -> None:
    change(bundle / "joint/tokenizer_config.json", lambda content: content.update(tokenizer_class="RagTokenizer"))


def tower_from_the_hub(bundle: Path) -> None:
    tower = {"timm_model_name": "hf-hub:evil/tower"}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["vision_cfg"].update(tower))


def text_tower_from_the_hub(bundle: Path) -> None:
    tower = {"hf_model_name": "evil/text"}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["text_cfg"].update(tower))


def text_tower_that_wraps_a_hub_model(bundle: Path) -> None:
    text_tower_from_the_hub(bundle)
    (bundle / "vision/hf_text").mkdir()
    wrapped = {"model_type": "timm_wrapper", "architecture": "hf-hub:evil/tower"}
    change(bundle / "vision/hf_text/config.json", lambda content: content.update(wrapped))


CASES = {
    remote_tokenizer: "asks to run code ('auto_map'",
    trusting_options: "asks to run code ('trust_remote_code'",
    other_options: "'bpe_path', which is not accepted",
    auto_map_of_the_joint_encoder: "asks to run code ('auto_map'",
    python_file: "evil.py is code",
    kernel_from_the_hub: "asks to run code ('attn_implementation'",
    other_tokenizer_class: "'RagTokenizer', which is not accepted",
    tower_from_the_hub: "'hf-hub:evil/tower', not one of timm's architectures",
    text_tower_from_the_hub: "hf_text",
    text_tower_that_wraps_a_hub_model: "of type 'timm_wrapper'",
}


@pytest.fixture(scope="module")
def messages(tiny_bundle, tmp_path_factory):
    """What loading each hostile bundle prints, by case; and that none of their code ran."""
    folder = tmp_path_factory.mktemp("hostile")
    bundles = [Path(shutil.copytree(tiny_bundle, folder / case.__name__ / "bundle")) for case in CASES]
    for case, bundle in zip(CASES, bundles, strict=True):
        case(bundle)
    # Nothing listens on the discard port: a request to the hub would be named in the message.
    hub = {"HF_ENDPOINT": "https://localhost:9", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, bundles)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**environment(), **hub},
    )
    assert done.stderr == ""
    assert not list(folder.rglob("marker")), "code of a bundle ran"
    return dict(zip(CASES, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_hostile_bundle_is_refused_in_one_line(messages, case):
    assert messages[case].startswith("ModelError: ")
    assert CASES[case] in messages[case]


def test_a_bundle_lists_files_of_its_own_folder(tmp_path):
    for name in ("../weights.safetensors", "/etc/passwd", "vision/../../x"):
        with pytest.raises(ModelError, match="outside its folder"):
            check_bundle_folder(tmp_path, [name])


def test_tokenizers_with_code_are_refused_outside_of_bundles(tmp_path):
    """Without a bundle's check of its whole folder: a folder of a Hugging Face model."""
    change(tmp_path / "tokenizer_config.json", lambda content: content.update(auto_map={"AutoTokenizer": "evil.Evil"}))
    with pytest.raises(ModelError, match="asks to run code"):
        load_joint_tokenizer(tmp_path)
