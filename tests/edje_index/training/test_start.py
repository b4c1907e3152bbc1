"""What a training starts from."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from edje_index.bundles.bundle import ModelBundle, write_feature_bundle
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.adapter import AdapterConfig
from edje_index.training.config import ArchitectureConfig
from edje_index.training.start import (
    load_language_model,
    make_start,
    make_trainable,
    trained_part,
)

SMALL = ArchitectureConfig(tokens=3, adapter_hidden=20)
BERT = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
}


@pytest.fixture
def language(tmp_path, tiny_bundle):
    """A folder with a BERT in 16 bits as sentence models come, without a head, and
    its own vocabulary.
    """
    folder = tmp_path / "bert"
    folder.mkdir()
    tokenizer = ModelBundle.load(tiny_bundle).joint.tokenizer
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] != "<image>"
    ]
    del content["model"]["vocab"]["<image>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = BertConfig(vocab_size=len(tokenizer) - 1, **BERT)
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "model_type": "bert"})
    )
    torch.manual_seed(3)
    model = BertModel(config)
    save_file(
        {name: tensor.half() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )
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
    # as published: that of a new torch.nn.Linear
    pooler = joint.classification_head[0].dense.weight.detach()
    assert pooler.abs().max() <= 24**-0.5
    assert float(pooler.std()) == pytest.approx((24 * 3) ** -0.5, rel=0.1)
    assert not torch.equal(pooler, model.pooler.dense.weight)
    decoder = joint.language_model.cls.predictions.decoder.weight
    assert decoder.data_ptr() == joint.text_embeddings.weight.data_ptr()


def test_a_language_model_without_a_weight_is_refused(language):
    path = language / "model.safetensors"
    state = load_file(path)
    del state["encoder.layer.1.output.dense.weight"]
    save_file(state, path)
    with pytest.raises(
        ModelError, match=r"1 tensors missing .*layer\.1\.output\.dense"
    ):
        load_language_model(language, embed_dim=24)
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*pytorch_model\.bin"):
        load_language_model(language, embed_dim=24)


def test_a_start_has_the_towers_of_one_and_the_words_of_the_other(
    tiny_bundle, language, tmp_path
):
    config = SMALL.model_copy(update={"language_layers": 2})
    first, again, other = (
        make_start(config, seed, tiny_bundle, language=language) for seed in (1, 1, 2)
    )
    assert first.adapter.config == AdapterConfig(
        "compressed", 3, 32, 24, 20, num_heads=2, layer_norm_eps=1e-5
    )
    assert first.joint.text_projection.out_features == first.embed_dim
    assert torch.equal(first.adapter.query, again.adapter.query)
    assert not torch.equal(first.adapter.query, other.adapter.query)
    assert not first.save(tmp_path / "start").trained
    for bundle in (first, ModelBundle.load(tmp_path / "start")):
        assert len(bundle.joint.language_model.bert.encoder.layer) == 2
    config = config.model_copy(update={"language_layers": 9})
    with pytest.raises(ModelError, match="cannot keep 9 layers"):
        make_start(config, 0, tiny_bundle, language=language)


def test_going_on_from_a_bundle_takes_its_adapter_where_it_fits(tiny_bundle, tmp_path):
    first = make_start(SMALL, 1, tiny_bundle)
    first.save(tmp_path / "first")
    same = make_start(SMALL, 5, tiny_bundle, init=tmp_path / "first")
    assert torch.equal(same.adapter.query, first.adapter.query)
    local = ArchitectureConfig(adapter="local", adapter_hidden=20)
    other = make_start(local, 5, tiny_bundle, init=tmp_path / "first")
    assert other.adapter.config.num_tokens == 16
    assert torch.equal(
        other.joint.text_embeddings.weight, first.joint.text_embeddings.weight
    )


@pytest.mark.parametrize("adapter", ["compressed", "local", "clustered", "pruned"])
def test_features_are_what_the_adapter_is_trained_on(tiny_bundle, tmp_path, adapter):
    """A feature bundle and the trained part of the adapter make together what the
    whole adapter makes.
    """

    config = ArchitectureConfig(adapter=adapter, tokens=4, adapter_hidden=20)
    start = make_start(config, 0, tiny_bundle)
    start.save(tmp_path / "whole")
    needed = start.adapter.config.features(16)
    info = write_feature_bundle(
        tiny_bundle, tmp_path / "features", needed.kind, needed.num_tokens
    )
    assert info.adapter == asdict(needed)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    features, embeddings = ImageEncoder.open(
        tmp_path / "features", device="cpu"
    ).encode(pixels)
    tokens, same_embeddings = ImageEncoder.open(
        tmp_path / "whole", device="cpu"
    ).encode(pixels)
    assert (embeddings == same_embeddings).all()
    assert features.shape == (3, 16 if adapter in ("compressed", "local") else 4, 32)
    made = (
        trained_part(start.adapter)(torch.from_numpy(features.astype("float32")))
        .detach()
        .numpy()
    )
    assert abs(made - tokens.astype("float32")).max() < 0.05


@pytest.mark.parametrize(("adapter", "positions"), [("local", 80), ("compressed", 67)])
def test_positions_reach_to_the_last_image_token_and_are_trained(
    tiny_bundle, language, tmp_path, adapter, positions
):
    """As published: 64 for the row without its image, and one per image token;
    added rows repeat the last one.
    """
    config = json.loads((language / "config.json").read_text())
    config["max_position_embeddings"] = 66
    (language / "config.json").write_text(json.dumps(config))
    state = load_file(language / "model.safetensors")
    name = "embeddings.position_embeddings.weight"
    state[name] = state[name][:66].clone()
    save_file(state, language / "model.safetensors")
    settings = SMALL.model_copy(update={"adapter": adapter})
    start = make_start(settings, 1, tiny_bundle, language=language)
    table = start.joint.language_model.bert.embeddings.position_embeddings.weight
    expected = state[name][np.arange(positions).clip(max=65)].float()
    assert torch.equal(table, expected)
    start.save(tmp_path / "start")
    joint = ModelBundle.load(tmp_path / "start").joint
    joint.requires_grad_(True)
    tokens = torch.randn(1, start.adapter.config.num_tokens, 24)
    inputs = joint.tokenizer.inputs(["word " * 80], tokens.shape[1])
    joint.hidden_states(inputs, tokens)[0, 0, 0].backward()
    gradient = joint.language_model.bert.embeddings.position_embeddings.weight.grad
    # every position has its own row
    assert (gradient.abs().sum(dim=1) > 0).all()
    assert len(gradient) == positions


def test_the_settings_decide_what_is_trained_and_how_captions_are_read(tiny_bundle):
    changes = {"dropout": 0.3, "canonical_captions": False, "word_embeddings": "frozen"}
    config = SMALL.model_copy(update=changes)
    start = make_start(config, 1, tiny_bundle)
    make_trainable(start, config, torch.device("cpu"))
    bert = start.joint.language_model.bert
    attention = bert.encoder.layer[0].attention
    dropouts = [
        bert.embeddings.dropout,
        attention.output.dropout,
        attention.self.dropout,
    ]
    assert [module.p for module in dropouts] == [0.3] * 3
    frozen = [
        name
        for name, parameter in start.joint.named_parameters()
        if not parameter.requires_grad
    ]
    assert len(frozen) == 1
    assert not start.joint.text_embeddings.weight.requires_grad
    assert not start.joint.tokenizer.canonical
    assert start.joint.config.max_position_embeddings == 512
