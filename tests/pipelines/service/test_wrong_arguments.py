"""Wrong arguments of searches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edje_index import TokenIndex
from storage_formats import UsageError

TEXTS = ["a dog", "a red canoe"]
LONE = "a \ud800 dog"
COUNTS = (0, -1, 1.5, float("nan"), True, None, "3", [1])
IMAGES = (None, 1.5, True, -1, 10**6, b"no image", [1], object())
IMAGES_OF_THE_LIBRARY = (
    "",
    "none.jpg",
    "a\0b",
    "\ud800",
    np.zeros((8, 8, 3), np.uint8),
    Image.new("RGB", (0, 3)),
)
QUERIES = ("", " \n", LONE, None, 3, True)
LISTS = (
    None,
    3,
    "a dog",
    b"a dog",
    {"a dog": 1},
    {"a dog"},
    ["a dog", " "],
    ["a dog", 3],
    [LONE],
    [["a dog"]],
)

CASES = [
    *(("search", {"text": value}) for value in (*QUERIES, *LISTS) if value != "a dog"),
    *(
        (method, {"k": value})
        for method in ("search", "search_texts", "search_image")
        for value in COUNTS
    ),
    *(
        (method, {"pool": value})
        for method in ("search", "search_texts")
        for value in (*COUNTS, 2)
        # the default
        if value is not None
    ),
    *(
        ("search", {"min_relevance": value})
        for value in (float("nan"), -0.1, 1.1, True, np.True_, None, "0.2")
    ),
    *(
        (method, {"score": value})
        for method in ("search", "search_texts")
        for value in (3, "x", b"logit", ["logit"])
    ),
    *(
        (method, {"where": value})
        for method in ("search", "search_image")
        for value in (3, "", LONE, ["width"])
    ),
    *(
        ("search_texts", {"image": value})
        for value in (*IMAGES, 10**30, *IMAGES_OF_THE_LIBRARY)
    ),
    *(("search_texts", {"texts": value}) for value in (*LISTS, [], np.array([[1]]))),
    *(
        ("search_image", {"image": value})
        for value in (*IMAGES, 10**30, *IMAGES_OF_THE_LIBRARY)
    ),
    *(("rerank", {"text": value}) for value in QUERIES),
    *(
        ("rerank", {"rows": value})
        for value in (
            None,
            3,
            "3",
            {1: 2},
            {1},
            [1.5],
            [True],
            [None],
            [LONE],
            [10**30],
        )
    ),
    *(
        ("score_pairs", {"pairs": [("a dog", value)]})
        for value in (None, b"x", "none.jpg", Path("none.jpg"), 1.5)
    ),
    *(
        ("score_pairs", {"pairs": value})
        for value in (None, "x", [None], [("a dog",)], [(3, 3)], [(LONE, 3)])
    ),
    *(("with_precision", {"precision": value}) for value in (None, 3, "fp7", ["bf16"])),
]
DEFAULTS = {
    "search": {"text": "a dog", "k": 3},
    "search_texts": {"image": 1, "texts": TEXTS, "k": 3},
    "search_image": {"image": Image.new("RGB", (9, 9))},
    "rerank": {"text": "a dog", "rows": [1]},
    "with_precision": {},
}


@pytest.fixture(scope="module")
def library(index):
    return TokenIndex.open(index)


def outcomes(target, cases, defaults) -> list[tuple[str, str, Exception | None]]:
    """Call the method of `target` that each case names. Return the cases with the
    error that each call raised.
    """
    made = []
    for method, wrong in cases:
        error = None
        try:
            getattr(target, method)(**{**defaults.get(method, {}), **wrong})
        except Exception as caught:
            error = caught
        made.append((method, repr(wrong), error))
    return made


def test_the_library_refuses_wrong_arguments(library):
    cases = outcomes(library, CASES, DEFAULTS)
    assert [case for case in cases if not isinstance(case[-1], UsageError)] == []
    for _, _, error in cases:
        # messages can be printed
        str(error).encode()


def test_sequences_of_any_kind_are_accepted(library):
    expected = library.search_texts(1, TEXTS)
    for texts in (tuple(TEXTS), np.array(TEXTS), iter(TEXTS), (text for text in TEXTS)):
        assert (
            library.search_texts(np.int64(1), texts, k=np.int64(9), pool=np.uint8(9))
            == expected
        )
    hits = library.search(TEXTS, 2)
    assert [library.search(texts, 2) for texts in (np.array(TEXTS), iter(TEXTS))] == [
        hits,
        hits,
    ]
    assert library.rerank("a dog", iter([3, 1])) == library.rerank("a dog", [3, 1])
    count = np.int64(3)
    assert library.search_image(np.int64(1), count) == library.search_image(1, 3)
    assert library.search("a", count, count) == library.search("a", 3, 3)
