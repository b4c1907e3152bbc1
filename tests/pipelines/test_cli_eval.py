"""`edje-index eval` on an index that a tiny model built, against every score
counted by hand.
"""

import json
import re

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.weights import parse_score
from pipelines import build_index
from pipelines.cli import main
from pipelines.progress.events import JobStopped
from storage_formats import TokenStore, codec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_rows
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts
from tests.pipelines.conftest import INLINE, write_photo

WORDS = ["dog", "cat", "red", "blue", "tree", "house", "water", "boy", "girl", "ball"]
# 3 repeats 1, 7 is no image
DEV = (0, 1, 2, 3, 4, 7, 8)
# 9 is in the index and in no file
TRAIN = (5, 6)
PER_IMAGE = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_bundle):
    """Ten photos, an index of them, and captions of nine and of one that is not
    there.
    """
    folder = tmp_path_factory.mktemp("world")
    for name in range(10):
        write_photo(folder / "photos" / f"{name:02d} 猫.jpg", 1 if name == 3 else name)
    (folder / "photos" / "07 猫.jpg").write_bytes(b"not a photo")
    rng = np.random.default_rng(0)
    with (folder / "captions.jsonl").open("w", encoding="utf-8") as file:
        for name in (*DEV, *TRAIN, 99):
            captions = [
                " ".join(rng.choice(WORDS, rng.integers(2, 9)))
                for _ in range(PER_IMAGE)
            ]
            split = "train" if name in TRAIN else "dev"
            line = {
                "image": f"photos/{name:02d} 猫.jpg",
                "split": split,
                "captions": captions,
            }
            file.write(json.dumps(line) + "\n")
    index = ["--out", folder / "index", "--model", tiny_bundle, "--dedupe"]
    build = ["build", folder / "photos", *index, *INLINE]
    assert main([*map(str, build)]) == 0
    return folder


def arguments(world, *options):
    captions = world / "captions.jsonl"
    return ["eval", world / "index", captions, "--device", "cpu", *options]


def captions_of(world, splits):
    """(row that the caption is about, caption) of the indexed images; names are row
    ids here.
    """
    pairs = []
    for line in (world / "captions.jsonl").read_text().splitlines():
        value = json.loads(line)
        name = int(value["image"].split("/")[1][:2])
        if name not in (7, 99) and value["split"] in splits:
            pairs += [
                (1 if name == 3 else name, caption) for caption in value["captions"]
            ]
    return pairs


def by_hand(
    world, bundle, *, candidates, queries, captions, pool, precision="bf16", rerank=True
):
    """R@k of both directions in percent, one query and one pair at a time."""
    model = ModelBundle.load(bundle)
    embeddings = read_embeddings(CommittedIndex.open(world / "index"), np.arange(10))
    blocks = TokenStore.open(world / "index").fetch(range(10))
    tokens = codec(precision, blocks.shape[1:])
    text = {caption: model.text.encode([caption])[0] for _, caption in captions}
    weights = {
        direction: parse_score("bundle", model.score.of(direction))
        for direction in ("t2i", "i2t")
    }
    scorer = model.scorer

    def final(caption, row, direction):
        block = tokens.decode(tokens.encode(blocks[row : row + 1]))
        parts = {"embedding": [text[caption] @ embeddings[row]]}
        used = weights[direction].by_part()
        joint = [part for part in used if part != "embedding"]
        parts |= scorer.parts(joint, [caption], scorer.images(block))
        return sum(w * float(parts[part][0]) for part, w in used.items())

    def ranks(pairs, right):
        order = sorted(
            pairs, key=lambda pair: -float(text[pair[0]] @ embeddings[pair[1]])
        )
        if rerank:
            direction = "t2i" if len({caption for caption, _ in pairs}) == 1 else "i2t"
            order[:pool] = sorted(
                order[:pool], key=lambda pair: -final(*pair, direction)
            )
        return next(at for at, pair in enumerate(order) if pair in right)

    asked = [
        ranks([(caption, row) for row in candidates], [(caption, right)])
        for right, caption in queries
    ]
    images = sorted({row for row, _ in queries})
    own = {
        row: [(caption, row) for about, caption in captions if about == row]
        for row in images
    }
    told = [
        ranks([(caption, row) for _, caption in captions], own[row]) for row in images
    ]
    return [np.array(found) for found in (asked, told)]


def recall_of(report, direction, **fields):
    (found,) = [
        result
        for result in report["results"]
        if result["direction"] == direction
        and all(result.get(name) == value for name, value in fields.items())
    ]
    return {int(k): estimate["value"] for k, estimate in found["recall"].items()}


def percent(ranks, cutoffs):
    return {k: pytest.approx(100 * float(np.mean(ranks < k))) for k in cutoffs}


def test_recall_equals_brute_force(run, world, tiny_bundle, tmp_path):
    """With every score of a bundle with all parts."""
    model = tmp_path / "model"
    bundle_with_all_parts(tiny_bundle).save(model)
    options = ("--split", "dev", "--model", model, "--pool", 3, "--pool", 1000)
    options += ("--precision", "sign1", "--precision", "bf16")
    report = run.json(*arguments(world, *options))
    assert report["weights"] == WEIGHTS.to_json()
    dev = captions_of(world, ["dev"])
    known = {
        "candidates": sorted({row for row, _ in dev}),
        "queries": dev,
        "captions": dev,
    }
    for precision, pool in ((None, None), ("bf16", 3), ("bf16", 1000), ("sign1", 1000)):
        ranks_by_hand = by_hand(
            world,
            model,
            **known,
            pool=pool,
            precision=precision or "bf16",
            rerank=pool is not None,
        )
        for direction, ranks in zip(("t2i", "i2t"), ranks_by_hand, strict=True):
            assert recall_of(
                report, direction, precision=precision, pool=pool
            ) == percent(ranks, (1, 5, 10))
    assert report["inputs"] == {
        "images": 8,
        "used": 6,
        "missing": {"not-an-image": 1, "not-in-index": 1},
        "captions": 24,
        "captions_used": 18,
    }
    # the duplicate is its original
    assert report["candidates"] == {"t2i": 5, "i2t": 18}
    assert report["queries"] == {"t2i": 18, "i2t": 5}
    sign1 = next(each for each in report["results"] if each.get("precision") == "sign1")
    assert (sign1["simulated_from"], sign1["change_from"]) == ("bf16", "bf16")
    assert sign1["bytes_per_image"] == codec("sign1", (4, 16)).record_bytes


def test_without_a_file_the_captions_are_those_of_the_index(
    run, world, tiny_bundle, tmp_path
):
    index = tmp_path / "captioned.edje"
    source = world / "text.jsonl"
    lines = (world / "captions.jsonl").read_text()
    source.write_text(lines.replace('"captions"', '"text"'))
    build_index(source, index, tiny_bundle, engine="inline", max_failed=1)
    options = ("--split", "dev", "--pool", 3, "--device", "cpu")
    own = run.json("eval", index, *options)
    file = run.json("eval", index, world / "captions.jsonl", *options)
    assert own["results"] == file["results"]
    assert own["inputs"]["captions_used"] == file["inputs"]["captions_used"]
    assert own["captions"] == "of the index"
    for root, option, words in (
        (index, ("--split", "none"), "no captions of the split 'none'"),
        (index, ("--images", world), "give captions"),
        (world / "index", (), "holds no captions"),
    ):
        assert words in run.refused("eval", root, *option)


def test_the_full_protocol(run, world, tiny_bundle):
    report = run.json(*arguments(world, "--split", "dev", "--full"))
    rows = read_rows(world / "index").to_pylist()
    known = {
        "candidates": [row["row_id"] for row in rows if row["status"] == "indexed"],
        "queries": captions_of(world, ["dev"]),
        "captions": captions_of(world, ["train", "dev"]),
        "pool": 100,
    }
    for direction, ranks in zip(
        ("t2i", "i2t"), by_hand(world, tiny_bundle, **known), strict=True
    ):
        assert recall_of(report, direction, precision="bf16") == percent(
            ranks, (5, 10, 20)
        )
    # Nine indexed rows less a duplicate; six images of both splits that are there, 7
    # and 99 have captions too.
    assert report["candidates"] == {"t2i": 8, "i2t": 10 * PER_IMAGE}
    assert report["queries"] == {"t2i": 18, "i2t": 5}


def test_a_sample_of_queries_without_reranking(run, world, tmp_path):
    options = ("--split", "dev", "--queries", 4, "--score", "embedding")
    options += ("--report", tmp_path / "out")
    code, out, err = run(*arguments(world, *options, "--json"))
    report = json.loads(out)
    assert code == 0
    assert "untrained" in err
    assert report["queries"] == {"t2i": 4, "i2t": 4}
    assert report["candidates"] == {"t2i": 5, "i2t": 18}
    assert report["pools"] == []
    assert {result.get("precision") for result in report["results"]} == {None}
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    markdown = run.ok(*arguments(world, *options))
    assert (tmp_path / "out/report.md").read_text() == markdown


def test_the_most_accurate_precision_is_the_reference_and_pairs_of_all_are_counted(
    run, world
):
    """The index stores bf16, which is not named."""
    options = ("--split", "dev", "--pool", 3, "--precision", "fp8")
    _, out, err = run(*arguments(world, *options, "--precision", "sign1"))
    names = re.findall(r"^\| (.+?) +\|", out, re.MULTILINE)
    compared = ["embedding only", "bf16 (reference)", "fp8*", "sign1*"]
    assert names == ["tokens", "-" * len("bf16 (reference)"), *compared] * 2
    steps = re.findall("pairs scored in bf16, fp8, sign1: ([0-9]+)/([0-9]+)", err)
    assert {total for _, total in steps} == {steps[-1][0]}
    assert int(steps[-1][0]) % 3 == 0


def test_a_stop_says_how_to_score_fewer_pairs(run, world, monkeypatch):
    def stop(*_):
        raise JobStopped("stopped before the end")

    monkeypatch.setattr("edje_index.evaluation.evaluate.score_pairs", stop)
    code, out, err = run(*arguments(world, "--pool", 3))
    assert (code, out) == (1, "")
    assert "stopped before the end; the same command continues. A smaller" in err


def test_senseless_requests_are_refused(run, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").touch()
    for options, words in (
        # before the evaluation, whose result would be printed
        (["--report", "report"], "cannot write the report"),
        (["--images", tmp_path], "none of the 10 captioned images"),
        (["--split", "test"], "no captions of the split 'test'"),
        (["--precision", "fp3"], "unknown precision"),
        (["--score", "joint"], "unknown part 'joint'"),
    ):
        assert words in run.refused(*arguments(world, *options))
