"""The report of an index, compared with figures that are computed here from the files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipelines import build_index, quantize_index
from pipelines.jobs.index_report import SAMPLES_PER_REASON, measure_index
from storage_formats import Manifest, TokenStore, read_rows
from tests.conftest import REPO, write_random_index
from tests.pipelines.conftest import write_photo
from tests.pipelines.pages.test_search_page import Page

GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "index"


def ignore(activity: str, done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def index(tmp_path_factory, tiny_bundle) -> Path:
    """Eight photos and seven files that are no image, in two precisions."""
    folder = tmp_path_factory.mktemp("report")
    for seed in range(8):
        write_photo(folder / "photos" / f"{seed}.jpg", seed)
    for number in range(7):
        (folder / "photos" / f"<b>{number}.jpg").write_bytes(f"no image {number}".encode())
    build_index(folder / "photos", folder / "photos.edje", tiny_bundle, engine="inline", threads=1, shard_size=4)
    quantize_index(folder / "photos.edje", ["nvfp4"])
    return folder / "photos.edje"


@pytest.fixture(scope="module")
def report(index):
    return measure_index(index, ["a dog", "snow"], 3, ignore)


def test_failures_have_samples(report, index):
    assert Manifest.load(index).counts.failed == {"not-an-image": 7}
    samples = report.rows.samples["not-an-image"]
    assert len(samples) == SAMPLES_PER_REASON
    uris = read_rows(index, [sample.row_id for sample in samples], ["uri"])["uri"].to_pylist()
    assert [sample.uri for sample in samples] == uris
    assert all("no image" in sample.detail for sample in samples)


def test_sizes_are_those_of_the_files(report, index):
    for part in ("tokens", "embeddings", "rows", "checksums", "ann"):
        files = [path for path in (index / part).rglob("*") if path.is_file() and not path.name.endswith(".json")]
        assert report.bytes_by_part[part] == sum(path.stat().st_size for path in files), part


def test_errors_are_those_of_the_stored_tokens(report, index):
    rows = [
        row["row_id"] for row in read_rows(index, None, ["row_id", "status"]).to_pylist() if row["status"] == "indexed"
    ]
    exact, rough = (
        TokenStore.open(index, name).fetch(rows).astype(np.float64).reshape(-1, 16) for name in ("bf16", "nvfp4")
    )
    errors = np.linalg.norm(rough - exact, axis=1) / np.linalg.norm(exact, axis=1)
    reference, quantized = report.precisions
    assert (reference.name, reference.error, report.reference) == ("bf16", None, "bf16")
    assert quantized.error == pytest.approx(np.median(errors), rel=1e-5)
    assert 0.5 < quantized.cosine < 1
    assert quantized.record_bytes == TokenStore.open(index, "nvfp4").record_bytes
    assert quantized.fetched == 8
    assert quantized.fetch_seconds > 0


def test_times_are_those_of_the_rows(report, index):
    table = read_rows(index, None, ["decode_seconds", "uri"])
    seconds = np.array(table["decode_seconds"])
    stage = report.rows.stages["decode"]
    assert stage.seconds == pytest.approx(seconds.sum(), rel=1e-5)
    assert stage.slowest_uri == table["uri"][int(seconds.argmax())].as_py()


def test_the_page_shows_everything_and_loads_nothing(index, run, tmp_path):
    code, _, err = run("report", index, "--out", tmp_path / "r.html", "--query", "<i>snow</i>", "--quiet")
    assert code == 0, err
    page = Page((tmp_path / "r.html").read_text())
    text = re.sub(r"\s+", " ", "".join(page.text))
    assert "15 = 8 indexed + 0 duplicates + 7 failed" in text
    assert "not-an-image: 7" in text
    assert text.partition("slowest input")[0].count("<b>") == SAMPLES_PER_REASON
    assert "“<i>snow</i>”" in text
    assert "Most work: " in text
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 6
    assert all(reference.startswith("data:image/jpeg;base64,") for reference in page.references())
    assert not [tag for tag, _ in page.tags if tag in ("script", "b", "i")]


def test_an_index_without_a_model_has_a_report(tmp_path, run):
    from storage_formats import IndexSpec

    write_random_index(tmp_path / "index", IndexSpec(5, 4, (4, 8), 6, ("bf16", "fp8")), failed=frozenset({2}))
    assert run("report", tmp_path / "index", "--out", tmp_path / "r.html")[0] == 0
    text = (tmp_path / "r.html").read_text()
    assert "Left out: " in text
    assert "truncated: 1" in text
    assert "The index records no times." in text


def test_wrong_use_is_refused(tmp_path, run, index):
    assert "no index at" in run("report", tmp_path / "none")[2]
    assert run("report", index, "--query", " ")[0] == 2
    assert run("report", index, "--out", tmp_path)[0] == 2


def test_damage_is_an_error_without_traceback(index, run, tmp_path):
    subprocess.run(["cp", "-r", str(index), str(tmp_path / "index")], check=True)
    (tmp_path / "index" / "rows" / "00000001.parquet").write_bytes(b"damaged")
    code, _, err = run("report", tmp_path / "index", "--out", tmp_path / "r.html", "--quiet")
    assert (code, "Traceback" in err) == (1, False)
    assert "rows/00000001.parquet is not the file" in err
    assert not (tmp_path / "r.html").exists()


def test_info_says_what_its_fingerprint_covers(run):
    assert "encoder fingerprint " in run("info", GOLDEN)[1]
    assert "'edje-index model show' prints the encoder fingerprint of a bundle" in " ".join(
        run("info", "--help")[1].split()
    )
