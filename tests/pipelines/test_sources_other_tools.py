"""Files that Hugging Face Datasets and img2dataset wrote, see
tests/golden/README.md.
"""

from pathlib import Path

import numpy as np
import pytest

from edje_index.images.decode import decode_rgb
from edje_index.inputs.refs import read_bytes
from pipelines.sources import open_source

GOLDEN = Path(__file__).parents[1] / "golden/sources"
COLOURS = {(40 * number, 200 - 30 * number, 90) for number in range(6)}


def colours(refs):
    """The colours of the photos, which JPEG changes by a few units."""
    means = [
        np.asarray(decode_rgb(read_bytes(ref)))[8:24, 8:24].mean(axis=(0, 1))
        for ref in refs
    ]
    return {
        min(COLOURS, key=lambda colour: np.abs(np.subtract(colour, mean)).max())
        for mean in means
    }


def test_hugging_face_datasets():
    refs = list(open_source(str(GOLDEN / "hugging_face.parquet")).iter_inputs())
    assert colours(refs) == COLOURS
    assert [ref.metadata["caption"] for ref in refs] == [
        f"colour {number}" for number in range(6)
    ]
    assert refs[2].metadata["image_path"] == "2.jpg"


@pytest.mark.parametrize("layout", ["webdataset", "parquet", "files"])
def test_img2dataset(layout):
    source = open_source(str(GOLDEN / f"img2dataset_{layout}"))
    refs = list(source.iter_inputs())
    assert colours(refs) == COLOURS
    captions = [f"a photo {number}" for number in range(6)]
    assert sorted(ref.metadata["caption"] for ref in refs) == captions
    if layout != "parquet":
        assert sorted(ref.metadata["captions"][0] for ref in refs) == captions
    assert {ref.metadata["licence"] for ref in refs} == {"cc0"}
    assert source.ignored == {
        ".json": 2,
        **({"(row without an image)": 1} if layout == "parquet" else {".parquet": 2}),
    }
