"""Carried models: packing of tensors, and the round trip of a whole bundle."""

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
from edje_index.recipes.packing.pack import carry_model
from edje_index.recipes.packing.tensors import pack, unpack
from edje_index.recipes.packing.unpack import assemble_bundle
from edje_index.scoring.hubness import QueryBank
from edje_index.training.model.language_model import load_language_model
from tests.edje_index.dual_towers import tiny_sources

VALUES = st.floats(-8, 8, width=32)


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=6), elements=VALUES), st.data())
def test_differences_are_within_half_a_step_and_equal_rows_exact(base, data):
    tensor = base.copy()
    rows = data.draw(st.sets(st.integers(0, len(base) - 1)))
    for row in rows:
        tensor[row] += np.float32(data.draw(st.floats(-1, 1, width=32)))
    packing, parts = pack(tensor, base, "fp16")
    result = unpack(packing, parts, tensor.shape, base)
    assert result.dtype == np.float32
    for row in range(len(base)):
        step = np.abs(tensor[row] - base[row]).max() / 127
        assert np.abs(result[row] - tensor[row]).max() <= step / 2 + 2e-6
        if row not in rows:
            np.testing.assert_array_equal(result[row], base[row])


def test_equal_tensors_take_nothing():
    base = np.ones((3, 4), np.float32)
    packing, parts = pack(base.copy(), base, "fp16")
    assert (packing, parts) == (tensors.BASE, {})
    np.testing.assert_array_equal(unpack(packing, parts, (3, 4), base), base)


def test_added_rows_count_from_zero():
    base = np.ones((3, 4), np.float32)
    tensor = np.concatenate([base, np.full((1, 4), 5, np.float32)])
    packing, parts = pack(tensor, base, "fp16")
    assert parts["rows"].tolist() == [3]
    np.testing.assert_allclose(unpack(packing, parts, (4, 4), base), tensor, rtol=1e-6)


@pytest.mark.parametrize(("fresh", "tolerance"), [("fp16", 5e-4), ("int8", 0.5 / 127)])
def test_large_new_tensors_are_rounded(fresh, tolerance):
    tensor = np.random.default_rng(0).uniform(-1, 1, (400, 400)).astype(np.float32)
    packing, parts = pack(tensor, None, fresh)
    assert packing == fresh
    assert np.abs(unpack(packing, parts, tensor.shape, None) - tensor).max() <= tolerance


def test_small_new_tensors_and_vectors_stay_as_they_are():
    for tensor in (np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32), np.array(4.6, np.float32)):
        packing, parts = pack(tensor, None, "int8")
        assert packing == tensors.RAW
        np.testing.assert_array_equal(unpack(packing, parts, tensor.shape, None), tensor)


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """Tiny towers in the place of the base towers."""
    folder = tmp_path_factory.mktemp("towers")
    sources = tiny_sources(folder)
    (folder / IMAGE_TOWER).mkdir()
    (folder / IMAGE_TOWER / WEIGHTS).write_bytes(sources.image_weights.read_bytes())
    sources.text.rename(folder / TEXT_TOWER)
    return folder


@pytest.fixture(scope="module")
def trained(towers, tmp_path_factory):
    """A bundle over those towers whose heads, adapter and joint encoder are its own."""
    from edje_index.recipes.contrastive.config import DualSources

    sources = DualSources("test_vit", towers / IMAGE_TOWER / WEIGHTS, towers / TEXT_TOWER, 64)
    dual = start_model(sources, 12, seed=0)
    joint = load_language_model(towers / TEXT_TOWER, 12)
    with torch.no_grad():
        joint.language_model.bert.encoder.layer[1].output.dense.weight.add_(0.01 * torch.randn(16, 32))
    adapter = AdapterConfig("compressed", 4, 64, 16, hidden_dim=32, num_heads=2)
    bundle = ModelBundle(
        clip=dual.clip,
        clip_config=dual.config,
        text_tokenizer=dual.tokenizer,
        adapter=build_adapter(adapter),
        joint=joint,
        trained=True,
        embedding_weight=3.0,
    )
    path = tmp_path_factory.mktemp("bundles") / "trained"
    bundle.save(path)
    return path


def test_the_assembled_bundle_is_the_recorded_one(towers, trained, tmp_path):
    carried = carry_model(trained, towers, tmp_path / "carried")
    first = assemble_bundle(tmp_path / "carried", towers, tmp_path / "first")
    second = assemble_bundle(tmp_path / "carried", towers, tmp_path / "second")
    assert carried.fingerprint == first.fingerprint == second.fingerprint
    assert first.trained
    assert first.weights.similarity == 3.0
    assert carried.packings["base"][0] > carried.packings["delta8"][0] > 0
    before, after = ModelBundle.load(trained), ModelBundle.load(tmp_path / "first")
    blocks = torch.randn(2, 4, 16)
    torch.testing.assert_close(
        before.joint.score("a dog", blocks), after.joint.score("a dog", blocks), atol=1e-3, rtol=0
    )
    # Carrying what was assembled changes nothing more.
    again = carry_model(tmp_path / "first", towers, tmp_path / "again")
    ours = read_weights(assemble_bundle(tmp_path / "again", towers, tmp_path / "third").path / "adapter.safetensors")
    theirs = read_weights(first.path / "adapter.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.size == pytest.approx(carried.size, rel=0.01)


def test_a_query_bank_is_carried_as_it_is(towers, trained, tmp_path):
    """The same bytes, and a score to the last bit the same as without packing."""
    bank = QueryBank.of((torch.randn(5, 12), torch.zeros(5, 0)), (torch.randn(3, 12), torch.zeros(3, 0)))
    banked = replace(ModelBundle.load(trained), bank=bank, prior_weight=0.75, prior_temperature=4.0, info=None)
    info = banked.save(tmp_path / "banked")
    carry_model(tmp_path / "banked", towers, tmp_path / "carried")
    assert "- 0.75 x prior" in (tmp_path / "carried" / "MODEL_CARD.md").read_text()
    made = assemble_bundle(tmp_path / "carried", towers, tmp_path / "made")
    assert made.files[BANK_WEIGHTS] == info.files[BANK_WEIGHTS]
    assert (made.bank, made.weights) == (info.bank, info.weights)
    assert not list((tmp_path / "carried" / "bundle").rglob("model.safetensors"))


def test_card_names_the_fingerprint(towers, trained, tmp_path):
    carried = carry_model(trained, towers, tmp_path / "carried")
    assert carried.fingerprint in (tmp_path / "carried" / "MODEL_CARD.md").read_text()


def test_other_towers_are_refused(towers, trained, tmp_path):
    carry_model(trained, towers, tmp_path / "carried")
    other = tmp_path / "towers"
    for name in (IMAGE_TOWER, TEXT_TOWER):
        (other / name).mkdir(parents=True)
        state = read_weights(towers / name / WEIGHTS)
        save_file({key: tensor + 1 for key, tensor in state.items()}, other / name / WEIGHTS)
    with pytest.raises(ModelError, match="other base towers"):
        assemble_bundle(tmp_path / "carried", other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_found(towers, trained, tmp_path):
    carry_model(trained, towers, tmp_path / "carried")
    path = tmp_path / "carried" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not the file"):
        assemble_bundle(tmp_path / "carried", towers, tmp_path / "out")
    account = tmp_path / "carried" / "carried.json"
    account.write_text(json.dumps({**json.loads(account.read_text()), "format_version": 2}))
    with pytest.raises(ModelError, match="format version 2"):
        assemble_bundle(tmp_path / "carried", towers, tmp_path / "out")


def test_a_folder_that_is_too_large_is_refused(towers, trained, tmp_path):
    with pytest.raises(ModelError, match=r"takes .* MB, more than"):
        carry_model(trained, towers, tmp_path / "carried", max_bytes=1000)
    assert not (tmp_path / "carried").exists()


def test_folders_that_are_no_carried_model_are_refused(towers, tmp_path):
    with pytest.raises(ModelError, match="not a carried model"):
        assemble_bundle(tmp_path, towers, tmp_path / "out")
