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

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from edje_index import TokenIndex
from edje_index.bundles.info import describe_bundle
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.evaluation.pools import score_pairs, split_set
from edje_index.models.filesystem import write_json
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import DIRECTIONS, EMBEDDING, LATE, LOGIT, POOLED
from edje_index.training.fit_weights import DevPools, fit_calibration, part_shares
from storage_formats.format.rows import read_all_rows
from storage_formats.reading.embeddings import read_embeddings

POOL = 100
QUERIES = 2500
# standard deviation of the logits in the pools of 500 dev queries
LOGIT_SPREAD = 2.0
# names of photos of scikit-image, and captions of each of them; the captions of the
# last lines describe no photo
CHECKED = """
astronaut: a woman in an orange space suit|an astronaut smiles in front of a flag
astronaut: a smiling woman in an orange suit|a portrait of a woman|a woman smiles
astronaut: a woman with short hair smiles at the camera|a woman in an orange jacket
astronaut: a person in an orange uniform|a smiling woman stands in front of a flag
astronaut: a lady in a red jacket smiles for the camera
astronaut: a woman wearing an orange jumpsuit poses for a picture
astronaut: a smiling person in orange clothes
brick: a brick wall|a wall of red bricks|a stone wall
camera: a man with a camera on a tripod|a man takes a picture
camera: a photographer in a dark coat|a black and white photo of a man outdoors
camera: a man stands in a field with a camera|a man in a black coat stands on the grass
camera: a man in a long coat takes photographs|a photographer stands behind a tripod
camera: a man looks through a camera on a tripod in a park
camera: a black and white picture of a man with a camera
cell: a cell under the microscope
chelsea: a cat|a cat looks at the camera|the face of a cat|an orange cat with green eyes
chelsea: a small animal with fur|a brown cat lies on a blanket|a cat with stripes
chelsea: a close-up of a brown animal|a kitten looks up|a tiger cat rests
chelsea: a furry animal lies down
chessboard_GRAY chessboard_RGB: a chessboard|black and white squares
clock_motion: a clock on a wall|a blurred clock|a blurry clock|a round clock in motion
clock_motion: the time on a clock
coffee: a cup of coffee|a cup and a spoon on a table|a drink on a wooden table
coffee: a white cup on a saucer|a hot drink in a cup|a cup of tea on a brown table
coffee: coffee and a spoon|a mug on a wooden table
coins: old coins|many round coins|silver coins on a dark table|a collection of coins
coins: money
color: a colour wheel
grass: grass|green grass in a field|short green grass|a lawn|dry grass
gravel: gravel on the ground|small stones|a stony ground|pebbles
horse: a horse|a black horse|the silhouette of a horse|a brown horse stands|a horse runs
horse: the shape of a horse|a horse stands in the field|an animal with four legs
horse: a running horse
hubble_deep_field: stars and galaxies|small bright stars in a dark sky|galaxies in space
hubble_deep_field: coloured lights on a black background
hubble_deep_field moon: the night sky
ihc: tissue under a microscope
moon: the surface of the moon|a crater on the moon|the moon in black and white
moon: rocks on the moon|the grey surface of a planet
motorcycle_left motorcycle_right: a motorcycle|a red motorcycle in a garage
motorcycle_left motorcycle_right: a motorbike parked inside|a vehicle with two wheels
motorcycle_left motorcycle_right: a man's red and black bike|a parked motorbike
motorcycle_left motorcycle_right: a red motorbike in a workshop
motorcycle_left motorcycle_right: a motorcycle in a shed with tools
motorcycle_left motorcycle_right: a dirt bike is parked indoors|a bike in a garage
page: a page of a book
page text: printed text on paper|words on a page
text: handwriting
phantom: a scan of a brain
retina: the retina of an eye|an orange circle
rocket: a rocket|a rocket on a launch pad|a tall tower under a cloudy sky
rocket: a rocket lifts off with fire and smoke|a launch at night
rocket: a rocket in the night sky|smoke and bright light at a launch
rocket: a spaceship takes off|a bright light in the sky
rocket: a rocket flies up into the clouds|fireworks in the sky
logo: a logo of a snake
: a dog on the beach|a dog runs through the snow|two children play football
: a girl in a pink dress on a swing|a boy jumps into a swimming pool
: people ride bicycles in the street|a crowd at a concert|a skier jumps from a hill
: a man climbs a rock|a surfer on a big wave|a baby laughs|a dog catches a frisbee
: a group of people sit at a restaurant table|an old man plays the guitar
: a bride and a groom|basketball players in a game|a red canoe on a lake
: a train at a station|an airplane in the sky|a bird on a branch|a bowl of fruit
: a birthday cake with candles|a bathroom with a white sink|an elephant by the water
: a zebra and a giraffe|a sandwich on a plate|a laptop on a desk|a street sign
: a yellow school bus|a red umbrella in the rain|a sailing boat at sunset
: a snowy mountain|a waterfall in the forest|a child eats ice cream
: a woman talks on the phone|a man in a suit waits for the bus|a fireman with a hose
: kids in a classroom|a tent in the woods|a fisherman on a boat|xyzzy qwerty|a pizza
: sunflowers|a bridge over a river|a skyscraper|a castle|a teddy bear
: a kite in the sky|a tennis player|a herd of sheep
"""


def fit(index_path: Path, captions: Path, model: Path, bundle_json: Path) -> None:
    """Fit the relevance and the shares, and write them to `bundle_json`.

    The queries are random captions in the file `captions` for text-to-image search, and
    all photos of this file for image-to-text search.
    """
    index = TokenIndex.open(index_path, model)
    rows = read_all_rows(index.committed, NAME_COLUMNS)
    items = read_captions(captions)
    matched = match_items(index.committed.root, rows, items)
    items, row_ids = matched.indexed(items)
    queries = split_set([item.captions for item in items], row_ids)
    queries = queries.subsampled(QUERIES, seed=0)
    embeddings = (
        read_embeddings(index.committed, queries.rows),
        index.model.text.encode(queries.captions),
    )
    content = json.loads(bundle_json.read_text())
    info = index.model.info
    fitted = info.score
    for direction in DIRECTIONS:
        pools = queries.pools(direction, *embeddings, POOL)
        (parts,) = score_pairs(
            index.model.scorer,
            [LATE, POOLED],
            queries.captions,
            [queries.pairs(direction, pools)],
            index.store.fetch,
            lambda activity, done, total: print(done, total, end="\r"),
            "",
        )
        # The logit is not computed. Instead, each pool gets two alternating values,
        # whose standard deviation is that of known logits. `part_shares` needs only
        # this deviation to compute the share of the logit.
        logits = np.where(np.arange(POOL) % 2, LOGIT_SPREAD, -LOGIT_SPREAD)
        parts |= {
            EMBEDDING: pools.similarities,
            LOGIT: np.tile(logits, (len(pools.similarities), 1)),
        }
        weights = fitted.of(direction)
        without_logit = FinalScore(weights.by_part()).only([LATE, POOLED, EMBEDDING])
        line = fit_calibration(without_logit.sum(parts), pools.relevant)
        owners = queries.images_of_queries(direction)
        shares = part_shares(DevPools(parts, pools.relevant, owners), weights)
        print(direction, len(owners), "queries", line, shares)
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
    described: dict[str, list[str]] = {}
    for line in CHECKED.strip().splitlines():
        photos, _, captions = line.partition(":")
        for caption in captions.strip().split("|"):
            described[caption] = photos.split()
    texts = list(described)
    count = index.manifest.counts.indexed
    after = index.search(texts, 1, count)
    before = index.search(texts, 1, count, score="embedding")
    rows = []
    for text, *hits in zip(texts, before, after, strict=True):
        names = [Path(each[0].uri).stem for each in hits]
        is_right = [name in described[text] for name in names]
        relevance = hits[1][0].relevance or 0.0
        print(f"{text:44}{names[0]:24}{names[1]:24}{relevance:.2f} {is_right}")
        rows.append([*is_right, relevance])
    by_embedding, reranked, relevances = np.array(rows).T
    print(f"right first hits of {sum(map(bool, described.values()))} captions:")
    print(f"{by_embedding.sum():.0f} by embeddings, {reranked.sum():.0f} re-ranked")
    for hit in (True, False):
        values = relevances[reranked == hit]
        print(
            f"first hit {'right' if hit else 'wrong'}: {(values >= 0.5).sum()} of"
            f" {len(values)} have a relevance of 0.5 or more, median"
            f" {np.median(values):.2f}"
        )


if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    {"fit": fit, "check": check}[step](*map(Path, arguments))
