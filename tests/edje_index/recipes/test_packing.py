"""Packed models: packing of tensors, and the round trip of a whole bundle."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.torch import save_file

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BANK_WEIGHTS
from edje_index.errors import ModelError
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.weights import read_weights
from edje_index.recipes.base_towers.names import IMAGE_TOWER, TEXT_TOWER, WEIGHTS
from edje_index.recipes.contrastive.towers import start_model
from edje_index.recipes.packing import tensors
from edje_index.recipes.packing.pack import pack_model
from edje_index.recipes.packing.tensors import pack_tensor, unpack_tensor
from edje_index.recipes.packing.unpack import unpack_model
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.weights import DirectionWeights, HubnessSimilarity, ScoreWeights
from edje_index.training.model.language_model import load_language_model
from tests.edje_index.tiny_towers import tiny_sources

VALUES = st.floats(-8, 8, width=32)


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=6), elements=VALUES), st.data())
def test_differences_are_within_half_a_step_and_equal_rows_exact(base, data):
    tensor = base.copy()
    rows = data.draw(st.sets(st.integers(0, len(base) - 1)))
    for row in rows:
        tensor[row] += np.float32(data.draw(st.floats(-1, 1, width=32)))
    packing, parts = pack_tensor(tensor, base, "fp16")
    result = unpack_tensor(packing, parts, shape=tensor.shape, base=base)
    assert result.dtype == np.float32
    for row in range(len(base)):
        step = np.abs(tensor[row] - base[row]).max() / 127
        assert np.abs(result[row] - tensor[row]).max() <= step / 2 + 2e-6
        if row not in rows:
            np.testing.assert_array_equal(result[row], base[row])


def test_equal_tensors_take_nothing():
    base = np.ones((3, 4), np.float32)
    packing, parts = pack_tensor(base.copy(), base, "fp16")
    assert (packing, parts) == (tensors.BASE, {})
    np.testing.assert_array_equal(unpack_tensor(packing, parts, shape=(3, 4), base=base), base)


def test_added_rows_count_from_zero():
    base = np.ones((3, 4), np.float32)
    tensor = np.concatenate([base, np.full((1, 4), 5, np.float32)])
    packing, parts = pack_tensor(tensor, base, "fp16")
    assert parts["rows"].tolist() == [3]
    np.testing.assert_allclose(unpack_tensor(packing, parts, shape=(4, 4), base=base), tensor, rtol=1e-6)


@pytest.mark.parametrize(("chosen", "tolerance"), [("fp16", 5e-4), ("int8", 0.5 / 127)])
def test_large_new_tensors_are_rounded(chosen, tolerance):
    tensor = np.random.default_rng(0).uniform(-1, 1, (400, 400)).astype(np.float32)
    packing, parts = pack_tensor(tensor, None, chosen)
    assert packing == chosen
    assert np.abs(unpack_tensor(packing, parts, shape=tensor.shape, base=None) - tensor).max() <= tolerance


def test_small_new_tensors_and_vectors_stay_as_they_are():
    for tensor in (np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32), np.array(4.6, np.float32)):
        packing, parts = pack_tensor(tensor, None, "int8")
        assert packing == tensors.RAW
        np.testing.assert_array_equal(unpack_tensor(packing, parts, shape=tensor.shape, base=None), tensor)


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """Tiny towers instead of the base towers."""
    folder = tmp_path_factory.mktemp("towers")
    sources = tiny_sources(folder)
    (folder / IMAGE_TOWER).mkdir()
    (folder / IMAGE_TOWER / WEIGHTS).write_bytes(sources.image_weights.read_bytes())
    sources.text.rename(folder / TEXT_TOWER)
    return folder


@pytest.fixture(scope="module")
def trained(towers, tmp_path_factory):
    """A bundle of those towers with new heads, adapter and joint encoder."""
    from edje_index.recipes.contrastive.config import TowerSources

    sources = TowerSources("test_vit", towers / IMAGE_TOWER / WEIGHTS, towers / TEXT_TOWER, 64)
    model = start_model(sources, 12, seed=0)
    joint = load_language_model(towers / TEXT_TOWER, 12)
    with torch.no_grad():
        joint.language_model.bert.encoder.layer[1].output.dense.weight.add_(0.01 * torch.randn(16, 32))
    adapter = AdapterConfig("compressed", 4, 64, 16, hidden_dim=32, num_heads=2)
    bundle = ModelBundle(
        clip=model.clip,
        clip_config=model.config,
        text_tokenizer=model.tokenizer,
        adapter=build_adapter(adapter),
        joint=joint,
        trained=True,
        score=DirectionWeights(t2i=ScoreWeights(embedding=3.0)),
    )
    path = tmp_path_factory.mktemp("bundles") / "trained"
    bundle.save(path)
    return path


def test_the_unpacked_bundle_has_the_recorded_fingerprint(towers, trained, tmp_path):
    packed = pack_model(trained, towers, tmp_path / "packed")
    first = unpack_model(tmp_path / "packed", towers, tmp_path / "first")
    second = unpack_model(tmp_path / "packed", towers, tmp_path / "second")
    assert packed.fingerprint == first.fingerprint == second.fingerprint
    assert first.trained
    assert first.score.t2i.embedding == 3.0
    assert packed.packings["base"][0] > packed.packings["delta8"][0] > 0
    before, after = ModelBundle.load(trained), ModelBundle.load(tmp_path / "first")
    blocks = torch.randn(2, 4, 16)
    torch.testing.assert_close(
        before.joint.score("a dog", blocks), after.joint.score("a dog", blocks), atol=1e-3, rtol=0
    )
    # Packing the unpacked bundle changes nothing more.
    again = pack_model(tmp_path / "first", towers, tmp_path / "again")
    ours = read_weights(unpack_model(tmp_path / "again", towers, tmp_path / "third").path / "adapter.safetensors")
    theirs = read_weights(first.path / "adapter.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.size == pytest.approx(packed.size, rel=0.01)


def test_a_hubness_bank_is_packed_unchanged(towers, trained, tmp_path):
    """The bytes of the bank and the weights of the score are those of the bundle before packing."""
    bank = HubnessBank.of((torch.randn(5, 12), torch.zeros(5, 0)), (torch.randn(3, 12), torch.zeros(3, 0)))
    score = DirectionWeights(t2i=ScoreWeights(hubness=0.75, hubness_similarity=HubnessSimilarity(1.0, 0.0, 4.0)))
    banked = replace(ModelBundle.load(trained), hubness_bank=bank, score=score, info=None)
    info = banked.save(tmp_path / "banked")
    pack_model(tmp_path / "banked", towers, tmp_path / "packed")
    assert "+ 0.75 x hubness correction" in (tmp_path / "packed" / "MODEL_CARD.md").read_text()
    made = unpack_model(tmp_path / "packed", towers, tmp_path / "made")
    assert made.files[BANK_WEIGHTS] == info.files[BANK_WEIGHTS]
    assert (made.hubness_bank, made.score) == (info.hubness_bank, info.score)
    assert not list((tmp_path / "packed" / "bundle").rglob("model.safetensors"))


def test_card_names_the_fingerprint(towers, trained, tmp_path):
    packed = pack_model(trained, towers, tmp_path / "packed")
    assert packed.fingerprint in (tmp_path / "packed" / "MODEL_CARD.md").read_text()


def test_other_towers_are_refused(towers, trained, tmp_path):
    pack_model(trained, towers, tmp_path / "packed")
    other = tmp_path / "towers"
    for name in (IMAGE_TOWER, TEXT_TOWER):
        (other / name).mkdir(parents=True)
        state = read_weights(towers / name / WEIGHTS)
        save_file({key: tensor + 1 for key, tensor in state.items()}, other / name / WEIGHTS)
    with pytest.raises(ModelError, match="does not contain the base towers"):
        unpack_model(tmp_path / "packed", other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_found(towers, trained, tmp_path):
    pack_model(trained, towers, tmp_path / "packed")
    path = tmp_path / "packed" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="has changed since the bundle was made"):
        unpack_model(tmp_path / "packed", towers, tmp_path / "out")
    description = tmp_path / "packed" / "carried.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "format_version": 2}))
    with pytest.raises(ModelError, match="format version 2"):
        unpack_model(tmp_path / "packed", towers, tmp_path / "out")


def test_a_folder_that_is_too_large_is_refused(towers, trained, tmp_path):
    with pytest.raises(ModelError, match=r"takes .* MB, more than"):
        pack_model(trained, towers, tmp_path / "packed", max_bytes=1000)
    assert not (tmp_path / "packed").exists()


def test_only_files_of_weights_are_written(towers, trained, tmp_path):
    pack_model(trained, towers, tmp_path / "packed")
    description = tmp_path / "packed" / "carried.json"
    content = json.loads(description.read_text())
    content["tensors"]["../outside.safetensors"] = content["tensors"].pop("adapter.safetensors")
    description.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"'../outside.safetensors', which is not a weights file"):
        unpack_model(tmp_path / "packed", towers, tmp_path / "out")


def test_folders_that_are_no_packed_model_are_refused(towers, tmp_path):
    with pytest.raises(ModelError, match="not a packed model"):
        unpack_model(tmp_path, towers, tmp_path / "out")
