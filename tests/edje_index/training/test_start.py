"""What a training starts from."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.weights import save_weights
from edje_index.training.config import ArchitectureConfig
from edje_index.training.model.language_model import load_language_model
from edje_index.training.model.start_bundle import Origin, feature_fingerprints, make_start, set_dropout

SMALL = ArchitectureConfig(tokens=3, adapter_hidden=20)
BERT = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 96,
}  # fmt: skip


@pytest.fixture
def language(tmp_path, tiny_bundle):
    """A folder with a BERT in 16 bits as sentence models come, without a head, and its own vocabulary."""
    folder = tmp_path / "bert"
    folder.mkdir()
    tokenizer = ModelBundle.load(tiny_bundle).joint.tokenizer
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<image>"]
    del content["model"]["vocab"]["<image>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = BertConfig(vocab_size=len(tokenizer) - 1, **BERT)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": "bert"}))
    torch.manual_seed(3)
    model = BertModel(config)
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def test_a_language_model_keeps_all_that_it_has(language):
    joint = load_language_model(language, embed_dim=24)
    model = BertModel.from_pretrained(language, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    assert joint.tokenizer.image_token_id == vocabulary
    assert joint.text_embeddings.weight.shape == (vocabulary + 1, 24)
    assert joint.text_embeddings.weight.dtype == torch.float32
    own = joint.language_model.bert.state_dict()
    for name, tensor in model.state_dict().items():
        if name.startswith("pooler"):
            continue
        assert torch.equal(own[name][: len(tensor)], tensor), name
    assert torch.equal(joint.classification_head[0].dense.weight, model.pooler.dense.weight)
    decoder = joint.language_model.cls.predictions.decoder.weight
    assert decoder.data_ptr() == joint.text_embeddings.weight.data_ptr()


def test_a_masked_language_models_head_is_kept(language):
    torch.manual_seed(4)
    model = BertForMaskedLM(BertConfig.from_pretrained(language))
    model.cls.predictions.bias.data.normal_()
    save_weights(model, language / "model.safetensors")
    joint = load_language_model(language, embed_dim=24)
    hidden = torch.randn(5, 24)
    with torch.no_grad():
        logits = joint.language_model.cls(hidden)[:, : model.config.vocab_size]
        torch.testing.assert_close(logits, model.eval().cls(hidden))


def test_what_is_no_language_model_is_refused(language, tmp_path):
    with pytest.raises(ModelError, match="there is no directory"):
        load_language_model(tmp_path / "nowhere", 24)
    (language / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_language_model(language, 24)
    save_file({"x": torch.zeros(1)}, language / "model.safetensors")
    with pytest.raises(ModelError, match="word_embeddings"):
        load_language_model(language, 24)


def test_a_start_has_the_towers_of_one_and_the_words_of_the_other(tiny_bundle, language, tmp_path):
    config = ArchitectureConfig(tokens=3, adapter_hidden=20, language_layers=2)
    first = make_start(Origin(tiny_bundle, language=language), config, seed=1)
    assert first.adapter.config == AdapterConfig("compressed", 3, 32, 24, 20, num_heads=2, layer_norm_eps=1e-5)
    assert len(first.joint.language_model.bert.encoder.layer) == 2
    assert first.joint.text_projection.out_features == first.embed_dim
    again = make_start(Origin(tiny_bundle, language=language), config, seed=1)
    other = make_start(Origin(tiny_bundle, language=language), config, seed=2)
    assert torch.equal(first.adapter.query, again.adapter.query)
    assert not torch.equal(first.adapter.query, other.adapter.query)
    info = first.save(tmp_path / "start")
    assert not info.trained
    loaded = ModelBundle.load(tmp_path / "start")
    assert len(loaded.joint.language_model.bert.encoder.layer) == 2
    with pytest.raises(ModelError, match="cannot keep 9 layers"):
        make_start(Origin(tiny_bundle, language=language), ArchitectureConfig(language_layers=9), 0)


def test_dropout_of_hidden_states_and_of_attention_apart(tiny_bundle):
    joint = ModelBundle.load(tiny_bundle).joint
    set_dropout(joint, None, 0.0)
    layer = joint.language_model.bert.encoder.layer[0]
    assert (layer.attention.self.dropout.p, layer.attention.output.dropout.p) == (0.0, 0.1)
    set_dropout(joint, 0.3, None)
    dropouts = [joint.language_model.bert.embeddings.dropout, layer.attention.output.dropout, layer.output.dropout]
    assert [module.p for module in dropouts] == [0.3] * 3
    assert layer.attention.self.dropout.p == 0.0


def test_going_on_from_a_bundle_takes_its_adapter_where_it_fits(tiny_bundle, tmp_path):
    first = make_start(Origin(tiny_bundle), SMALL, seed=1)
    first.save(tmp_path / "first")
    same = make_start(Origin(tiny_bundle, init=tmp_path / "first"), SMALL, seed=5)
    assert torch.equal(same.adapter.query, first.adapter.query)
    other = make_start(
        Origin(tiny_bundle, init=tmp_path / "first"), ArchitectureConfig(adapter="local", adapter_hidden=20), 5
    )
    assert other.adapter.config.num_tokens == 16
    assert torch.equal(other.joint.text_embeddings.weight, first.joint.text_embeddings.weight)


@pytest.mark.parametrize("adapter", ["compressed", "local", "strided", "clustered", "pruned"])
def test_features_are_what_the_adapter_is_trained_on(tiny_bundle, tmp_path, adapter):
    """A feature bundle and the trained part of the adapter make together what the whole adapter makes."""
    from dataclasses import replace

    from edje_index.training.model.trained_part import trained_part

    config = ArchitectureConfig(adapter=adapter, tokens=4, adapter_hidden=20)
    start = make_start(Origin(tiny_bundle), config, seed=0)
    whole = start.save(tmp_path / "whole")
    info = replace(start, adapter=build_adapter(start.adapter.config.features(16))).save(tmp_path / "features")
    accepted = feature_fingerprints(whole, start.adapter.config)
    assert accepted[0] == info.encoder_fingerprint
    everything = replace(start, adapter=build_adapter(AdapterConfig("patches", 16, 32, 32, 0)))
    of_all_patches = everything.save(tmp_path / "patches").encoder_fingerprint
    assert (of_all_patches in accepted) == (adapter != "pruned")
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    features, embeddings = ImageEncoder.open(tmp_path / "features", device="cpu").encode(pixels)
    tokens, same_embeddings = ImageEncoder.open(tmp_path / "whole", device="cpu").encode(pixels)
    assert (embeddings == same_embeddings).all()
    assert features.shape == (3, 16 if adapter in ("compressed", "local") else 4, 32)
    made = trained_part(start.adapter)(torch.from_numpy(features.astype("float32"))).detach().numpy()
    assert abs(made - tokens.astype("float32")).max() < 0.05


def test_patches_of_another_width_make_a_bundle_and_a_local_count_is_held(tiny_bundle):
    bundle = ModelBundle.load(tiny_bundle)
    with pytest.raises(ModelError, match="equal vision_dim and language_dim"):
        build_adapter(AdapterConfig("patches", 16, 32, 16, 0))
    bundle.adapter = build_adapter(AdapterConfig("patches", 9, 32, 32, 0))
    with pytest.raises(ModelError, match="patches adapter stores one token per patch"):
        bundle.save(tiny_bundle.with_name("never"))


def test_the_settings_decide_how_captions_are_read(tiny_bundle):
    assert make_start(Origin(tiny_bundle), SMALL, seed=1).joint.tokenizer.canonical
    raw = SMALL.model_copy(update={"canonical_captions": False})
    assert not make_start(Origin(tiny_bundle), raw, seed=1).joint.tokenizer.canonical


@pytest.mark.parametrize(("adapter", "positions"), [("local", 80), ("compressed", 67)])
def test_positions_reach_to_the_last_image_token_and_are_trained(tiny_bundle, language, tmp_path, adapter, positions):
    """As published: 64 for the row without its image, and one per image token; added rows repeat the last one."""
    config = json.loads((language / "config.json").read_text())
    (language / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 66}))
    state = load_file(language / "model.safetensors")
    name = "embeddings.position_embeddings.weight"
    state[name] = state[name][:66].clone()
    save_file(state, language / "model.safetensors")
    start = make_start(Origin(tiny_bundle, language=language), SMALL.model_copy(update={"adapter": adapter}), seed=1)
    table = start.joint.language_model.bert.embeddings.position_embeddings.weight
    assert table.shape == (positions, 24)
    assert torch.equal(table[:66], state[name].float())
    assert torch.equal(table[66:], state[name][-1:].float().expand(positions - 66, -1))
    start.save(tmp_path / "start")
    joint = ModelBundle.load(tmp_path / "start").joint
    joint.requires_grad_(True)
    inputs = joint.tokenizer.inputs(["word " * 80], start.adapter.config.num_tokens)
    tokens = torch.randn(1, start.adapter.config.num_tokens, 24)
    joint.hidden_states(inputs, tokens)[0, 0, 0].backward()
    gradient = joint.language_model.bert.embeddings.position_embeddings.weight.grad
    assert gradient.shape == (positions, 24)
    assert (gradient.abs().sum(dim=1) > 0).all(), "every position has its own row"


def test_a_long_table_of_positions_is_kept(tiny_bundle):
    start = make_start(Origin(tiny_bundle), SMALL, seed=1)
    assert start.joint.config.max_position_embeddings == 512
