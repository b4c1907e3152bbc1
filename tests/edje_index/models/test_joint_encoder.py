"""The joint encoder on its own, and captions on their way to token ids: the published
preprocessing, and bundles that record whether it is used.
"""

import json
import random
import shutil

import pytest
import torch
from open_clip.tokenizer import basic_clean, canonicalize_text
from transformers import AutoTokenizer

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import untrained_tokenizer
from edje_index.errors import ModelError
from edje_index.models.joint_inputs import load_joint_tokenizer


def blocks(count, seed=0):
    return torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(seed))


def test_one_caption_for_a_whole_pool(tiny_model):
    joint = tiny_model.joint
    pool = blocks(joint.scorer().batch + 7)
    scores = joint.score("a red dog", pool)
    assert torch.equal(scores, joint.score(["a red dog"] * len(pool), pool))
    assert torch.equal(scores, joint.score(["a red dog"], pool))
    alone = torch.cat([joint.score("a red dog", block[None]) for block in pool])
    torch.testing.assert_close(scores, alone, atol=1e-6, rtol=0)
    assert scores.std() > 0


def test_captions_of_different_lengths_equal_the_model_with_padding(tiny_model):
    """The scorer groups captions by length, and needs no mask."""
    joint = tiny_model.joint
    captions = ["dog " * (1 + i * 7 % 5) + str(i) for i in range(70)]
    pool = blocks(len(captions))
    with torch.inference_mode():
        expected = joint(joint.tokenizer.inputs(captions, 4), pool)
    torch.testing.assert_close(joint.score(captions, pool), expected, atol=1e-5, rtol=0)
    assert joint.score([], pool[:0]).shape == joint.score("a", pool[:0]).shape == (0,)


def test_a_batch_of_captions_of_different_lengths_needs_padding_and_a_mask(tiny_model):
    """On a GPU, captions of different lengths are in one batch."""
    scorer = tiny_model.joint.scorer()
    captions = ["dog " * (1 + i // 6) + "a" for i in range(24)]
    pool = blocks(len(captions))
    ids = scorer.tokenizer.caption_ids(captions)
    rows = scorer.tokenizer.inputs_of_ids(ids, 0).input_ids
    lengths = torch.tensor([len(caption) for caption in ids])
    torch.testing.assert_close(
        scorer.logits(rows, pool, lengths),
        scorer.score(captions, pool),
        atol=1e-5,
        rtol=0,
    )


def test_bfloat16_rounds_the_language_model_and_not_the_head(tiny_model, monkeypatch):
    joint = tiny_model.joint
    pool = blocks(40)
    captions = ["a red dog on the sand"]
    exact = joint.score(captions, pool)
    monkeypatch.setattr(joint, "compute_dtype", torch.bfloat16)
    rounded = joint.score(captions, pool)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    # few are equal for having few bits
    assert len(rounded.unique()) > 30
    torch.testing.assert_close(rounded, exact, atol=1e-3, rtol=0)


def test_refuses_what_does_not_fit(tiny_model):
    with pytest.raises(ModelError, match="2 captions for 3 blocks"):
        tiny_model.joint.score(["a", "b"], blocks(3))
    with pytest.raises(ModelError, match=r"\[b, m, 16\], got \[3, 4, 8\]"):
        tiny_model.joint.score("a", blocks(3)[:, :, :8])


WORDS = (
    "a the blue T-shirt man's ladder DOG cleaning window snow_covered café naïve 42"
    " 3.5m Österreich x"
)
NOISE = (
    ", . ! ?! ... … - – — ' \" “ ” ‘ ’s « » ( ) [sic] {} #tag @me $5 50% a/b <image>"
    " <b> &amp; &quot; &lt;p&gt; &amp;amp; &#39; &eacute; 😀 👩\u200d🚒 🇦🇹 ❤️ ﬁsh 犬"
    " cafÃ© itâ€™s schÃ¶n ＷＩＤＥ"
)
SPACES = ["\u00a0", "\t", "  ", "\n"]


def captions(count):
    """Captions of words with punctuation, quotes, emoji, HTML entities and broken
    encodings.
    """
    rng = random.Random(7)
    pieces = [*WORDS.split(), *NOISE.split(), *SPACES]
    lines = [
        rng.choice(["", " "]).join(rng.choices(pieces, k=rng.randint(1, 14)))
        for _ in range(count // 2)
    ]
    return [
        *lines,
        *(
            " ".join(rng.choices(pieces, k=rng.randint(1, 30)))
            for _ in range(count - len(lines))
        ),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of 4,000 words."""
    path = tmp_path_factory.mktemp("tokenizer")
    untrained_tokenizer(4000).save(path)
    return path


def stock_ids(folder, texts):
    """Token ids by the stock tokenizer with the checkpoint's settings, in which
    `<image>` is no word of a caption.
    """
    stock = AutoTokenizer.from_pretrained(folder)
    placeholder = stock.convert_tokens_to_ids("<image>")
    unknown = stock.unk_token_id
    rows = (stock(text, add_special_tokens=False)["input_ids"][:61] for text in texts)
    return [
        [unknown if token_id == placeholder else token_id for token_id in row]
        for row in rows
    ]


def test_token_ids_equal_the_published_preprocessing(folder):
    texts = captions(400)
    published = [canonicalize_text(basic_clean(text)) for text in texts]
    expected = stock_ids(folder, published)
    assert load_joint_tokenizer(folder, canonical=True).caption_ids(texts) == expected
    raw = load_joint_tokenizer(folder).caption_ids(texts)
    assert raw == stock_ids(folder, texts)
    # the captions are not easy
    assert sum(ids != other for ids, other in zip(raw, expected, strict=True)) > 300


def test_a_tokenizer_that_panics_is_one_error(folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    pattern = {
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**content, "pre_tokenizer": {"type": "Split", **pattern}})
    )
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    with pytest.raises(ModelError, match="the tokenizer cannot split a text"):
        load_joint_tokenizer(tmp_path).caption_ids(["a" * 60 + " b"])


def test_a_bundle_records_it(tiny_model, tmp_path):
    blocks = torch.randn(1, 4, 16)
    plain = tiny_model.save(tmp_path / "plain")
    tiny_model.joint.tokenizer.canonical = True
    canonical = tiny_model.save(tmp_path / "canonical")
    assert (plain.canonical_captions, canonical.canonical_captions) == (False, True)
    assert plain.fingerprint != canonical.fingerprint
    # an index serves both
    assert plain.encoder_fingerprint == canonical.encoder_fingerprint
    loaded, raw = (ModelBundle.load(info.path).joint for info in (canonical, plain))
    score = loaded.score("A dog, on the sand!", blocks)
    assert score == raw.score("a dog on the sand", blocks)
    assert score != raw.score("A dog, on the sand!", blocks)
