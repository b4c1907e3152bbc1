"""Fits the relevance of the shipped model, and the share of each part in its final
score. Also checks the relevance and the ranking on photos of another kind.

    python -m models.relevance fit INDEX CAPTIONS MODEL BUNDLE_JSON
    python -m models.relevance check PHOTOS_INDEX MODEL

`fit` needs an index of the photos of CAPTIONS, built with MODEL. It writes the fitted
numbers to BUNDLE_JSON, the file `bundle.json` of the packed model. The fit of the
relevance leaves out the logit, which changes the score by at most 6. `check` needs the
index of the photos of scikit-image that `make demo` builds. It searches with captions
that were written before any search of these photos.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from edje_index import TokenIndex
from edje_index.bundles.info import describe_bundle
from edje_index.captions.matching import match_items, name_table
from edje_index.captions.reading import read_captions
from edje_index.models.filesystem import write_json
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import (
    EMBEDDING,
    IMAGE_TO_TEXT,
    LATE,
    LOGIT,
    POOLED,
    TEXT_TO_IMAGE,
)
from edje_index.training.fit_weights import DevPools, fit_calibration, part_shares
from storage_formats.reading.embeddings import read_embeddings

POOL = 100
QUERIES = 2500
# standard deviation of the logits in the pools of 500 dev queries
LOGIT_SPREAD = 2.0

MATCHING = {
    "a woman in an orange space suit": "astronaut",
    "an astronaut smiles in front of a flag": "astronaut",
    "a smiling woman in an orange suit": "astronaut",
    "a portrait of a woman": "astronaut",
    "a brick wall": "brick",
    "a man with a camera on a tripod": "camera",
    "a man takes a picture": "camera",
    "a photographer in a dark coat": "camera",
    "a black and white photo of a man outdoors": "camera",
    "a cell under the microscope": "cell",
    "a cat": "chelsea",
    "a cat looks at the camera": "chelsea",
    "the face of a cat": "chelsea",
    "an orange cat with green eyes": "chelsea",
    "a small animal with fur": "chelsea",
    "a chessboard": "chessboard_GRAY chessboard_RGB",
    "black and white squares": "chessboard_GRAY chessboard_RGB",
    "a clock on a wall": "clock_motion",
    "a blurred clock": "clock_motion",
    "a cup of coffee": "coffee",
    "a cup and a spoon on a table": "coffee",
    "a drink on a wooden table": "coffee",
    "old coins": "coins",
    "many round coins": "coins",
    "a colour wheel": "color",
    "grass": "grass",
    "green grass in a field": "grass",
    "gravel on the ground": "gravel",
    "small stones": "gravel",
    "a horse": "horse",
    "a black horse": "horse",
    "the silhouette of a horse": "horse",
    "a brown horse stands": "horse",
    "stars and galaxies": "hubble_deep_field",
    "the night sky": "hubble_deep_field moon",
    "tissue under a microscope": "ihc",
    "the surface of the moon": "moon",
    "a crater on the moon": "moon",
    "a motorcycle": "motorcycle_left motorcycle_right",
    "a red motorcycle in a garage": "motorcycle_left motorcycle_right",
    "a motorbike parked inside": "motorcycle_left motorcycle_right",
    "a vehicle with two wheels": "motorcycle_left motorcycle_right",
    "a page of a book": "page",
    "printed text on paper": "page text",
    "handwriting": "text",
    "words on a page": "page text",
    "a scan of a brain": "phantom",
    "the retina of an eye": "retina",
    "an orange circle": "retina",
    "a rocket": "rocket",
    "a rocket on a launch pad": "rocket",
    "a tall tower under a cloudy sky": "rocket",
    "a rocket lifts off with fire and smoke": "rocket",
    "a launch at night": "rocket",
    "a logo of a snake": "logo",
    "a woman smiles": "astronaut",
    "a woman with short hair smiles at the camera": "astronaut",
    "a woman in an orange jacket": "astronaut",
    "a person in an orange uniform": "astronaut",
    "a smiling woman stands in front of a flag": "astronaut",
    "a lady in a red jacket smiles for the camera": "astronaut",
    "a woman wearing an orange jumpsuit poses for a picture": "astronaut",
    "a smiling person in orange clothes": "astronaut",
    "a man stands in a field with a camera": "camera",
    "a man in a black coat stands on the grass": "camera",
    "a man in a long coat takes photographs": "camera",
    "a photographer stands behind a tripod": "camera",
    "a man looks through a camera on a tripod in a park": "camera",
    "a black and white picture of a man with a camera": "camera",
    "a brown cat lies on a blanket": "chelsea",
    "a cat with stripes": "chelsea",
    "a close-up of a brown animal": "chelsea",
    "a kitten looks up": "chelsea",
    "a tiger cat rests": "chelsea",
    "a furry animal lies down": "chelsea",
    "a white cup on a saucer": "coffee",
    "a hot drink in a cup": "coffee",
    "a cup of tea on a brown table": "coffee",
    "coffee and a spoon": "coffee",
    "a mug on a wooden table": "coffee",
    "a horse runs": "horse",
    "the shape of a horse": "horse",
    "a horse stands in the field": "horse",
    "an animal with four legs": "horse",
    "a running horse": "horse",
    "a man's red and black bike": "motorcycle_left motorcycle_right",
    "a parked motorbike": "motorcycle_left motorcycle_right",
    "a red motorbike in a workshop": "motorcycle_left motorcycle_right",
    "a motorcycle in a shed with tools": "motorcycle_left motorcycle_right",
    "a dirt bike is parked indoors": "motorcycle_left motorcycle_right",
    "a bike in a garage": "motorcycle_left motorcycle_right",
    "a rocket in the night sky": "rocket",
    "smoke and bright light at a launch": "rocket",
    "a spaceship takes off": "rocket",
    "a bright light in the sky": "rocket",
    "a rocket flies up into the clouds": "rocket",
    "fireworks in the sky": "rocket",
    "short green grass": "grass",
    "a lawn": "grass",
    "dry grass": "grass",
    "a stony ground": "gravel",
    "pebbles": "gravel",
    "a wall of red bricks": "brick",
    "a stone wall": "brick",
    "the moon in black and white": "moon",
    "rocks on the moon": "moon",
    "the grey surface of a planet": "moon",
    "small bright stars in a dark sky": "hubble_deep_field",
    "galaxies in space": "hubble_deep_field",
    "coloured lights on a black background": "hubble_deep_field",
    "a blurry clock": "clock_motion",
    "a round clock in motion": "clock_motion",
    "the time on a clock": "clock_motion",
    "silver coins on a dark table": "coins",
    "a collection of coins": "coins",
    "money": "coins",
}
"""Captions, and the names of the photos that each caption describes."""

WITHOUT_MATCH = """
a dog on the beach|a dog runs through the snow|two children play football
a girl in a pink dress on a swing|a boy jumps into a swimming pool
people ride bicycles in the street|a crowd at a concert|a skier jumps from a hill
a man climbs a rock|a surfer on a big wave|a baby laughs|a dog catches a frisbee
a group of people sit at a restaurant table|an old man plays the guitar
a bride and a groom|basketball players in a game|a red canoe on a lake
a train at a station|an airplane in the sky|a bird on a branch|a bowl of fruit
a birthday cake with candles|a bathroom with a white sink|an elephant by the water
a zebra and a giraffe|a sandwich on a plate|a laptop on a desk|a street sign
a yellow school bus|a red umbrella in the rain|a sailing boat at sunset
a snowy mountain|a waterfall in the forest|a child eats ice cream
a woman talks on the phone|a man in a suit waits for the bus|a fireman with a hose
kids in a classroom|a tent in the woods|a fisherman on a boat|xyzzy qwerty|a pizza
sunflowers|a bridge over a river|a skyscraper|a castle|a teddy bear
a kite in the sky|a tennis player|a herd of sheep
"""


def dev_pools(index: TokenIndex, captions: Path, direction: str) -> DevPools:
    """Score the nearest candidates of each query by all parts of the final score except
    the logit.

    The queries are random captions in the file `captions` for text-to-image search, and
    all photos of this file for image-to-text search.
    """
    items = read_captions(captions)
    table = name_table(index.committed)
    matched = match_items(index.committed.root, table, items)
    items, rows = matched.indexed(items)
    texts = [caption for item in items for caption in item.captions]
    image_of_text = np.repeat(
        np.arange(len(items)), [len(item.captions) for item in items]
    )
    text_embeddings = index.model.text.encode(texts)
    similarities = text_embeddings @ read_embeddings(index.committed, rows).T
    queries = np.arange(len(items))
    if direction == TEXT_TO_IMAGE:
        queries = np.sort(np.random.default_rng(0).permutation(len(texts))[:QUERIES])
    else:
        similarities = similarities.T
    scorer = index.model.scorer
    images = scorer.images(index.store.fetch(rows))
    parts: dict[str, list[np.ndarray]] = {LATE: [], POOLED: [], EMBEDDING: []}
    right = []
    for query in queries:
        near = np.argsort(-similarities[query], kind="stable")[:POOL]
        repeated = np.full(len(near), query)
        text_ids, image_ids = (
            (repeated, near) if direction == TEXT_TO_IMAGE else (near, repeated)
        )
        captions_of_pairs = [texts[at] for at in text_ids]
        pairs = images.at(torch.from_numpy(image_ids))
        values = scorer.parts([LATE, POOLED], captions_of_pairs, pairs)
        parts[LATE].append(values[LATE])
        parts[POOLED].append(values[POOLED])
        parts[EMBEDDING].append(similarities[query, near])
        right.append(image_of_text[text_ids] == image_ids)
    stacked = {part: np.stack(values) for part, values in parts.items()}
    # The logit is not computed. Instead, each pool gets two alternating values, whose
    # standard deviation is that of known logits. `part_shares` needs only this
    # deviation to compute the share of the logit.
    alternating = np.where(np.arange(POOL) % 2, LOGIT_SPREAD, -LOGIT_SPREAD)
    stacked[LOGIT] = np.tile(alternating, (len(queries), 1))
    owners = queries
    if direction == TEXT_TO_IMAGE:
        owners = image_of_text[queries]
    return DevPools(stacked, np.stack(right), owners)


def fit(index_path: Path, captions: Path, model: Path, bundle_json: Path) -> None:
    """Fit the relevance and the shares, and write them to `bundle_json`."""
    index = TokenIndex.open(index_path, model)
    content = json.loads(bundle_json.read_text())
    info = index.model.info
    fitted = info.score
    for direction in (TEXT_TO_IMAGE, IMAGE_TO_TEXT):
        pools = dev_pools(index, captions, direction)
        weights = fitted.of(direction)
        without_logit = FinalScore(weights.by_part()).only([LATE, POOLED, EMBEDDING])
        line = fit_calibration(without_logit.sum(pools.parts), pools.right)
        shares = part_shares(pools, weights)
        print(direction, len(pools.right), "queries", line, shares)
        if line is None or shares is None:
            raise SystemExit(f"{direction}: matches do not score higher")
        weights = replace(
            weights,
            calibration=(float(f"{line[0]:.4g}"), float(f"{line[1]:.4g}")),
            shares=tuple(round(share, 3) for share in shares),
        )
        fitted = replace(fitted, **{direction: weights})
    described = describe_bundle(replace(info, score=fitted))
    content["score"] = described.to_json()["score"]
    content["fingerprint"] = described.fingerprint
    write_json(bundle_json, content)


def check(index_path: Path, model: Path) -> None:
    """For each caption, print the first hit by embeddings, the first hit after
    re-ranking, and the relevance of the latter. Then print how many first hits are
    right with each ranking, and how high the relevances of right and wrong hits are.
    """
    index = TokenIndex.open(index_path, model)
    without = WITHOUT_MATCH.strip().replace("\n", "|").split("|")
    texts = [*MATCHING, *without]
    count = index.manifest.counts.indexed
    reranked = index.search(texts, 1, count)
    by_embedding = index.search(texts, 1, count, score="embedding")
    is_right: dict[str, list[bool]] = {"embedding": [], "re-ranked": []}
    first_relevances: dict[bool, list[float]] = {True: [], False: []}
    for text, after, before in zip(texts, reranked, by_embedding, strict=True):
        photos = MATCHING.get(text, "").split()
        names = [Path(hits[0].uri).stem for hits in (before, after)]
        hit = names[1] in photos
        first_relevances[hit].append(after[0].relevance or 0.0)
        if photos:
            is_right["embedding"].append(names[0] in photos)
            is_right["re-ranked"].append(hit)
        note = ""
        if hit and names[0] not in photos:
            note = "corrected"
        print(
            f"{text:44}{names[0]:24}{names[1]:24}{after[0].relevance:.2f}"
            f"  {'right' if hit else 'wrong' if photos else 'no match':9}{note}"
        )
    for order, outcomes in is_right.items():
        print(f"right first hit, {order}: {sum(outcomes)} of {len(outcomes)}")
    for hit, values in first_relevances.items():
        strong = sum(value >= 0.5 for value in values)
        print(f"first hit {'right' if hit else 'wrong'}: {strong} of {len(values)}")
        print(f"    have a relevance of 0.5 or more, median {np.median(values):.2f}")


def main() -> None:
    """Run the command named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit")
    fitting.add_argument("index_path", metavar="index", type=Path)
    fitting.add_argument("captions", type=Path)
    fitting.add_argument("model", type=Path)
    fitting.add_argument("bundle_json", type=Path)
    checking = commands.add_parser("check")
    checking.add_argument("index_path", metavar="index", type=Path)
    checking.add_argument("model", type=Path)
    options = vars(parser.parse_args())
    if options.pop("command") == "fit":
        fit(**options)
    else:
        check(**options)


if __name__ == "__main__":
    main()
