"""Settings of `train`: presets, files, --set and options in this order, and errors
that say what to write.
"""

import tomllib
from pathlib import Path

import pytest

from edje_index.training.config import PRESETS, validated
from pipelines.cli import main
from pipelines.cli.train import describe_settings, read_settings, train
from pipelines.jobs.training.job import describe_record
from storage_formats.errors import UsageError


def grouped(index="data.edje", dev="dev.edje", out=Path("out")):
    return {"inputs": {"index": index, "dev": dev}, "run": {"out": out}}


def read(preset="paper", config_file=None, assignments=("loop.steps=5",), **options):
    return validated(
        read_settings(preset, config_file, assignments, grouped(**options)),
    )


def test_later_sources_win(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        "[loop]\nsteps = 1\nseed = 1\nbatch_size = 16\n[optimizer]\nlr = 1\n"
    )
    config = read("small-data", file, ["loop.seed=2", "inputs.dev=x"])
    assert (config.loop.steps, config.loop.seed, config.loop.batch_size) == (1, 2, 16)
    assert config.inputs.dev == "dev.edje"
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (1.0, 40)


def test_zero_and_none_are_values_and_epochs_replace_steps():
    config = read("small-data", None, ["loop.epochs=2.0"])
    assert (config.loop.steps, config.loop.epochs) == (None, 2.0)
    with pytest.raises(UsageError, match=r"write GROUP.KEY=VALUE"):
        read(assignments=["loop.steps"])
    settings = read("small-data", None, ["optimizer.lr=0", "loop.step_tokens=none"])
    assert (settings.optimizer.lr, settings.loop.step_tokens) == (0.0, None)
    assert settings.run.workers == 1
    assert settings.run.folder == Path("out.run").absolute()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed = 3", "speed must be in a group"),
        (
            "[loop]\nlr = 1",
            "no setting is named loop.lr; did you mean alignment.lr or optimizer.lr",
        ),
        ("a = " + "[" * 100_000, "cannot read .*recursion"),
        ("[loop]\nsteps = 'many'", "loop.steps is 'many'"),
        (
            "[optimizer]\nlr = nan",
            "optimizer.lr is nan; input should be a finite number",
        ),
        ("[loop]\nbatch_size = 3", "loop.batch_size is 3 and negatives.count is 3"),
        (
            "[run]\ndevice = 'steam'",
            "run.device is 'steam'",
        ),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, text, words):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read(config_file=tmp_path / "c.toml", assignments=(), dev=None)


def test_the_command_prints_one_line_per_problem_and_exits_with_2(capsys):
    bad = ("--set=run.workers=0", "--set=loop.steps=0", "--set=loop.sted=1")
    assert main(["train", *bad]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 5
    for line in ("inputs.index is missing", "run.out is missing", "loop.steps is 0"):
        assert line in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("changes", "assignments", "words"),
    [
        ({}, ["loop.epochs=none"], "set one of loop.steps and loop.epochs"),
        (
            {},
            ["loop.steps=5", "run.workers=5"],
            "loop.batch_size is 64 and run.workers is 5",
        ),
        (
            {"dev": None},
            ["loop.steps=5", "fitting.pooled_dim=8"],
            "fitting.pooled_dim needs inputs.dev",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, assignments, words):
    with pytest.raises(UsageError, match=words) as error:
        read(assignments=assignments, **changes)
    assert "\n" not in str(error.value)


def test_the_listing_is_a_settings_file(tmp_path):
    assignments = ["loop.seed=4", "run.threads=3", "inputs.init=/m/\N{DOG}\x7f"]
    values = read_settings("small-data", None, assignments, grouped())
    (tmp_path / "all.toml").write_text(describe_settings(values))
    again = read_settings("paper", tmp_path / "all.toml", [], grouped())
    assert validated(again) == validated(values)
    assert tomllib.loads(describe_settings({}))["optimizer"]["lr"] == 3e-4


def test_the_command_of_the_model_card_means_what_its_options_meant():
    """The settings that the shipped model was trained with, without those that are
    gone.
    """
    shipped = {
        "architecture": {
            "language_layers": 4,
            "word_embeddings": "frozen",
            "adapter_hidden": 1536,
            "dropout": 0.1,
            "canonical_captions": False,
        },
        "alignment": {"steps": 800, "batch_size": 128},
        "loop": {
            "steps": 400,
            "batch_size": 32,
            "step_tokens": 48,
            "dtype": "bfloat16",
        },
        "negatives": {"count": 1},
        "objective": {"mlm_weight": 0.0, "recovery_weight": 0.0},
        "optimizer": {
            "lr": 2e-4,
            "adapter_lr_factor": 0.0,
            "decay": "cosine",
            "warmup_steps": 40,
            "clip_norm": 1.0,
        },
        "fitting": {"pooled_dim": 300, "dev_captions": 1000},
    }
    card = (
        Path(__file__).parents[2] / "models/flickr8k-dinov2-small/MODEL_CARD.md"
    ).read_text()
    command = card.partition("edje-index train ")[2].partition("\n    python -m")[0]
    context = train.make_context("train", command.replace("\\\n", " ").split())
    given = dict(context.params)
    del given["show_settings"]
    sources = (given.pop("preset"), given.pop("config_file"), given.pop("assignments"))
    settings = validated(read_settings(*sources, grouped(**given)))
    expected = validated({**shipped, **grouped()})
    ours = {"inputs", "run"}
    assert settings.model_dump(exclude=ours) == expected.model_dump(exclude=ours)
    assert PRESETS["small-data"] == {
        **shipped,
        "loop": {"steps": 400, "batch_size": 32, "step_tokens": 48},
    }
    assert settings.inputs.index == "train.edje"


def test_a_line_has_all_values_of_a_record():
    record = {"phase": "joint", "step": 1000, "steps": 2000, "lr": 3e-4, "loss": 1 / 3}
    assert describe_record(record) == "joint 1,000/2,000, lr 0.0003, loss 0.3333"
