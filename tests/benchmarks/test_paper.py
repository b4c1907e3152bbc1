"""The paper's experiments: every listed command exists, every experiment runs on small data, and no step runs twice."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image

from benchmarks.paper.data import LANGUAGES, TOWERS, FullData, MissingDataError
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.study import Study
from benchmarks.paper.tables import Row, Table
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines.cli.main import cli
from storage_formats.errors import EdjeError

PHOTOS = 16


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    """A bundle of random weights whose tower has 64 patches, so that every adapter can make 64 tokens of them."""
    create_untrained_bundle(tmp_path / "towers", sizes=replace(TINY, image_size=8 * TINY.patch_size))
    return tmp_path / "towers"


@pytest.fixture
def small_data(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
    """A folder with the layout of the small data: noise for photos, and the language model of the tiny bundle."""
    folder = tmp_path_factory.mktemp("small")
    rng = np.random.default_rng(0)
    (folder / "flickr8k" / "images").mkdir(parents=True)
    for split in ("train", "dev"):
        lines = []
        for number in range(2 * PHOTOS):
            name = f"images/{split}-{number}.png"
            Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(folder / "flickr8k" / name)
            captions = [f"the {rng.choice(['red', 'old'])} dog number {number} {word}" for word in ("runs", "sits")]
            lines.append(json.dumps({"image": name, "captions": captions}) + "\n")
        (folder / "flickr8k" / f"captions_{split}.jsonl").write_text("".join(lines))
    shutil.copytree(tiny_bundle, folder / "weights" / "minilm_l6_h384")
    return folder


@pytest.fixture
def full_data(tmp_path: Path) -> Path:
    """A folder with the layout of the paper's data, and one photo per data set."""
    folder = tmp_path / "data"
    entry = {"filename": "0.jpg", "filepath": "val2014", "sentences": [{"raw": "a dog"}]}
    for path in ("flickr30k/dataset_flickr30k.json", "coco/dataset_coco.json"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(json.dumps({"images": [{**entry, "split": split} for split in ("train", "test")]}))
    (folder / "flickr30k" / "flickr30k-images").mkdir()
    (folder / "pretrain").mkdir()
    (folder / "pretrain" / "cc3m.jsonl").write_text('{"image": "0.jpg", "captions": ["a dog"]}')
    for name in TOWERS:
        (folder / "towers" / name).mkdir(parents=True)
    for name in LANGUAGES:
        (folder / "languages" / name).mkdir(parents=True)
    return folder


def parse(line: str) -> None:
    """Parse a command line as `edje-index` does, without running it; paths may be missing."""
    program, *arguments = shlex.split(line)
    assert program == "edje-index"
    group: click.Command = cli
    while isinstance(group, click.Group):
        found = group.get_command(click.Context(group), arguments[0])
        assert found is not None, line
        group, arguments = found, arguments[1:]
    try:
        group.make_context(program, arguments)
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():
            raise


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_listed_command_is_a_command_of_this_version(name, full_data, tmp_path):
    lines: list[str] = []
    table = EXPERIMENTS[name](Study(FullData(full_data), tmp_path / "steps", lines.append, listing=True))
    commands = [line for line in lines if not line.startswith("measure ")]
    for line in commands:
        parse(line)
    assert commands
    assert len(lines) == len(set(lines))
    assert not any(row.missing for row in table.rows)
    assert table.state == "needs data"  # nothing ran


def test_missing_data_are_named_with_their_remedy(run, tmp_path):
    (tmp_path / "data").mkdir()
    code, out, _ = run(
        "bench", "paper", "prior-art", "io-test", "--data", tmp_path / "data", "--out", tmp_path / "o", "--commands"
    )
    assert code == 0
    assert "bench fetch --synthetic 100000" in out
    code, out, _ = run("bench", "paper", "language-model", "--data", tmp_path / "data", "--out", tmp_path / "o")
    assert code == 1
    assert "put the caption files of the pre-training images there" in out
    assert "| - (84.52) |" in out


def test_what_is_no_experiment_is_refused(run, tmp_path):
    code, out, err = run("bench", "paper", "tabel", "--data", tmp_path, "--out", tmp_path / "o")
    assert (code, out) == (2, "")
    assert "there is no experiment 'tabel': choose from prior-art, zero-shot" in err


def test_without_an_experiment_the_list_is_printed(run, tmp_path):
    code, out, _ = run("bench", "paper", "--data", tmp_path, "--out", tmp_path / "o")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(EXPERIMENTS)


def test_a_step_runs_once_also_in_a_moved_folder_and_a_failed_step_runs_again(tmp_path):
    lines: list[str] = []
    study = Study(FullData(tmp_path), tmp_path / "a", lines.append)
    calls = iter([{"x": 1}, {"x": 2}])
    inputs = tmp_path / "a" / "model"
    assert [study.measure("count", [inputs], lambda: next(calls)) for _ in range(2)] == [{"x": 1}] * 2
    missing = tmp_path / "none.edje"
    with pytest.raises(EdjeError, match=rf"edje-index info ended with exit code .*the command was: .*{missing}"):
        study.command("info", "info", missing)
    assert not list((tmp_path / "a").glob("info-*/report.json"))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Study(FullData(tmp_path), tmp_path / "b", lines.append)
    assert moved.measure("count", [tmp_path / "b" / "model"], lambda: next(calls)) == {"x": 1}
    assert len(lines) == 2


def test_a_table_shows_own_figures_beside_those_of_the_paper():
    def missing() -> dict[str, float]:
        raise MissingDataError("towers/x is missing; make this bundle")

    table = Table("Title", "Table 9", ("R@1", "kB"), notes=("note",))
    table.add("first", {"R@1": 50.0}, lambda: {"R@1": 12.345, "kB": None})
    table.add("second", {"kB": 49}, missing)
    assert table.lines()[4:] == [
        "|  | R@1 | kB |",
        "| --- | --- | --- |",
        "| first | 12.3 (50) | - |",
        "| second | - | - (49) |",
        "",
        "- note",
        "- second was not measured: towers/x is missing; make this bundle",
    ]
    assert table.state == "partial"
    assert table.rows[1] == Row("second", {}, {"kB": 49}, "towers/x is missing; make this bundle")


@pytest.mark.slow
def test_every_experiment_runs_on_small_data(run, small_data, towers, tmp_path):
    command = [
        "bench",
        "paper",
        "all",
        "--data",
        small_data,
        "--small",
        "--model",
        towers,
        "--out",
        tmp_path / "o",
    ]
    code, out, err = run(*command, "--json")
    assert code == 0, err
    tables = json.loads(out)
    assert list(tables) == list(EXPERIMENTS)
    states = {name: table["state"] for name, table in tables.items()}
    # Towers and language models that the small data lack.
    partial = {"prior-art": "partial", "zero-shot": "partial", "mining": "partial", "language-model": "needs data"}
    assert states == {name: partial.get(name, "complete") for name in EXPERIMENTS}
    for name in EXPERIMENTS:
        assert (tmp_path / "o" / f"{name}.md").read_text().startswith("## ")
    code, again, err = run(*command, "--json")
    assert (code, again) == (0, out)
    assert "edje-index" not in err, "a finished step ran again"
