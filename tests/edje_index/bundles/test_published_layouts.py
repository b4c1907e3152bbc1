"""Published models in every layout, from a server with the protocol of the Hugging Face
Hub, with the outputs of the authors' own code.
"""

import hashlib
import io
import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, load_file, save

from edje_index import ModelBundle, import_checkpoint, load_published_checkpoint
from edje_index.errors import HubUnreachableError, ModelError
from tests.conftest import REPO
from tests.edje_index.siglip_cases import (
    TOWERS,
    files_of,
    siglip_model,
    write_siglip,
)
from tests.hub_server import hub_server

GOLDEN = REPO / "tests" / "golden"
LANGUAGE = "microsoft/MiniLM-L12-H384-uncased"
URL = "hf://authors/edje"
TOLERANCE = 1e-5


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub with the towers; an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(TOWERS, towers(tmp_path))
        yield hub


def towers(tmp_path):
    write_siglip(tmp_path / "siglip", siglip_model())
    return files_of(tmp_path / "siglip")


def golden(name):
    """The state of a golden checkpoint, and its tokenizer."""
    state = torch.load(GOLDEN / name / "checkpoint.pth", weights_only=True)["model"]
    return state, files_of(GOLDEN / name / "tokenizer")


def in_folder(files, folder):
    return {f"{folder}/{name}": data for name, data in files.items()}


def safetensors(state):
    """As transformers saves: of a shared tensor one name."""
    seen = {}
    for name, tensor in state.items():
        seen.setdefault(tensor.data_ptr(), name)
    kept = set(seen.values())
    return save({k: v.contiguous() for k, v in state.items() if k in kept})


def trainer_pth(name):
    state, tokenizer = golden(name)
    return {
        "checkpoint_44.pth": torch_file(
            {"model": state, "config": {"siglip_path": TOWERS, "k": 10}, "epoch": 44}
        ),
        **in_folder(tokenizer, "tokenizer"),
    }


def plain_safetensors(name):
    state, tokenizer = golden(name)
    return {"model.safetensors": safetensors(state), **tokenizer}


def prefixed_safetensors(name):
    state, tokenizer = golden(name)
    prefixed = {f"edje.model.{key}": tensor for key, tensor in state.items()}
    return {
        "model.safetensors": safetensors(prefixed),
        "README.md": f"---\nlicense: mit\n---\nTowers: `{TOWERS}`.".encode(),
        "modeling_edje.py": b"raise SystemExit('code of the repository ran')",
        **in_folder(tokenizer, "tokenizer"),
    }


def sharded_safetensors(name):
    state, tokenizer = golden(name)
    shards = {}
    weight_map = {}
    names = list(load(safetensors(state)))
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        shards[file] = safetensors({key: state[key] for key in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    return {
        **shards,
        "model.safetensors.index.json": json.dumps(index).encode(),
        **tokenizer,
    }


def pytorch_bin(name):
    state, tokenizer = golden(name)
    module = {f"module.{key}": tensor for key, tensor in state.items()}
    return {
        "pytorch_model.bin": torch_file(module),
        "training_args.bin": b"never read",
        **in_folder(tokenizer, "tokenizer"),
    }


def tower_inside(name):
    state, tokenizer = golden(name)
    siglip = siglip_model(seed=1).state_dict()
    state |= {f"clip.{key}": tensor for key, tensor in siglip.items()}
    state |= {
        f"vision_encoder.{key}": tensor.clone()
        for key, tensor in siglip.items()
        if key.startswith("vision_model.")
    }
    return {
        "model.safetensors": safetensors(state),
        **in_folder(tokenizer, "tokenizer"),
    }


def without_tokenizer(name):
    """The language model on the Hub has neither <image> nor the added positions."""
    state, _ = golden(name)
    return {
        "model.safetensors": safetensors(state),
        "config.json": json.dumps({"language_model_path": LANGUAGE}).encode(),
    }


LAYOUTS = {
    each.__name__: each
    for each in (
        trainer_pth,
        plain_safetensors,
        prefixed_safetensors,
        sharded_safetensors,
        pytorch_bin,
        tower_inside,
        without_tokenizer,
    )
}


def torch_file(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def check_golden(model, name):
    """The outputs of `model.adapter` and `model.joint` equal those of the authors'
    code.
    """
    case = json.loads((GOLDEN / name / "case.json").read_text())
    expected = load_file(GOLDEN / name / "expected.safetensors")
    tokens = model.adapter(expected["vision_tokens"])
    torch.testing.assert_close(
        tokens, expected["adapter_output"], atol=TOLERANCE, rtol=0
    )
    model.joint.tokenizer.canonical = False
    scores = model.joint.score(case["captions"], expected["adapter_output"])
    torch.testing.assert_close(scores, expected["logits"], atol=TOLERANCE, rtol=0)
    inputs = model.joint.tokenizer.inputs(case["captions"], tokens.shape[1])
    for field in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal(getattr(inputs, field), expected[field])


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, "compressed_small") for layout in LAYOUTS),
        ("trainer_pth", "local_small"),
    ],
)
def test_every_layout_gives_the_golden_outputs(hub, tmp_path, layout, name):
    hub.add("authors/edje", LAYOUTS[layout](name))
    hub.add(LANGUAGE, golden(name)[1])
    lines = []
    info = import_checkpoint(URL, None, tmp_path / "bundle", say=lines.append)
    bundle = ModelBundle.load(tmp_path / "bundle")
    check_golden(bundle, name)
    assert lines[0].startswith("downloading authors/edje@")
    assert info.pool == (10 if layout == "trainer_pth" else 50)
    seed = 1 if layout == "tower_inside" else 0
    pixels = torch.randn(2, 3, 32, 32)
    patches, _ = bundle.vision.encode(pixels)
    with torch.inference_mode():
        expected = siglip_model(seed).vision_model(pixels).last_hidden_state
    torch.testing.assert_close(patches, expected, atol=1e-4, rtol=1e-4)

    # the same files in a directory, and one of them
    folder = tmp_path / "downloaded"
    for file, data in hub.repositories["authors/edje"].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    check_golden(load_published_checkpoint(folder), name)
    weights = next(
        file
        for file in hub.repositories["authors/edje"]
        if file.endswith((".pth", ".safetensors", "model.bin"))
    )
    check_golden(load_published_checkpoint(folder / weights), name)
    check_golden(load_published_checkpoint(f"{URL}@main/{weights}"), name)


def truncated(state, files):
    data = safetensors(state)
    return {**files, "model.safetensors": data[: len(data) // 2]}


def missing_shard(_, files):
    del files["model.safetensors"]
    shard = safetensors({"a": torch.zeros(2)})
    return {**files, "model-00001-of-00002.safetensors": shard}


def outside_name(_, files):
    return {**files, "../escaped.json": b"{}"}


def several_weights(_, files):
    other = {f"checkpoint_{number}.pth": b"" for number in (1, 2)}
    del files["model.safetensors"]
    return {**files, **other}


HOSTILE = {
    truncated: "cannot read the weights",
    missing_shard: "has 1 of the 2 shards of model.safetensors",
    outside_name: "not the path of a file inside a directory; do not use this model",
    several_weights: "several files with weights .*; give the path of one of them",
}


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_damaged_and_hostile_models_give_one_error_and_leave_nothing(
    hub, tmp_path, change, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    state, tokenizer = golden("compressed_small")
    files = {
        "model.safetensors": safetensors(state),
        **in_folder(tokenizer, "tokenizer"),
    }
    hub.add("authors/edje", change(state, files))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match=HOSTILE[change]):
        import_checkpoint(URL, None, tmp_path / "bundle")
    assert set(tmp_path.iterdir()) - {tmp_path / "cache"} == set(before)


def test_answers_that_are_not_what_the_hub_describes(hub, tmp_path):
    hub.add("authors/edje", tower_inside("compressed_small"))
    weights = "authors/edje/model.safetensors"
    hub.sizes[weights] = 1 << 60
    with pytest.raises(ModelError, match="set HF_HOME to a directory on a larger disk"):
        import_checkpoint(URL, None, tmp_path / "bundle")
    hub.sizes.clear()

    with hub_server() as other:
        # of the same size
        data = bytes(len(hub.repositories["authors/edje"]["model.safetensors"]))
        sha256 = hashlib.sha256(data).hexdigest()
        other.blobs[sha256] = data
        hub.redirects[weights] = f"{other.url}/lfs/{sha256}"
        with pytest.raises(ModelError, match="because its hash differs"):
            import_checkpoint(URL, None, tmp_path / "bundle")
    hub.redirects.clear()

    hub.moving.add("authors/edje")
    with pytest.raises(ModelError, match="has changed during the download"):
        import_checkpoint(URL, None, tmp_path / "bundle")
    hub.moving.clear()
    # the cache holds nothing that is wrong
    import_checkpoint(URL, None, tmp_path / "bundle")
    check_golden(ModelBundle.load(tmp_path / "bundle"), "compressed_small")


def test_without_the_hub_its_cache_is_used(hub, tmp_path, monkeypatch):
    hub.add("authors/edje", trainer_pth("compressed_small"))
    import_checkpoint(URL, None, tmp_path / "first")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lines = []
    import_checkpoint(URL, None, tmp_path / "second", say=lines.append)
    assert lines == []
    assert files_of(tmp_path / "second") == files_of(tmp_path / "first")
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        import_checkpoint("hf://authors/other", None, tmp_path / "third")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match="check the name of the repository"):
        import_checkpoint("hf://authors/other", None, tmp_path / "third")


def test_an_unknown_layout_is_a_report(hub, tmp_path):
    state, tokenizer = golden("compressed_small")
    renamed = {
        key.replace("classification_head", "scoring_head"): tensor
        for key, tensor in state.items()
    }
    hub.add("authors/edje", {"model.safetensors": safetensors(renamed), **tokenizer})
    with pytest.raises(ModelError) as error:
        import_checkpoint(URL, None, tmp_path / "bundle")
    report = str(error.value)
    assert "files: config.json, model.safetensors, tokenizer.json" in report
    assert "missing: classification_head.\n" in report
    assert "scoring_head.0.dense.bias [48]" in report
