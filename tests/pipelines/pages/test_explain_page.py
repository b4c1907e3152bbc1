"""The page of `explain`, read back by an HTML parser that this project did not
write.
"""

import base64
import io
import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist

from edje_index import TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.evaluation.explain import explain_index, is_whole_word, match_query
from pipelines import build_index, delete_rows, quantize_index
from pipelines.pages import _mask, _match_maps
from storage_formats import UsageError
from storage_formats.token_store import TokenStore
from tests.edje_index.towers import eval_transform
from tests.pipelines.conftest import write_photo
from tests.pipelines.pages.test_search_page import Page

HOSTILE = "<img src=x onerror=alert(1)>.jpg"


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_bundle):
    """Photos with captions, their index with two precisions, and one built by
    another model.
    """
    folder = tmp_path_factory.mktemp("explain")
    names = [*(f"{seed}.jpg" for seed in range(6)), HOSTILE]
    for seed, name in enumerate(names):
        write_photo(folder / "photos" / name, seed)
    (folder / "photos" / "broken.jpg").write_bytes(b"nothing")
    create_untrained_bundle(folder / "other", seed=5, sizes=TINY)
    for name, model in (("photos", tiny_bundle), ("other", folder / "other")):
        index = folder / f"{name}.edje"
        build_index(folder / "photos", index, model, engine="inline", threads=1)
    quantize_index(folder / "photos.edje", ["sign1"])
    texts = ["a red dog", "two cats run", "the", "snow and water"]
    lines = [
        {"image": name, "captions": texts[at % 3 :]} for at, name in enumerate(names)
    ]
    (folder / "captions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def explained(case, run, tmp_path, *arguments):
    out = tmp_path / "page.html"
    printed = run.json("explain", case / "photos.edje", *arguments, "--out", out)
    return Page(out.read_text()), printed


def test_rows_show_their_image_and_the_words_of_their_tokens(
    case, run, tmp_path, tiny_bundle
):
    precision = "sign1"
    page, result = explained(case, run, tmp_path, "4", "1", "--precision", precision)
    assert [row["row_id"] for row in result["rows"]] == [4, 1]
    joint = ModelBundle.load(tiny_bundle).joint
    words = joint.text_embeddings.weight.detach().double().numpy()
    # [PAD] has length 0
    words = words / np.linalg.norm(words, axis=1, keepdims=True).clip(min=1e-12)
    words[joint.tokenizer.image_token_id] = 0
    names = [*map(joint.tokenizer.tokenizer.id_to_token, range(len(words)))]
    whole = np.array([is_whole_word(name or "") for name in names])
    blocks = TokenStore.open(case / "photos.edje", precision).fetch([4, 1])
    for block, row in zip(blocks.astype(np.float64), result["rows"], strict=True):
        nearest = np.where(whole, block @ words.T, -np.inf).argmax(axis=1)
        assert row["token_words"] == [names[word] for word in nearest]
        counted = Counter(row["token_words"])
        assert Counter(dict(row["words"]["words"])) == counted
    text = " ".join(page.text)
    assert all(word in text for word, _ in result["rows"][0]["words"]["words"])
    assert f"{precision} tokens" in text
    assert result["words"]["tokens"] == 7 * 4
    automatic = {tag for tag, each in page.tags if each.get("dir") == "auto"}
    assert automatic == {"li", "div", "span", "td"}


def test_the_page_loads_nothing_from_elsewhere_and_escapes_names(case, run, tmp_path):
    captions = ["--captions", case / "captions.jsonl", "--images", case / "photos"]
    page, _ = explained(case, run, tmp_path, *captions)
    kinds = Counter(reference.partition(",")[0] for reference in page.references())
    # a photo, and a map per token
    assert kinds == {"data:image/jpeg;base64": 6, "data:image/png;base64": 6 * 4}
    page, _ = explained(case, run, tmp_path, *range(7))
    assert HOSTILE in " ".join(page.text)
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]


def test_alignment_is_compared_pair_by_pair(case, run, tmp_path):
    captions = ["--captions", case / "captions.jsonl", "--images", case / "photos"]
    page, result = explained(
        case, run, tmp_path, *captions, "--against", case / "other.edje"
    )
    alignment = result["alignment"]
    assert alignment["first"]["pairs"] == alignment["second"]["pairs"]
    # the captions 'the' have no content word
    assert alignment["left_out"] == 7
    assert alignment["test"]["difference"] == pytest.approx(
        alignment["second"]["mean"] - alignment["first"]["mean"]
    )
    bars = [attributes for tag, attributes in page.tags if tag == "rect"]
    assert len(bars) == 2 * 30
    assert max(float(bar["height"]) for bar in bars) == 100
    assert f"t = {alignment['test']['t']:.2f}" in " ".join(page.text)


def test_maps_are_bright_where_a_query_looks(case, run, tmp_path, tiny_bundle):
    """Against the formula of attention, head by head, on the pixels of open_clip's
    own transform.
    """
    page, result = explained(case, run, tmp_path, "2")
    assert result["rows"][0]["no_attention"] == ""
    bundle = ModelBundle.load(tiny_bundle)
    image = Image.open(result["rows"][0]["uri"]).convert("RGB")
    patches, _ = bundle.vision.encode(eval_transform(bundle.clip_config)(image)[None])
    adapter = bundle.adapter
    width = patches.shape[2]
    heads = adapter.config.num_heads
    weight = adapter.attention.in_proj_weight.double()
    bias = adapter.attention.in_proj_bias.double()
    queries = adapter.query[0].double() @ weight[:width].T + bias[:width]
    keys = (
        adapter.key(patches[0]).double() @ weight[width : 2 * width].T
        + bias[width : 2 * width]
    )
    part = width // heads
    scores = [
        queries[:, h : h + part] @ keys[:, h : h + part].T / part**0.5
        for h in range(0, width, part)
    ]
    expected = (
        torch.stack([score.softmax(dim=1) for score in scores])
        .mean(dim=0)
        .detach()
        .numpy()
    )
    masks = [each for each in page.references() if each.startswith("data:image/png")]
    for mask, weights in zip(masks, expected, strict=True):
        darkness = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(mask.partition(",")[2])))
        )[:, :, 1]
        side = math.isqrt(len(weights))
        np.testing.assert_allclose(
            darkness,
            230 * (1 - (weights / weights.max()) ** 0.5).reshape(side, side),
            atol=1.01,
        )


def test_a_query_is_explained_by_words_patches_and_parts(case, run, tmp_path):
    page, result = explained(case, run, tmp_path, "--query", "a red dog")
    (row,) = result["rows"]
    index = TokenIndex.open(case / "photos.edje", dtype="float32")
    (hit,) = index.search("a red dog", k=1)
    match = row["match"]
    assert (row["row_id"], match["query"]) == (hit.row_id, "a red dog")
    products = [value * weight for value, weight in match["parts"].values()]
    assert sum(products) == pytest.approx(match["score"], abs=1e-4)
    assert match["score"] == pytest.approx(hit.score, abs=1e-3)
    assert "product" in " ".join(page.text)
    maps = [tag for tag, _ in page.tags if tag == "img"]
    # the photo, and a map of each word
    assert len(maps) >= 3
    query = ["3", "--query", "a red dog", "--out", tmp_path / "p.html"]
    assert "product" in run.ok("explain", case / "photos.edje", *query)


def test_the_heat_of_a_word_is_that_of_its_nearest_token(case):
    index = TokenIndex.open(case / "photos.edje", dtype="float32")
    match = match_query(index, "a red dog", 2)
    block = index.store.fetch([2]).astype(np.float32)[0]
    words = index.model.joint.word_vectors.numpy()
    tokenizer = index.model.joint.tokenizer.tokenizer
    ids = [tokenizer.token_to_id(word) for word in match.words]
    mean = words.mean(axis=0)
    expected = 1 - cdist(words[ids] - mean, block - mean, "cosine")
    np.testing.assert_allclose(match.similarities, expected, atol=1e-5)
    without = block.copy()
    without[1] = block.mean(axis=0)
    pair = torch.from_numpy(np.stack([block, without])).bfloat16()
    whole, less = index.model.joint.score(["a red dog"] * 2, pair)
    assert match.drops[1] == pytest.approx(float(whole - less), abs=1e-4)
    attention = np.random.default_rng(0).random((4, 3, 3)).astype(np.float32)
    maps = _match_maps(match, attention)[-len(match.words) :]
    for word, near, (mask, label) in zip(
        match.words, match.similarities, maps, strict=True
    ):
        assert label.startswith(word)
        assert mask == _mask(near.max().clip(min=1e-6) * attention[near.argmax()])


def test_what_cannot_be_explained_is_refused(case, run, tmp_path):
    for arguments, words in (
        (["99"], "has no tokens"),
        (["--split", "x"], "need captions"),
        (["--precision", "fp8"], "fp8"),
        (["--model", case / "other"], "with this bundle"),
    ):
        page = tmp_path / "page.html"
        code, _, err = run("explain", case / "photos.edje", *arguments, "--out", page)
        assert code != 0
        assert words in err
        assert not page.exists()
    shutil.copytree(case / "photos.edje", tmp_path / "photos.edje")
    delete_rows(tmp_path / "photos.edje", range(8))
    with pytest.raises(UsageError, match="no tokens, because no row is indexed"):
        explain_index(tmp_path / "photos.edje")
