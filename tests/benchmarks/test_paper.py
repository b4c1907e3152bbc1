"""The paper's experiments: every listed command exists, every experiment runs on
small data, and no step runs twice.
"""

import json
import subprocess

import numpy as np
import pytest
from PIL import Image

from benchmarks.paper import experiments
from benchmarks.paper.experiments import (
    EXPERIMENTS,
    LANGUAGES,
    MAIN_LANGUAGE,
    MAIN_TOWER,
    TOWERS,
    Study,
    measured,
)
from storage_formats.errors import EdjeError
from tests.command_line import run_here
from tests.test_docs import check_command


def write_data(folder, photos, towers, language):
    """Write a folder with the layout of the paper's data: noise for photos, and one
    bundle and language model.
    """
    rng = np.random.default_rng(0)

    def photo(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(path)
        return [f"the {rng.choice(['red', 'old'])} dog in {path} {n}" for n in range(2)]

    lines = []
    for number in range(photos):
        captions = photo(folder / f"pretrain/{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "captions": captions}))
    (folder / "pretrain" / "cc3m.jsonl").write_text("\n".join(lines))
    for dataset, path in (("flickr30k", "flickr30k-images"), ("coco", "val2014")):
        images = [
            {
                "filename": f"{split}-{number}.png",
                "split": split,
                "sentences": [
                    {"raw": caption}
                    for caption in photo(
                        folder / dataset / path / f"{split}-{number}.png"
                    )
                ],
                **({"filepath": path} if dataset == "coco" else {}),
            }
            for split in ("train", "test")
            for number in range(photos)
        ]
        file = folder / dataset / f"dataset_{dataset}.json"
        file.write_text(json.dumps({"images": images}))
    for kind, name, model in (
        ("towers", MAIN_TOWER, towers),
        ("languages", MAIN_LANGUAGE, language),
    ):
        (folder / kind).mkdir()
        (folder / kind / name).symlink_to(model)
    return folder


@pytest.fixture(scope="module")
def full_data(tmp_path_factory):
    """A folder with the layout of the paper's data, one photo per data set, and
    empty models.
    """
    empty = tmp_path_factory.mktemp("empty")
    folder = write_data(tmp_path_factory.mktemp("full") / "data", 1, empty, empty)
    for kind, names in (("towers", TOWERS), ("languages", LANGUAGES)):
        for name in names:
            (folder / kind / name).mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_listed_command_is_a_command_of_this_version(name, full_data, tmp_path):
    lines = []
    table = measured(
        EXPERIMENTS[name], Study(full_data, tmp_path, lines.append, listing=True)
    )
    for line in lines:
        check_command(line)
    assert lines
    trainings = [line for line in lines if "--preset paper " in line]
    assert all(
        "loop.epochs=45" in line and "loop.batch_size=256" in line for line in trainings
    )
    assert len(lines) == len(set(lines))
    assert not any(row["missing"] for row in table["rows"])
    # nothing ran
    assert table["state"] == "needs data"


def test_missing_data_are_named_with_their_remedy_and_what_is_no_experiment_is_refused(
    run, tmp_path
):
    options = ["--data", tmp_path, "--out", tmp_path / "o"]
    out = run.ok("bench", "paper", "prior-art", "io-test", *options, "--commands")
    assert "bench make-synthetic" in out
    code, out, _ = run("bench", "paper", "language-model", *options)
    assert "\\n" not in out
    assert code == 1
    assert "put the caption files of the pre-training images there" in out
    assert "| - (84.52) |" in out
    err = run.refused("bench", "paper", "tabel", *options)
    assert "choose from prior-art, zero-shot" in err
    assert run.refused("bench", "paper", *options) == err


def test_a_step_runs_once_also_in_a_moved_folder_and_a_failed_step_runs_again(
    tmp_path, monkeypatch
):
    lines = []
    answers = iter([(0, '{"x": 1}'), (2, "")])

    def run(words, **_):
        return subprocess.CompletedProcess(words, *next(answers))

    monkeypatch.setattr(subprocess, "run", run)
    study = Study(tmp_path, tmp_path / "a", lines.append)
    assert [
        study.command("count", "info", study.folder / "model")[1] for _ in range(2)
    ] == [{"x": 1}] * 2
    with pytest.raises(
        EdjeError,
        match=r"edje-index info ended with exit code 2.*the command was: .*none.edje",
    ):
        study.command("info", "info", tmp_path / "none.edje")
    assert not list(study.folder.glob("info-*/report.json"))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Study(tmp_path, tmp_path / "b", lines.append)
    assert moved.command("count", "info", moved.folder / "model")[1] == {"x": 1}
    assert len(lines) == 2


@pytest.fixture
def commands(monkeypatch):
    """The names of the commands that studies run, in this process: a process per
    command would import torch 150 times.
    """
    started = subprocess.run
    names = []

    def run_command(words, **options):
        if words[1:3] != ["-m", "pipelines.cli"]:
            return started(words, **options)
        names.append(words[3])
        engine = ["--engine", "inline"] if words[3] == "build" else []
        # adds --json again
        report = json.dumps(run_here(*words[3:-1], *engine))
        return subprocess.CompletedProcess(words, 0, report)

    monkeypatch.setattr(subprocess, "run", run_command)
    return names


def test_a_trained_model_is_measured_without_training(
    tiny_bundle, run, tmp_path, commands
):
    """The rows that the paper has for it, with intervals; no other row."""
    data = write_data(tmp_path / "data", 4, tiny_bundle, tiny_bundle)
    out = tmp_path / "out"
    command = ["bench", "paper", "--model", tiny_bundle, "--data", data, "--out", out]
    printed = run.json(*command)
    assert "train" not in commands
    tables = printed
    assert set(tables) == set(experiments.OF_A_MODEL)
    measured = {
        row["label"] for table in tables.values() for row in table["rows"] if row["own"]
    }
    pools = {f"64 tokens, pool {pool}" for pool in (5, 10, 20, 50, 100)}
    precisions = {f"64 tokens, {name}" for name in ("bf16", "fp8", "nvfp4", "sign1")}
    kinds = ("embeddings", "re-ranked, 64 tokens")
    towers = {f"{MAIN_TOWER}: {kind}" for kind in kinds}
    assert measured == {"Compressed-64, ViT-L/16"} | pools | precisions | towers
    row = next(row for row in tables["pool-size"]["rows"] if row["own"])
    low, high = row["intervals"]["T2I R@1"]
    assert low <= row["own"]["T2I R@1"] <= high
    table = (out / "pool-size.md").read_text()
    assert f"{row['own']['T2I R@1']:.1f} [{low:.1f}, {high:.1f}]" in table
