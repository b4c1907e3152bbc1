"""Captions on their way to token ids: the published preprocessing, and bundles that
record whether it is used.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import untrained_tokenizer
from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.joint_inputs import load_joint_tokenizer

prepare_torchvision()

from open_clip.tokenizer import basic_clean, canonicalize_text  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

WORDS = (
    "a the blue T-shirt man's ladder DOG cleaning window snow_covered café naïve 42"
    " 3.5m Österreich x"
)
NOISE = [
    ",",
    ".",
    "!",
    "?!",
    "...",
    "…",
    "-",
    "–",
    "—",
    "'",
    '"',
    "“",
    "”",
    "‘",
    "’s",
    "«",
    "»",
    "(",
    ")",
    "[sic]",
    "{}",
    "#tag",
    "@me",
    "$5",
    "50%",
    "a/b",
    "<image>",
    "<b>",
    "&amp;",
    "&quot;",
    "&lt;p&gt;",
    "&amp;amp;",
    "&#39;",
    "&eacute;",
    "😀",
    "👩‍🚒",
    "🇦🇹",
    "❤️",
    "cafÃ©",
    "itâ€™s",
    "schÃ¶n",
    "\u00a0",
    "\t",
    "  ",
    "\n",
    "ﬁsh",
    "ＷＩＤＥ",
    "犬",
]


def captions(count: int) -> list[str]:
    """Captions of words with punctuation, quotes, emoji, HTML entities and broken
    encodings.
    """
    rng = random.Random(7)
    pieces = [*WORDS.split(), *NOISE]
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


def stock_ids(folder: Path, texts: list[str]) -> list[list[int]]:
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
    assert sum(ids != other for ids, other in zip(raw, expected, strict=True)) > 300, (
        "the captions are easy"
    )


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
    blocks = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    caption = "A dog, on the sand!"
    plain = tiny_model.save(tmp_path / "plain")
    tiny_model.joint.tokenizer.canonical = True
    canonical = tiny_model.save(tmp_path / "canonical")
    assert (
        "canonical_captions"
        not in json.loads((tmp_path / "plain" / "bundle.json").read_text())["joint"]
    )
    assert (plain.canonical_captions, canonical.canonical_captions) == (False, True)
    assert plain.fingerprint != canonical.fingerprint
    assert plain.encoder_fingerprint == canonical.encoder_fingerprint, (
        "an index serves both"
    )
    scores = [
        ModelBundle.load(tmp_path / name).joint.score(caption, blocks)
        for name in ("plain", "canonical")
    ]
    assert not torch.equal(*scores)
    assert torch.equal(
        scores[1],
        ModelBundle.load(tmp_path / "plain").joint.score("a dog on the sand", blocks),
    )
