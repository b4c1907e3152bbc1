"""Bundles of random weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edje_index.bundles.info import BundleInfo
from edje_index.bundles.random_bundle import (
    TINY,
    create_untrained_bundle,
    untrained_tokenizer,
)
from tests.conftest import all_files

TOKENIZER = untrained_tokenizer(2000)


def test_equal_seeds_give_equal_bytes(tiny_bundle, tmp_path):
    create_untrained_bundle(tmp_path / "again", seed=0, sizes=TINY)
    assert all_files(tmp_path / "again") == all_files(tiny_bundle)


def test_default_is_a_small_vit_with_64_by_384_blocks(tmp_path):
    info: BundleInfo = create_untrained_bundle(tmp_path / "out")
    assert info.block_shape == (64, 384)
    assert (info.embed_dim, info.vision["num_patches"], info.vision["num_heads"]) == (
        384,
        196,
        6,
    )
    assert info.vision["image_size"] == [224, 224]
    assert info.trained is False


@given(st.text(alphabet="abcxyz0189 ,.!'-", max_size=40))
def test_no_plain_word_is_unknown(text):
    ids = TOKENIZER.inputs([text], 2).input_ids[0].tolist()
    assert TOKENIZER.special_id("unk_token") not in ids
    back = TOKENIZER.tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(back.split()) == "".join(text.split())
