"""The BERT that only computes, against transformers and open_clip."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import get_clean_fn
from transformers import BertConfig, BertModel

from edje_index.errors import ModelError
from edje_index.models.bert import Bert, BertWeights
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import build_clip
from edje_index.models.joint_inputs import CLEANERS
from edje_index.models.text_tower import (
    BertTextTower,
    TextTower,
    load_bert_text_tower,
    text_tokenizer,
)
from edje_index.models.weights import save_weights
from tests.conftest import REPO

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}


def stock_bert(**settings):
    torch.manual_seed(1)
    return BertModel(
        BertConfig(**SIZES, vocab_size=50, max_position_embeddings=20, **settings)
    ).eval()


@pytest.mark.parametrize(("activation", "eps"), [("gelu", 1e-12), ("silu", 1e-2)])
def test_hidden_states_equal_those_of_transformers(activation, eps):
    stock = stock_bert(hidden_act=activation, layer_norm_eps=eps)
    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(50, (3, 9), generator=rng)
    types = torch.randint(2, (3, 9), generator=rng)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = mask[2, 3:] = False
    own = bert(stock)
    with torch.inference_mode():
        expected = stock(
            input_ids=ids, token_type_ids=types, attention_mask=mask.long()
        ).last_hidden_state
        embedded = own.embed(own.words[ids], types)
        torch.testing.assert_close(
            own.hidden_states(embedded, mask)[mask], expected[mask], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            own.hidden_states(embedded, mask, 1), expected[:, :1], atol=1e-5, rtol=0
        )
        whole = stock(input_ids=ids[:1], token_type_ids=types[:1]).last_hidden_state
        torch.testing.assert_close(
            own.hidden_states(embedded[:1], None), whole, atol=1e-5, rtol=0
        )


def bert(stock, dtype=torch.float32):
    weights = BertWeights(
        stock.state_dict(), "", source="the test", device=torch.device("cpu")
    )
    return Bert(stock.config.to_dict(), weights, source="the test", dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "describes a model of type 'gpt2': give a BERT model"),
        ({"num_attention_heads": "many"}, "is not valid"),
        (
            {"num_attention_heads": 5},
            "has 3 layers and 5 heads, but .* width, 24, is divisible",
        ),
        ({"num_hidden_layers": 10**9}, "encoder.layer.3.*is missing"),
    ],
)
def test_what_is_no_bert_encoder_is_refused(change, message):
    stock = stock_bert()
    weights = BertWeights(
        stock.state_dict(), "", source="the test", device=torch.device("cpu")
    )
    with pytest.raises(ModelError, match=message):
        Bert({**stock.config.to_dict(), **change}, weights, source="the test")


TEXTS = [
    "A dog",
    "two cats!",
    "",
    "  Tom &amp; Jerry\tcafÃ© ",
    "[MASK] and [SEP]",
    "犬 naïve ÉCOLE",
    "a red car " * 60,
]


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory):
    """A model with a BERT as its text tower, as a bundle stores it."""
    folder = tmp_path_factory.mktemp("vision")
    tokenizer = REPO / "tests" / "golden" / "local_small" / "tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    (folder / "hf_text").mkdir()
    BertConfig(**SIZES, vocab_size=99).save_pretrained(folder / "hf_text")
    vision = {
        "image_size": 16,
        "patch_size": 8,
        "width": 16,
        "layers": 2,
        "head_width": 8,
    }
    text = {
        "hf_model_name": "tiny",
        "hf_tokenizer_name": "tiny",
        "hf_proj_type": "mlp",
        "hf_pooler_type": "mean_pooler",
        "context_length": 20,
    }
    return folder, ClipConfig(
        "tiny", {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}, {}
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"tokenizer_kwargs": {"clean": "canonicalize"}}],
)
def test_text_embeddings_equal_those_of_open_clip(vision_folder, changes):
    folder, config = vision_folder
    config = ClipConfig(
        "tiny", {**config.model, "text_cfg": {**config.text, **changes}}, {}
    )
    torch.manual_seed(4)
    clip = build_clip(config, folder / "hf_text")
    save_weights(clip, folder / "open_clip_model.safetensors")
    tower = load_bert_text_tower(folder, config, torch.device("cpu"))
    assert isinstance(tower, BertTextTower)
    expected = TextTower(clip, text_tokenizer(config, folder)).encode(TEXTS)
    np.testing.assert_allclose(tower.encode(TEXTS), expected, atol=1e-5)
    # the texts differ
    assert np.ptp(expected, axis=0).max() > 0.01


@pytest.mark.parametrize("length", [0, 10**9])
def test_a_context_without_positions_is_refused(vision_folder, length):
    folder, config = vision_folder
    text = {**config.text, "context_length": length}
    config = ClipConfig("tiny", {**config.model, "text_cfg": text}, {})
    with pytest.raises(ModelError, match=f"context_length of tiny is {length}"):
        build_clip(config, folder / "hf_text")
    with pytest.raises(ModelError, match=f"context_length of tiny is {length}"):
        load_bert_text_tower(folder, config, torch.device("cpu"))
    with pytest.raises(ModelError, match="context_length of tiny"):
        config.check_context_length({"max_position_embeddings": "many"})


@settings(max_examples=30)
@given(st.text(max_size=60) | st.text("aB_.&; #x39<>’Ã©\t\n", max_size=60))
@pytest.mark.parametrize("name", CLEANERS)
def test_texts_are_cleaned_as_open_clip_does(name, text):
    assert CLEANERS[name](text) == get_clean_fn(name)(text)
