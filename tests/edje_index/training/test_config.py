"""The configuration: the paper's values by default; every problem is reported in a line with the setting's name."""

from __future__ import annotations

import pickle

import pytest

from edje_index.training.config import TrainConfig, groups, make_config, setting_names
from edje_index.training.presets import PRESETS
from storage_formats.errors import UsageError

PAPER = {
    "architecture.tokens": 64, "architecture.adapter_hidden": 8192, "negatives.count": 3,
    "negatives.curriculum_steps": 0, "objective.mlm_probability": 0.5, "objective.text_length": 64,
    "objective.itm": "softmax", "optimizer.lr": 3e-4, "optimizer.weight_decay": 0.05, "optimizer.warmup_steps": 100,
    "optimizer.warmup_lr": 1e-6, "optimizer.min_lr": 1e-6, "optimizer.decay_rate": 0.9, "optimizer.decay": "epoch",
    "alignment.steps": 0,
}  # fmt: skip


def value_of(config: TrainConfig, name: str) -> object:
    group, key = name.split(".")
    return getattr(getattr(config, group), key)


def test_defaults_are_the_papers():
    assert {name: value_of(TrainConfig(), name) for name in PAPER} == PAPER
    assert make_config(PRESETS["paper"]) == TrainConfig()
    assert make_config(PRESETS["paper-finetune"]).optimizer.lr == 2e-5


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    make_config(PRESETS[name])


def test_every_setting_can_be_set_and_has_a_description():
    for group, kind in groups(TrainConfig).items():
        for key, field in kind.model_fields.items():
            assert field.description.endswith("."), key
            value = value_of(TrainConfig(), f"{group}.{key}")
            assert value_of(make_config({group: {key: value}}), f"{group}.{key}") == value
    assert "alignment.steps" in setting_names(TrainConfig)


@pytest.mark.parametrize(
    ("group", "values", "words"),
    [
        ("optimizer", {"learning_rate": 1}, "no setting is named optimizer.learning_rate"),
        ("loop", {"lr": 1}, "no setting is named loop.lr; did you mean alignment.lr or optimizer.lr?"),
        ("optimizer", {"lr": "fast"}, "optimizer.lr is 'fast'; input should be a valid number"),
        ("optimizer", {"lr": float("nan")}, "optimizer.lr is nan; input should be a finite number"),
        ("optimizer", {"lr": True}, "optimizer.lr is True; input should be a valid number"),
        ("loop", {"steps": 1.5}, "loop.steps is 1.5; input should be a valid integer"),
        ("architecture", {"tokens": 0}, "architecture.tokens is 0; input should be greater than or equal to 1"),
        (
            "architecture",
            {"adapter": "magic"},
            "architecture.adapter is 'magic'; input should be 'compressed', 'local'",
        ),
        ("loop", {"steps": 5, "epochs": 1}, "loop.steps is 5 and loop.epochs is 1; set one of them"),
        ("loop", {"batch_size": 3}, "loop.batch_size is 3 and negatives.count is 3"),
        ("objective", {"mlm_probability": 1.5}, "objective.mlm_probability is 1.5"),
        ("objective", {"text_length": 65}, "objective.text_length is 65; input should be less than or equal to 64"),
        ("fitting", {"pooled_weight": 2.0}, "fitting.pooled_weight is set without fitting.pooled_dim"),
    ],
)
def test_an_invalid_setting_is_named(group, values, words):
    with pytest.raises(UsageError) as error:
        make_config({group: values})
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_all_problems_are_reported():
    with pytest.raises(UsageError) as error:
        make_config({"loop": {"steps": 0, "seed": "x"}, "aligment": {}})
    assert len(str(error.value).splitlines()) == 3
    assert "did you mean alignment?" in str(error.value)
    with pytest.raises(UsageError) as error:
        make_config({"loop": {"steps": 1, "epochs": 1, "batch_size": 2}})
    assert len(str(error.value).splitlines()) == 2


def test_a_configuration_is_frozen_and_travels_to_workers():
    config = make_config({"loop": {"steps": 5}})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.loop.steps = 6
