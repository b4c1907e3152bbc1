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

import numpy as np
import psutil
import pytest
from PIL import Image

from edje_index.bundles.info import read_bundle_info
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.training.checkpoints import read_log
from pipelines.cli import main
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore
from tests.command_line import command, environment, run_here, run_process

# number of the photo whose file ends early
TRUNCATED = 6
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
OPTIONS = [
    "--set",
    "architecture.adapter_hidden=48",
    "--set",
    "architecture.tokens=4",
    "--set",
    "loop.batch_size=8",
    "--set",
    "optimizer.lr=1e-3",
    "--set",
    "optimizer.warmup_steps=5",
    "--set",
    "alignment.steps=4",
    "--set",
    "alignment.batch_size=16",
    "--set",
    "run.checkpoint_every=7",
    "--set",
    "run.log_every=1",
    "--set",
    "run.threads=1",
]


def write_captions(folder: Path) -> None:
    """32 images of a coloured half; the last 8 are for choosing."""
    (folder / "photos").mkdir()
    lines = []
    for at in range(32):
        colour = list(COLOURS)[at % 4]
        place = list(PLACES)[at // 4 % 4]
        pixels = (
            np.random.default_rng(at).integers(90, 130, (48, 48, 3)).astype(np.uint8)
        )
        pixels[PLACES[place]] = COLOURS[colour]
        path = folder / "photos" / f"{at}.png"
        Image.fromarray(pixels).save(path)
        if at == TRUNCATED:
            path.write_bytes(path.read_bytes()[:-2000])
        texts = [
            f"{colour} at the {place} of number {at}",
            f"the {place} is {colour}",
            *([" "] if at == 3 else []),
        ]
        lines.append(json.dumps({"image": f"{at}.png", "captions": texts}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines[:24]))
    (folder / "dev.jsonl").write_text("".join(lines[24:]))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder with captions, a tiny model, and a training that ran without a break."""
    folder = tmp_path_factory.mktemp("training")
    write_captions(folder)
    create_untrained_bundle(folder / "model", sizes=TINY)
    calm = run_here(
        *training(folder, folder / "calm", features=False),
        "--dev",
        folder / "dev.jsonl",
    )
    assert calm["steps"] == 30
    assert (calm["captions"], calm["left_out"]) == (48, {"blank-caption": 1})
    assert calm["truncated"] == 1
    assert (calm["dev"]["images"]["queries"], calm["dev"]["captions"]["queries"]) == (
        16,
        8,
    )
    return folder


def training(folder: Path, out: Path, *, features: bool = True) -> list[str | Path]:
    given = (
        ["--set", f"inputs.features={folder}/calm.run/features.edje"]
        if features
        else []
    )
    images = [
        "--images",
        folder / "photos",
        "--model",
        folder / "model",
        "--steps",
        "30",
    ]
    return ["train", folder / "train.jsonl", *images, "--out", out, *OPTIONS, *given]


def start(arguments: list[str | Path]) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments, "--json"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )


def wait_for_steps(process: subprocess.Popen, run_dir: Path, lines: int) -> None:
    """Until the log has `lines` lines."""
    deadline = time.monotonic() + 240
    while len(read_log(run_dir)) < lines:
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
        (record["stage"], record["step"]) for record in read_log(tmp_path / "out.run")
    ]
    assert positions == [
        *((0, step) for step in range(1, 5)),
        *((1, step) for step in range(1, 31)),
    ]


def test_a_finished_training_repeats_its_figures(case, capfd):
    options = [
        *training(case, case / "calm", features=False),
        "--dev",
        case / "dev.jsonl",
    ]
    result = run_here(*options)
    assert result["already_finished"]
    assert main([*map(str, options)]) == 0
    said = capfd.readouterr().out
    choice = result["dev"]["images"]
    assert (
        "R@1 of images for 16 dev captions, pool 8: embeddings"
        f" {choice['embedding_recall']:.1%}" in said
    )
    assert (
        f"final {choice['held_out_recall']:.1%} with weights fitted to other images"
        in said
    )
    error = run_here(*options, "--set", "fitting.dev_pool=7", expect=2)["error"]
    assert "other settings of the final score" in error


def test_other_settings_in_the_same_folder_are_named(case):
    error = run_here(
        *training(case, case / "calm"),
        "--set",
        "optimizer.lr=5e-4",
        "--set",
        "loop.seed=3",
        "--set",
        "run.workers=2",
        expect=2,
    )["error"]
    for words in (
        "optimizer.lr was 0.001, is 0.0005",
        "loop.seed was 0, is 3",
        "run.workers was 1, is 2",
        "inputs.features was None",
        "run.dir",
    ):
        assert words in error


def test_a_run_that_has_made_nothing_takes_other_settings(case):
    arguments = [*training(case, case / "late"), "--steps", "6"]
    error = run_here(*arguments, "--set", "architecture.language_layers=99", expect=1)[
        "error"
    ]
    assert "99" in error
    assert run_here(*arguments)["steps"] == 6


@pytest.mark.parametrize("name", ["build/journal.json", "result.json"])
def test_a_damaged_file_of_the_run_folder_is_named(case, name):
    path = case / "calm.run" / name
    sound = path.read_bytes()
    damages = [
        sound[: len(sound) // 2],
        b"",
        b"\xff" + sound,
        b"[" * 10**5,
        b"[]",
        b"null",
    ]
    if name == "result.json":
        damages.append(sound.replace(b'"images": 24', b'"images": {}'))
    try:
        for damaged in damages:
            assert damaged != sound
            path.write_bytes(damaged)
            options = [
                *training(case, case / "calm", features=False),
                "--dev",
                case / "dev.jsonl",
            ]
            error = run_here(*options, expect=1)["error"]
            assert error.startswith(f"cannot read {path}: ")
            assert "restore the file, or " in error
    finally:
        path.write_bytes(sound)


def test_the_bundle_builds_and_searches(case, tmp_path):
    run_here(
        "build",
        case / "photos",
        "--out",
        tmp_path / "index",
        "--model",
        case / "calm",
        "--engine",
        "inline",
    )
    hits = run_here("search", tmp_path / "index", "red at the left", "-k", "3")["hits"]
    assert len(hits) == 3
    info = read_bundle_info(case / "calm")
    assert info.trained
    assert "30 steps of 8 pairs" in info.notes


@pytest.mark.slow
def test_views_a_pooled_similarity_and_another_mining_model(case, tmp_path):
    create_untrained_bundle(tmp_path / "miner", seed=9, sizes=TINY)
    options = [
        "--steps",
        "6",
        "--dev",
        case / "dev.jsonl",
        "--set",
        "augmentation.views=2",
    ]
    options += ["--set", "fitting.pooled_dim=8"]
    options += ["--set", f"inputs.miner={tmp_path}/miner"]
    result = run_here(*training(case, tmp_path / "out"), *options)
    run_dir = tmp_path / "out.run"
    info = read_bundle_info(tmp_path / "out")
    assert not (run_dir / "views").exists()
    assert len(TokenStore.open(run_dir / "views.edje")) == 48
    assert (run_dir / "miner.edje").is_dir()
    assert info.pooled_similarity["dim"] == 8
    assert info.score.to_json() == result["score"]
    assert result["score"] == {
        "t2i": result["dev"]["images"]["weights"],
        "i2t": result["dev"]["captions"]["weights"],
    }


def online(folder: Path, out: Path) -> list[str | Path]:
    return [*training(folder, out, features=False), "--set", "inputs.features=online"]


@pytest.mark.slow
def test_online_features_give_the_losses_of_stored_features(case, tmp_path):
    result = run_here(*online(case, tmp_path / "out"))
    assert (result["steps"], result["truncated"], result["left_out"]) == (
        30,
        1,
        {"blank-caption": 1},
    )
    run_dir = tmp_path / "out.run"
    assert not (run_dir / "features.edje").exists()
    assert TokenStore.open(run_dir / "images.edje").block_shape[0] == 1
    stored, computed = (
        [r for r in read_log(path) if "loss" in r]
        for path in (case / "calm.run", run_dir)
    )
    assert len(stored) == len(computed) == 34
    for one, other in zip(stored, computed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-3)
        assert other["unreadable"] == 0


@pytest.mark.slow
def test_features_in_fewer_bits_give_nearly_the_same_loss(case, tmp_path):
    command = [*training(case, tmp_path / "out", features=False), "--steps", "2"]
    result = run_here(*command, "--set", "inputs.feature_precision=fp8")
    stored = tmp_path / "out.run" / "features.edje"
    assert CommittedIndex.open(stored).manifest.spec.precisions == ("fp8",)
    exact = run_here(*training(case, tmp_path / "exact"), "--steps", "2")
    assert result["last"]["loss"] != exact["last"]["loss"]
    assert result["last"]["loss"] == pytest.approx(exact["last"]["loss"], abs=0.02)
    given = [
        *training(case, tmp_path / "given", features=False),
        "--steps",
        "2",
        "--set",
        f"inputs.features={stored}",
    ]
    assert run_here(*given)["last"]["loss"] == result["last"]["loss"]
    other = run_here(*command, expect=2)["error"]
    assert "inputs.feature_precision" in other


@pytest.mark.slow
def test_a_photo_that_vanishes_during_online_training_is_counted(case, tmp_path):
    """It is there when the embeddings are computed, and gone when the training goes
    on.
    """
    folder = tmp_path / "case"
    shutil.copytree(case, folder, ignore=shutil.ignore_patterns("calm*", "*.edje"))
    assert run_here(*online(folder, folder / "out"), "--steps", "2")["left_out"] == {
        "blank-caption": 1
    }
    shutil.rmtree(folder / "out")
    for path in (
        folder / "out.run" / "checkpoints",
        folder / "out.run" / "result.json",
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "photos" / "9.png").write_bytes(b"")
    result = run_here(*online(folder, folder / "out"), "--steps", "2")
    assert result["left_out"] == {"blank-caption": 1, "changed-since-plan": 1}
    assert "9.png" in (folder / "out.run" / "unreadable-0.jsonl").read_text()
    assert result["last"]["unreadable"] == 1


def test_a_stop_at_the_very_end_leaves_nothing_in_the_way(case, tmp_path, monkeypatch):
    """Between what the run says of its bundle and the bundle itself."""
    options = [*training(case, tmp_path / "out"), "--steps", "2"]

    rename = Path.rename

    def stop_before_the_bundle_appears(path: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "rename", stop_before_the_bundle_appears)
        assert "To resume" in run_here(*options, expect=130)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.run"]
    recorded = json.loads((tmp_path / "out.run" / "result.json").read_text())
    result = run_here(*options)
    assert (
        recorded["fingerprint"]
        == result["fingerprint"]
        == read_bundle_info(tmp_path / "out").fingerprint
    )
    assert not result["already_finished"]


def test_the_second_phase_continues_the_run_of_its_initial_bundle(case, tmp_path):
    """The run "calm" has 30 steps, which are five epochs. `OPTIONS` set the
    learning rate 1e-3.
    """
    phase = ["--preset", "paper-finetune", "--set", "alignment.steps=0", "--steps", "1"]
    result = run_here(
        *training(case, tmp_path / "out"), *phase, "--init", case / "calm"
    )
    assert result["last"]["lr"] == pytest.approx(1e-3 * 0.9**5)
    assert not {"mlm", "recovery"} & result["last"].keys()
    shutil.copytree(case / "calm", tmp_path / "copy")
    fresh = [*training(case, tmp_path / "fresh"), *phase]
    assert (
        "optimizer.continued needs inputs.init" in run_here(*fresh, expect=2)["error"]
    )
    fresh += ["--init", tmp_path / "copy"]
    error = run_here(*fresh, expect=2)["error"]
    assert "copy.run is not the folder of the run that made" in error
    assert "set optimizer.continued to false" in error
    assert run_here(*fresh, "--set", "optimizer.continued=false")["last"][
        "lr"
    ] == pytest.approx(1e-6)


def test_dev_captions_of_images_that_are_trained_on_are_refused(case, tmp_path):
    lines = (case / "train.jsonl").read_text().splitlines(keepends=True)
    parts = [
        json.dumps({**json.loads(line), "split": "dev" if at < 4 else "train"})
        for at, line in enumerate(lines)
    ]
    (case / "all.jsonl").write_text("\n".join(parts))
    arguments = training(case, tmp_path / "out")
    arguments[1] = case / "all.jsonl"
    options = [
        *arguments,
        "--steps",
        "1",
        "--set",
        "inputs.split=train",
        "--dev",
        case / "all.jsonl",
    ]
    error = run_here(*options, expect=2)["error"]
    assert "20 images are in both the training set and the development set" in error
    assert not (tmp_path / "out.run").exists()
    result = run_here(*options, "--set", "inputs.dev_split=dev")
    assert result["dev"]["images"]["queries"] == 8


def test_a_checkpoint_of_an_evaluation_is_exported(case, tmp_path):
    arguments = [
        *training(case, tmp_path / "out"),
        "--dev",
        case / "dev.jsonl",
        "--set",
        "run.keep_best=2",
    ]
    arguments += ["--steps", "4", "--set", "run.evaluate_every=2"]
    run_here(*arguments)
    recalls = {
        record["step"]: record["t2i"]
        for record in read_log(tmp_path / "out.run")
        if record["phase"] == "dev"
    }
    assert list(recalls) == [2, 4]
    chosen = ["--set", "run.export_step=2", "--set", f"run.dir={tmp_path}/out.run"]
    result = run_here(
        *[
            tmp_path / "chosen" if part == tmp_path / "out" else part
            for part in arguments
        ],
        *chosen,
    )
    assert result["steps"] == 2
    assert result["dev"]["images"]["logit_recall"] == recalls[2]
    assert weights(tmp_path / "chosen") != weights(tmp_path / "out")


@pytest.mark.slow
def test_a_student_learns_from_a_teacher(case, tmp_path):
    local = [
        *training(case, tmp_path / "teacher"),
        "--set",
        "architecture.adapter=local",
        "--steps",
        "3",
    ]
    run_here(*local)
    student = [
        *training(case, tmp_path / "student"),
        "--steps",
        "3",
        "--set",
        f"inputs.teacher={tmp_path}/teacher",
    ]
    result = run_here(*student, "--init", tmp_path / "teacher")
    assert result["last"]["distillation"] > 0
    built = [
        "build",
        case / "photos",
        "--out",
        tmp_path / "tokens",
        "--model",
        tmp_path / "teacher",
    ]
    run_here(*built, "--engine", "inline", "--truncated", "load")
    again = [
        *training(case, tmp_path / "again"),
        "--steps",
        "3",
        "--set",
        f"inputs.teacher={tmp_path}/teacher",
    ]
    other = run_here(
        *again,
        "--init",
        tmp_path / "teacher",
        "--set",
        f"inputs.teacher_features={tmp_path}/tokens",
    )
    # The same teacher, by its stored tokens, which are rounded.
    assert other["last"]["distillation"] == pytest.approx(
        result["last"]["distillation"], abs=1e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["strided", "clustered", "pruned"])
def test_reductions_are_trained_by_the_same_protocol(case, tmp_path, adapter):
    arguments = training(case, tmp_path / "out", features=False)
    result = run_here(
        *arguments, "--set", f"architecture.adapter={adapter}", "--steps", "4"
    )
    assert result["steps"] == 4
    assert read_bundle_info(tmp_path / "out").adapter["kind"] == adapter
    patches = [
        *training(case, tmp_path / "of-patches"),
        "--set",
        f"architecture.adapter={adapter}",
        "--steps",
        "4",
    ]
    assert (
        "does not contain the required features"
        in run_here(*patches, expect=2)["error"]
    )


@pytest.mark.slow
def test_two_workers_train_one_model(case, tmp_path):
    """Two ranks on Ray, stopped in between, take the steps of one: no chance is
    left but that of the batches.
    """
    zero = ("architecture.dropout", "objective.mlm_weight", "alignment.steps")
    still = [
        "--steps",
        "100",
        *(word for name in zero for word in ("--set", f"{name}=0")),
    ]
    run_here(*training(case, tmp_path / "one"), *still)
    arguments = [*training(case, tmp_path / "two"), *still, "--set", "run.workers=2"]
    process = start(arguments)
    wait_for_steps(process, tmp_path / "two.run", 1)
    process.terminate()
    _, error = process.communicate(timeout=240)
    assert process.returncode == 1, "it was done before it could be stopped"
    assert "To resume" in error
    run_process(*arguments)
    one_log, two_log = (read_log(tmp_path / f"{name}.run") for name in ("one", "two"))
    assert (
        [record["step"] for record in two_log]
        == [record["step"] for record in one_log]
        == list(range(1, 101))
    )
    for one, other in zip(one_log[:10], two_log, strict=False):
        assert other["itm"] == pytest.approx(one["itm"], abs=1e-4)
        assert other["recovery"] == pytest.approx(one["recovery"], abs=1e-4)
    assert not (tmp_path / "two.run" / "ray").exists()
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    words = [
        *launcher,
        "-m",
        *command(*training(case, tmp_path / "launched"), *still, "--json")[2:],
    ]
    done = subprocess.run(
        words,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    # worker 0 alone prints the result
    assert json.loads(done.stdout)["steps"] == 100
    assert weights(tmp_path / "launched") == weights(tmp_path / "two")


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
    """Each starts Ray for the features, and again for the training. The raylet of
    the first training is killed.
    """
    arguments = [
        *map(str, training(case, tmp_path / "out", features=False)),
        "--steps",
        "60",
        "--set",
        "run.workers=2",
    ]
    other = [
        *map(str, training(case, tmp_path / "other", features=False)),
        "--steps",
        "2",
        "--set",
        "run.workers=2",
    ]
    words = [sys.executable, "-c", IN_TURN, json.dumps([arguments, arguments, other])]
    process = subprocess.Popen(
        words,
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
