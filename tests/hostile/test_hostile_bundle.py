"""Bundles from strangers: whatever their files say, loading them is one clear error in bounded memory and time.

It runs no code of theirs and asks no hub.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edje_index.bundles import info
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


CODE = {
    remote_tokenizer: "names code ('auto_map'",
    trusting_options: "names code ('trust_remote_code'",
    other_options: "'bpe_path', which is not accepted",
    auto_map_of_the_joint_encoder: "names code ('auto_map'",
    python_file: "evil.py is code",
    kernel_from_the_hub: "names code ('attn_implementation'",
    other_tokenizer_class: "'RagTokenizer', which is not accepted",
    tower_from_the_hub: "names the timm model 'hf-hub:evil/tower'",
    text_tower_from_the_hub: "hf_text",
    text_tower_that_wraps_a_hub_model: "of type 'timm_wrapper'",
}


def adapter(**sizes: int) -> Callable[[dict], None]:
    return lambda content: content["adapter"].update(sizes)


def wide_adapter(bundle: Path) -> None:
    change(bundle / "bundle.json", adapter(hidden_dim=10**9))


def adapter_of_many_tokens(bundle: Path) -> None:
    change(bundle / "bundle.json", adapter(num_tokens=10**12))


def negative_adapter(bundle: Path) -> None:
    change(bundle / "bundle.json", adapter(hidden_dim=-4))


def text_as_a_size(bundle: Path) -> None:
    change(bundle / "bundle.json", lambda content: content["adapter"].update(hidden_dim="wide"))


def wide_vision_tower(bundle: Path) -> None:
    vision = {"width": 10**8, "head_width": 10**8}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["vision_cfg"].update(vision))


def deep_vision_tower(bundle: Path) -> None:
    vision = {"layers": 10**9}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["vision_cfg"].update(vision))


def enormous_images(bundle: Path) -> None:
    vision = {"image_size": 10**7}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["vision_cfg"].update(vision))


def long_texts(bundle: Path) -> None:
    text = {"context_length": 10**7}
    change(bundle / "vision/open_clip_config.json", lambda content: content["model_cfg"]["text_cfg"].update(text))


def wide_joint_encoder(bundle: Path) -> None:
    change(bundle / "joint/config.json", lambda content: content.update(hidden_size=10**8, num_attention_heads=1))


def deep_joint_encoder(bundle: Path) -> None:
    change(bundle / "joint/config.json", lambda content: content.update(num_hidden_layers=10**9))


def many_words(bundle: Path) -> None:
    change(bundle / "joint/config.json", lambda content: content.update(vocab_size=10**12))


def wide_head(bundle: Path) -> None:
    change(bundle / "bundle.json", lambda content: content["joint"].update(text_embed_dim=10**12))


def wide_pooled_similarity(bundle: Path) -> None:
    pooled = {"words": 10**9, "dim": 10**9}
    change(bundle / "bundle.json", lambda content: content["joint"].update(pooled_similarity=pooled))


TOO_LARGE = "the configuration describes a larger model than"
ALL, BUNDLE = ("bundle", "encoder", "search"), ("bundle",)
SIZES = {
    wide_adapter: (("bundle", "encoder"), TOO_LARGE),
    adapter_of_many_tokens: (("bundle", "encoder"), TOO_LARGE),
    negative_adapter: (("bundle", "encoder"), "hidden_dim"),
    text_as_a_size: (("bundle", "encoder"), "cannot build the model for the weights"),
    wide_vision_tower: (("bundle", "encoder"), TOO_LARGE),
    deep_vision_tower: (("bundle", "encoder"), TOO_LARGE),
    enormous_images: (("bundle", "encoder"), TOO_LARGE),
    long_texts: (BUNDLE, TOO_LARGE),
    wide_joint_encoder: (BUNDLE, TOO_LARGE),
    deep_joint_encoder: (BUNDLE, TOO_LARGE),
    many_words: (BUNDLE, TOO_LARGE),
    wide_head: (BUNDLE, TOO_LARGE),
    wide_pooled_similarity: (("bundle", "search"), TOO_LARGE),
}
"""The ways to load that must refuse the bundle, and a part of their messages."""


def fifo_for_the_description(bundle: Path) -> None:
    (bundle / "bundle.json").unlink()
    os.mkfifo(bundle / "bundle.json")


def fifo_for_weights(bundle: Path) -> None:
    (bundle / "adapter.safetensors").unlink()
    os.mkfifo(bundle / "adapter.safetensors")


def device_for_a_tokenizer(bundle: Path) -> None:
    (bundle / "joint/tokenizer.json").unlink()
    (bundle / "joint/tokenizer.json").symlink_to("/dev/zero")


def enormous_description(bundle: Path) -> None:
    os.truncate(bundle / "bundle.json", 64 << 30)


def enormous_tokenizer(bundle: Path) -> None:
    os.truncate(bundle / "joint/tokenizer.json", 64 << 30)


def deep_description(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("[" * 10**6)


def deep_tokenizer(bundle: Path) -> None:
    (bundle / "joint/tokenizer.json").write_text('{"model":' + "[" * 10**6)
    sign(bundle)


def weights_with_a_long_header(bundle: Path) -> None:
    (bundle / "adapter.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    sign(bundle)


def weights_with_a_large_tensor(bundle: Path) -> None:
    tensor = {"query": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    header = json.dumps(tensor).encode()
    (bundle / "adapter.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    sign(bundle)


FILES = {
    fifo_for_the_description: (ALL, "not a regular file"),
    fifo_for_weights: (ALL, "not a regular file"),
    device_for_a_tokenizer: (ALL, "not a regular file"),
    enormous_description: (ALL, "is too large to describe"),
    enormous_tokenizer: (ALL, "too many for a file without weights"),
    deep_description: (ALL, "cannot read"),
    deep_tokenizer: (("bundle", "search"), ""),
    weights_with_a_long_header: (("bundle", "encoder"), "cannot read the weights"),
    weights_with_a_large_tensor: (("bundle", "encoder"), "cannot read the weights"),
}


def unchanged(bundle: Path) -> None:
    """The bundle that the others are made from."""


def sign(bundle: Path) -> None:
    """Write the hashes of the files as they are now: the author of a bundle does so too."""
    file = bundle / info.INFO_FILE
    content = json.loads(file.read_text())
    for name, entry in content["files"].items():
        path = bundle / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            entry.update(bytes=path.stat().st_size, sha256=info._sha256(path))
    content["fingerprint"] = info._stored_fingerprint(content)
    content["encoder_fingerprint"] = info.encoder_fingerprint(content["adapter"], content["files"])
    file.write_text(json.dumps(content))


def loaded(bundles: list[Path]) -> list[dict[str, str]]:
    """What each way to load each bundle gives."""
    folder = bundles[0].parents[1]
    # Nothing listens on the discard port: a request to the hub would be named in the message.
    hub = {"HF_ENDPOINT": "https://localhost:9", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.load_model", "bundle", *map(str, bundles)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=500,
        env={**environment(), **hub, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def outcomes(tiny_bundle, tmp_path_factory):
    """The outcomes of loading each hostile bundle, by case; and that none of their code ran."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = [*CODE, *SIZES, *FILES, unchanged]
    bundles = [Path(shutil.copytree(tiny_bundle, folder / case.__name__ / "bundle")) for case in cases]
    for case, bundle in zip(cases, bundles, strict=True):
        case(bundle)
        if (bundle / info.INFO_FILE).is_file() and case not in FILES:
            sign(bundle)
    outcomes = loaded(bundles)
    assert not list(folder.rglob("marker")), "code of a bundle ran"
    return dict(zip(cases, outcomes, strict=True))


def test_the_bundle_that_the_others_are_made_from_is_loaded(outcomes):
    assert outcomes[unchanged] == {"bundle": "loaded", "encoder": "loaded", "search": "loaded"}


@pytest.mark.parametrize("case", CODE, ids=lambda case: case.__name__)
def test_a_bundle_with_code_is_refused_in_one_line(outcomes, case):
    assert outcomes[case]["bundle"].startswith("ModelError: ")
    assert CODE[case] in outcomes[case]["bundle"]
    assert all(message == "loaded" or message.startswith("ModelError: ") for message in outcomes[case].values())


@pytest.mark.parametrize("case", [*SIZES, *FILES], ids=lambda case: case.__name__)
def test_other_hostile_bundles_are_refused_in_one_line(outcomes, case):
    ways, expected = {**SIZES, **FILES}[case]
    assert set(outcomes[case]) == {"bundle", "encoder", "search"}, outcomes[case]
    for way, message in outcomes[case].items():
        assert message.startswith("ModelError: ") or (message == "loaded" and way not in ways), message
        assert "\n" not in message
        if way in ways:
            assert expected in message


def test_a_bundle_lists_files_of_its_own_folder(tmp_path):
    for name in ("../weights.safetensors", "/etc/passwd", "vision/../../x"):
        with pytest.raises(ModelError, match="outside its directory"):
            check_bundle_folder(tmp_path, [name])


def test_tokenizers_with_code_are_refused_outside_of_bundles(tmp_path):
    """Without a bundle's check of its whole folder: a folder of a Hugging Face model."""
    change(tmp_path / "tokenizer_config.json", lambda content: content.update(auto_map={"AutoTokenizer": "evil.Evil"}))
    with pytest.raises(ModelError, match="names code"):
        load_joint_tokenizer(tmp_path)
