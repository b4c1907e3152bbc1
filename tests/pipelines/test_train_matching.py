"""Which rows of the indexes of a training hold its images."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from edje_index.captions.reading import CaptionedImage
from edje_index.training.config import TrainConfig
from edje_index.training.data.dataset import TrainingData
from pipelines.jobs.training.captions import Captions
from pipelines.jobs.training.data import check_images
from pipelines.jobs.training.indexes import FurtherIndexes, ViewIndex
from pipelines.jobs.training.matching import MatchedCaptions, further_rows, match_captions
from pipelines.jobs.training.request import TrainingInputs
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import write_random_index


def index(root: Path, rows: int, **damage: frozenset[int]) -> CommittedIndex:
    """An index of the rows /photos/0.jpg, /photos/1.jpg, ..."""
    write_random_index(root, IndexSpec(rows, 4, (2, 8), embed_dim=4), **damage)
    return CommittedIndex.open(root)


def items(*numbers: int) -> list[CaptionedImage]:
    return [CaptionedImage(f"{at}.jpg", f"/photos/{at}.jpg", (f"photo {at}",), None, str(at)) for at in numbers]


def match(features: CommittedIndex, trained: list[CaptionedImage], dev: list[CaptionedImage]) -> MatchedCaptions:
    return match_captions(features, Captions(trained, dev), lambda _: None)


def test_images_without_features_are_left_out(tmp_path):
    features = index(tmp_path / "features", 11, failed=frozenset({6}), duplicates=frozenset({9}))
    events = []
    captions = Captions(items(10, 6, 9, 3), items(6, 2))
    matched = match_captions(features, captions, events.append)
    assert [item.image_id for item in matched.items] == ["10", "9", "3"]
    assert matched.captions.rows.tolist() == [10, 0, 3]
    assert matched.captions.texts() == ["photo 10", "photo 9", "photo 3"]
    assert (matched.dev.rows.tolist(), matched.dev.texts()) == ([2], ["photo 2"])
    assert matched.left_out == {"truncated": 1}
    assert [str(event.text) for event in events] == ["images left out because they have no features: truncated 1"]
    assert match(features, items(1), []).dev is None


def test_images_that_are_not_in_the_index_are_counted(tmp_path):
    features = index(tmp_path / "features", 5)
    with pytest.raises(UsageError, match=r"2 of 4 captioned images are not in .*features; build that index from all"):
        match(features, items(0, 7), items(1, 8))


@pytest.mark.parametrize(("trained", "dev", "setting"), [([1, 2], [3], "captions"), ([3], [1, 2], "dev")])
def test_a_set_without_any_features_is_refused(tmp_path, trained, dev, setting):
    features = index(tmp_path / "features", 5, failed=frozenset({1, 2}))
    with pytest.raises(UsageError, match=rf"none of the 2 images of inputs\.{setting} has features \(truncated 2\)"):
        match(features, items(*trained), items(*dev))


def test_rows_in_further_indexes(tmp_path):
    features, other = index(tmp_path / "features", 5), index(tmp_path / "other", 4)
    inputs = TrainingInputs(captions=["train.jsonl"], model="model", teacher="teacher")
    config = TrainConfig()
    matched = match(features, items(3, 0), items(4))
    rows = further_rows(inputs, config, FurtherIndexes(other, features, None), matched, tmp_path)
    assert (rows.mining.bundle, rows.mining.index) == (None, other)
    assert rows.mining.rows.tolist() == [3, 0]
    assert np.load(rows.teacher.rows).tolist() == [3, 0]
    assert rows.views is None
    lacking = match(features, items(3, 4), [])
    with pytest.raises(UsageError, match="other lacks 1 training images; build that index from all training images"):
        further_rows(inputs, config, FurtherIndexes(other, features, None), lacking, tmp_path)


def test_a_run_folder_of_other_images_is_refused(tmp_path):
    features = index(tmp_path / "features", 5)
    views = ViewIndex(features, Path("/photos"), is_given=False)
    inputs, config = TrainingInputs(captions=["train.jsonl"], model="model"), TrainConfig()
    np.save(tmp_path / "view-rows.npy", [[0], [1]])
    indexes = FurtherIndexes(features, None, views)
    kept = further_rows(inputs, config, indexes, match(features, items(3, 0), []), tmp_path).views
    assert kept is not None
    with pytest.raises(UsageError, match=r"holds the views of 2 photos, but there are 3: .*; set run\.dir to another"):
        further_rows(inputs, config, indexes, match(features, items(3, 0, 1), []), tmp_path)
    data = {field.name: np.arange(2) for field in fields(TrainingData)}
    TrainingData(**{**data, "rows": np.array([3, 0])}).save(tmp_path / "data")
    check_images(tmp_path / "data", np.array([3, 0]))
    with pytest.raises(UsageError, match=r"data contains the training data of other images: .*; set run\.dir"):
        check_images(tmp_path / "data", np.array([3, 1]))
