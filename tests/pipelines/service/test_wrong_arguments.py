"""Wrong arguments of searches."""

import numpy as np
import pytest
from PIL import Image

from edje_index import TokenIndex
from storage_formats import UsageError

TEXTS = ["a dog", "a red canoe"]
LONE = "a \ud800 dog"
COUNTS = (0, -1, 1.5, float("nan"), True, "3", [1])
IMAGES = (
    None,
    1.5,
    True,
    -1,
    10**6,
    10**30,
    b"no image",
    [1],
    "none.jpg",
    "a\0b",
    "\ud800",
    np.zeros((8, 8, 3), np.uint8),
    Image.new("RGB", (0, 3)),
)
QUERIES = ("", " \n", LONE, None, 3, True)
LISTS = (None, 3, "a dog", b"a dog", {"a dog"}, [" "], ["a dog", 3], [LONE], [], [[""]])
SCORES = (3, "x", b"logit", ["logit"])
FILTERS = (3, "", LONE, ["width"])

# wrong values by method and argument
WRONG = {
    ("search", "text"): (*QUERIES, b"a dog", {"a dog": 1}, ["a dog", " "], [[LONE]]),
    ("search", "k"): (*COUNTS, None),
    ("search_texts", "k"): (*COUNTS, None),
    ("search_image", "k"): (*COUNTS, None),
    ("search", "pool"): (*COUNTS, 2),
    ("search_texts", "pool"): (*COUNTS, 2),
    ("search", "min_relevance"): (float("nan"), -0.1, 1.1, True, np.True_, None, "0.2"),
    ("search", "score"): SCORES,
    ("search_texts", "score"): SCORES,
    ("search", "where"): FILTERS,
    ("search_image", "where"): FILTERS,
    ("search_texts", "image"): IMAGES,
    ("search_image", "image"): IMAGES,
    ("search_texts", "texts"): (*LISTS, np.array([[1]])),
    ("rerank", "text"): QUERIES,
    ("rerank", "rows"): (None, 3, "3", {1}, [1.5], [True], [None], [LONE], [10**30]),
    ("score_pairs", "pairs"): (
        *(None, "x", [None], [("a dog",)], [(3, 3)], [(LONE, 3)]),
        *([("a dog", value)] for value in (None, b"x", "none.jpg", 1.5)),
    ),
    ("with_precision", "precision"): (None, 3, "fp7", ["bf16"]),
}
DEFAULTS = {
    "search": {"text": "a dog", "k": 3},
    "search_texts": {"image": 1, "texts": TEXTS, "k": 3},
    "search_image": {"image": Image.new("RGB", (9, 9))},
    "rerank": {"text": "a dog", "rows": [1]},
}


@pytest.fixture(scope="module")
def library(index):
    return TokenIndex.open(index)


@pytest.mark.parametrize(("method", "name"), WRONG)
def test_the_library_refuses_wrong_arguments(library, method, name):
    for value in WRONG[method, name]:
        arguments = {**DEFAULTS.get(method, {}), name: value}
        with pytest.raises(UsageError) as refused:
            getattr(library, method)(**arguments)
        # the message can be printed
        str(refused.value).encode()
