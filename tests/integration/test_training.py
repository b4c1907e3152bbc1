"""Training from the command line: killed in mid-epoch and resumed, stopped, on two
workers, refused.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from edje_index.bundles.bundle import write_feature_bundle
from edje_index.bundles.info import read_bundle_info
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.scoring.weights import DirectionWeights
from edje_index.training.checkpoints import read_log
from pipelines.cli import main
from pipelines.jobs.build import build_index
from pipelines.jobs.snapshots import set_columns
from tests.command_line import command, environment, run_here, run_process
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts

COLOURS = {
    "red": (200, 20, 20),
    "green": (20, 200, 20),
    "blue": (20, 20, 200),
    "white": (240, 240, 240),
}
PLACES = {
    "left": np.s_[:, :24],
    "right": np.s_[:, 24:],
    "top": np.s_[:24],
    "bottom": np.s_[24:],
}
SETTINGS = (
    "architecture.adapter_hidden=48",
    "architecture.tokens=4",
    "loop.batch_size=8",
    "loop.steps=30",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=5",
    "alignment.steps=4",
    "alignment.batch_size=16",
    "inputs.split=train",
    "inputs.dev_split=dev",
    "run.checkpoint_every=7",
    "run.log_every=1",
    "run.threads=1",
)


def build(folder: Path, model: Path, out: Path, **options: Any) -> None:
    source = folder / "list.jsonl"
    build_index(source, out, model, engine="inline", threads=1, **options)


def make_case(folder: Path) -> None:
    """A tiny model, and an index of features of 33 photos of a coloured half. One photo
    cannot be read, and the last 8 are the split "dev".
    """
    (folder / "photos").mkdir()
    lines = []
    for at in range(33):
        colour = list(COLOURS)[at % 4]
        place = list(PLACES)[at // 4 % 4]
        pixels = (
            np.random.default_rng(at).integers(90, 130, (48, 48, 3)).astype(np.uint8)
        )
        pixels[PLACES[place]] = COLOURS[colour]
        path = folder / "photos" / f"{at}.png"
        Image.fromarray(pixels).save(path)
        if at == 6:
            path.write_bytes(path.read_bytes()[:-2000])
        captions = [f"{colour} at the {place} of {at}", f"the {place} is {colour}"]
        split = "train" if at < 25 else "dev"
        lines.append({"path": f"photos/{at}.png", "captions": captions, "split": split})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    create_untrained_bundle(folder / "model", sizes=TINY)
    write_feature_bundle(folder / "model", folder / "features")
    build(folder, folder / "features", folder / "data.edje")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The folder of `make_case`, and a training that ran without a break."""
    folder = tmp_path_factory.mktemp("training")
    make_case(folder)
    calm = run_here(*with_dev(folder, folder / "calm"))
    assert (calm["steps"], calm["images"], calm["captions"]) == (30, 24, 48)
    assert calm["left_out"] == {"truncated": 1}
    dev = calm["dev"]
    assert (dev["t2i"]["queries"], dev["i2t"]["queries"]) == (16, 8)
    return folder


def training(folder: Path, out: Path, *settings: str) -> list[str | Path]:
    words = [word for each in (*SETTINGS, *settings) for word in ("--set", each)]
    return ["train", folder / "data.edje", "--out", out, *words]


def with_dev(folder: Path, out: Path, *settings: str) -> list[str | Path]:
    return [*training(folder, out, *settings), "--dev", folder / "data.edje"]


def start(arguments: list[str | Path]) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments, "--json"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of steps in the log of a run."""
    return [record for record in read_log(run_dir) if record["phase"] != "captions"]


def wait_for_steps(process: subprocess.Popen, run_dir: Path, lines: int) -> None:
    """Until the log has `lines` lines about steps."""
    deadline = time.monotonic() + 240
    while len(steps_of(run_dir)) < lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def weights(bundle: Path) -> dict[str, str]:
    return {
        name: record["sha256"]
        for name, record in read_bundle_info(bundle).files.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("lines", [13, 2])
def test_a_killed_training_resumes_to_the_same_bits(case, tmp_path, lines):
    """13: in the joint phase, in the middle of its third epoch; 2: before there is
    any checkpoint.
    """
    out = tmp_path / "out"
    process = start(training(case, out))
    wait_for_steps(process, tmp_path / "out.run", lines)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    result = run_here(*training(case, out))
    assert weights(out) == weights(case / "calm")
    assert result["steps"] == 30
    positions = [
        (record["phase"], record["step"]) for record in steps_of(tmp_path / "out.run")
    ]
    assert positions == [
        *(("alignment", step) for step in range(1, 5)),
        *(("joint", step) for step in range(1, 31)),
    ]


def test_a_finished_training_repeats_its_figures(case, capfd):
    options = with_dev(case, case / "calm")
    result = run_here(*options)
    assert result["already_finished"]
    assert main([*map(str, options)]) == 0
    said = capfd.readouterr().out
    assert "already finished  yes" in said
    error = run_here(*options, "--set", "fitting.dev_pool=7", expect=2)["error"]
    assert "other settings of the final score" in error
    error = run_here(*options, "--set", "loop.seed=1", expect=2)["error"]
    assert "calm exists already, and this run did not make it; set run.out" in error


def test_other_settings_and_other_captions_in_the_same_folder_are_named(case, tmp_path):
    shutil.copytree(case / "data.edje", tmp_path / "data.edje")
    set_columns(tmp_path / "data.edje", [1], {"captions": [["another caption"]]})
    changes = ("optimizer.lr=5e-4", "loop.seed=3", "run.workers=2")
    arguments = training(
        tmp_path, tmp_path / "out", *changes, f"run.dir={case}/calm.run"
    )
    error = run_here(*arguments, expect=2)["error"]
    for words in (
        "optimizer.lr was 0.001, is 0.0005",
        "loop.seed was 0, is 3",
        "run.workers was 1, is 2",
        "inputs.index was ",
        "run.dir",
    ):
        assert words in error
    assert "inputs.model" not in error


def test_a_run_that_has_made_nothing_takes_other_settings(case):
    arguments = training(case, case / "late", "loop.steps=6")
    layers = ("--set", "architecture.language_layers=99")
    assert "99" in run_here(*arguments, *layers, expect=1)["error"]
    strided = ("--set", "architecture.adapter=strided")
    error = run_here(*arguments, *strided, expect=2)["error"]
    assert "data.edje does not store the features that a strided adapter" in error
    assert run_here(*arguments)["steps"] == 6


@pytest.mark.parametrize("name", ["calm.run/start/run.json", "calm/training.json"])
def test_a_damaged_record_of_a_run_is_named(case, name):
    path = case / name
    sound = path.read_bytes()
    damages = [
        sound[: len(sound) // 2],
        b"",
        b"\xff" + sound,
        b"[" * 10**5,
        b"[]",
        b"null",
    ]
    out = case / ("calm" if path.name == "training.json" else "moved")
    if path.name == "training.json":
        damages.append(sound.replace(b'"images": 24', b'"images": {}'))
    try:
        for damaged in damages:
            assert damaged != sound
            path.write_bytes(damaged)
            options = with_dev(case, out, f"run.dir={case}/calm.run")
            error = run_here(*options, expect=1)["error"]
            assert error.startswith(f"cannot read {path}: ")
            assert "restore the file, or " in error
    finally:
        path.write_bytes(sound)


def test_the_bundle_builds_and_searches(case, tmp_path):
    build(case, case / "calm", tmp_path / "index")
    hits = run_here("search", tmp_path / "index", "red at the left", "-k", "3")["hits"]
    assert len(hits) == 3
    info = read_bundle_info(case / "calm")
    assert info.trained
    assert "30 steps of 8 pairs" in info.notes
    assert "48 captions of data.edje" in info.notes


@pytest.mark.slow
def test_a_pooled_similarity_and_another_mining_model(case, tmp_path):
    create_untrained_bundle(tmp_path / "miner", seed=9, sizes=TINY)
    build(case, tmp_path / "miner", tmp_path / "miner.edje")
    settings = (
        "loop.steps=6",
        "fitting.pooled_dim=8",
        f"inputs.miner={tmp_path}/miner.edje",
    )
    result = run_here(*with_dev(case, tmp_path / "out", *settings))
    info = read_bundle_info(tmp_path / "out")
    assert info.pooled_similarity["dim"] == 8
    assert info.score.to_json() == result["score"]
    assert result["score"] == {
        "t2i": result["dev"]["t2i"]["weights"],
        "i2t": result["dev"]["i2t"]["weights"],
    }


@pytest.mark.slow
def test_features_in_fewer_bits_give_nearly_the_same_loss(case, tmp_path):
    build(case, case / "features", tmp_path / "data.edje", precisions=["fp8"])
    result = run_here(*training(tmp_path, tmp_path / "out", "loop.steps=2"))
    exact = run_here(*training(case, tmp_path / "exact", "loop.steps=2"))
    assert result["last"]["loss"] != exact["last"]["loss"]
    assert result["last"]["loss"] == pytest.approx(exact["last"]["loss"], abs=0.02)


def test_a_stop_at_the_very_end_leaves_nothing_in_the_way(case, tmp_path, monkeypatch):
    """The bundle is complete, and does not have its name yet."""
    options = training(case, tmp_path / "out", "loop.steps=2")

    rename = Path.rename

    def stop_before_the_bundle_appears(path: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "rename", stop_before_the_bundle_appears)
        assert "To resume" in run_here(*options, expect=130)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.run"]
    result = run_here(*options)
    recorded = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (
        recorded["fingerprint"]
        == result["fingerprint"]
        == read_bundle_info(tmp_path / "out").fingerprint
    )
    assert not result["already_finished"]


def test_the_second_phase_continues_the_run_of_its_initial_bundle(case, tmp_path):
    """The run "calm" has 30 steps, which are five epochs. `SETTINGS` have the learning
    rate 1e-3.
    """
    settings = ("alignment.steps=0", "loop.steps=1")
    phase = [*settings, f"inputs.init={case}/calm"]
    preset = ("--preset", "paper-finetune")
    result = run_here(*training(case, tmp_path / "out", *phase), *preset)
    assert result["last"]["lr"] == pytest.approx(1e-3 * 0.9**5)
    assert not {"mlm", "recovery"} & result["last"].keys()
    shutil.copytree(case / "calm", tmp_path / "copy")
    fresh = [*training(case, tmp_path / "fresh", *settings), *preset]
    assert (
        "optimizer.continued needs inputs.init" in run_here(*fresh, expect=2)["error"]
    )
    fresh += ["--set", f"inputs.init={tmp_path}/copy"]
    error = run_here(*fresh, expect=2)["error"]
    assert "copy.run is not the folder of the run that made" in error
    assert "set optimizer.continued to false" in error
    assert run_here(*fresh, "--set", "optimizer.continued=false")["last"][
        "lr"
    ] == pytest.approx(1e-6)


def test_without_dev_captions_the_weights_of_the_initial_bundle_stay(
    case, tmp_path, capfd
):
    initial = bundle_with_all_parts(case / "calm").save(tmp_path / "initial")
    settings = (
        "alignment.steps=0",
        "optimizer.adapter_lr_factor=0",
        "loop.steps=2",
        f"inputs.init={initial.path}",
    )
    result = run_here(*training(case, tmp_path / "out", *settings))
    info = read_bundle_info(tmp_path / "out")
    assert result["score"] == info.score.to_json() == WEIGHTS.to_json()
    assert info.pooled_similarity == initial.pooled_similarity
    # The adapter was frozen, so indexes of the initial bundle can be searched.
    assert info.encoder_fingerprint == initial.encoder_fingerprint
    said = capfd.readouterr().err
    warning = "are not fitted, but stay as they are: logit + 0.75 x late interaction"
    assert 0 < said.index(warning) < said.index("training on")
    # The weights were not fitted to the tokens of another adapter.
    other = training(case, tmp_path / "other", *settings, "architecture.adapter=local")
    assert run_here(*other)["score"] == DirectionWeights().to_json()


def test_dev_images_that_are_trained_on_or_have_other_features_are_refused(
    case, tmp_path
):
    options = with_dev(case, tmp_path / "out", "inputs.dev_split=none")
    error = run_here(*options, expect=2)["error"]
    assert "24 images are in both the training set and the dev set" in error
    build(case, case / "model", tmp_path / "other.edje")
    options[-1] = tmp_path / "other.edje"
    error = run_here(*options, expect=1)["error"]
    assert "did not build" in error
    assert not (tmp_path / "out.run").exists()


def test_another_kind_of_index_and_an_empty_split_are_refused_at_once(
    case, tmp_path, capfd
):
    build(case, case / "model", tmp_path / "data.edje")
    error = run_here(*training(tmp_path, tmp_path / "out"), expect=2)["error"]
    assert "data.edje does not store the features" in error
    assert "reading captions" not in capfd.readouterr().err
    options = training(case, tmp_path / "out", "inputs.split=tst")
    error = run_here(*options, expect=2)["error"]
    assert error.endswith("of the split 'tst'; its other splits are dev, train")


@pytest.mark.slow
def test_a_student_learns_from_a_teacher(case, tmp_path):
    teacher = tmp_path / "teacher"
    settings = ("loop.steps=3", "architecture.adapter=local")
    run_here(*training(case, teacher, *settings))
    student = ("loop.steps=3", f"inputs.teacher={teacher}", f"inputs.init={teacher}")
    result = run_here(*training(case, tmp_path / "student", *student))
    assert result["last"]["distillation"] > 0
    build(case, teacher, tmp_path / "tokens.edje")
    stored = f"inputs.teacher_features={tmp_path}/tokens.edje"
    other = run_here(*training(case, tmp_path / "again", *student, stored))
    # The same teacher, by its stored tokens, which are rounded.
    assert other["last"]["distillation"] == pytest.approx(
        result["last"]["distillation"], abs=1e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["strided", "clustered", "pruned"])
def test_reductions_are_trained_by_the_same_protocol(case, tmp_path, adapter):
    features = tmp_path / "features"
    reduced = ("--adapter", adapter, "--tokens", "4")
    run_here("model", "features", case / "model", features, *reduced)
    build(case, features, tmp_path / "data.edje")
    settings = (f"architecture.adapter={adapter}", "loop.steps=4")
    result = run_here(*training(tmp_path, tmp_path / "out", *settings))
    assert result["steps"] == 4
    assert read_bundle_info(tmp_path / "out").adapter["kind"] == adapter


@pytest.mark.slow
def test_two_workers_train_one_model(case, tmp_path):
    """Two ranks on Ray, stopped in between, take the steps of one: no chance is
    left but that of the batches.
    """
    still = (
        "loop.steps=100",
        "architecture.dropout=0",
        "objective.mlm_weight=0",
        "alignment.steps=0",
    )
    run_here(*training(case, tmp_path / "one", *still))
    arguments = training(case, tmp_path / "two", *still, "run.workers=2")
    process = start(arguments)
    wait_for_steps(process, tmp_path / "two.run", 1)
    process.terminate()
    _, error = process.communicate(timeout=240)
    assert process.returncode == 1, "it was done before it could be stopped"
    assert "To resume" in error
    run_process(*arguments)
    one_log, two_log = (steps_of(tmp_path / f"{name}.run") for name in ("one", "two"))
    assert (
        [record["step"] for record in two_log]
        == [record["step"] for record in one_log]
        == list(range(1, 101))
    )
    for one, other in zip(one_log[:10], two_log, strict=False):
        assert other["itm"] == pytest.approx(one["itm"], abs=1e-4)
        assert other["recovery"] == pytest.approx(one["recovery"], abs=1e-4)
    assert not (tmp_path / "two.run" / "ray").exists()


IN_TURN = """
import json, sys
from pipelines.cli import main
for words in json.loads(sys.argv[-1]):
    sys.argv[1:] = words
    print("exit code", main(), flush=True)
"""


@pytest.mark.slow
def test_trainings_in_one_process_start_ray_anew_also_after_it_was_killed(
    case, tmp_path
):
    """The raylet of the first training is killed. The last training has a relative
    path.
    """
    workers = "run.workers=2"
    arguments = training(case, tmp_path / "out", "loop.steps=60", workers)
    other = training(case, Path("other"), "loop.steps=2", workers)
    lines = [[*map(str, line)] for line in (arguments, arguments, other)]
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TURN, json.dumps(lines)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(process, tmp_path / "out.run", 1)
    next(
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name() == "raylet"
    ).kill()
    said, error = process.communicate(timeout=480)
    assert process.returncode == 0, error
    assert [line for line in said.splitlines() if "exit code" in line] == [
        "exit code 1",
        "exit code 0",
        "exit code 0",
    ]
    assert (
        "error: Ray ended during the run: its raylet process is gone; the last"
        " checkpoint is kept" in error
    )
    assert f"To resume: edje-index {arguments[0]} {arguments[1]}" in error
    assert read_log(tmp_path / "out.run")[-1]["step"] == 60
    assert read_log(tmp_path / "other.run")[-1]["step"] == 2
