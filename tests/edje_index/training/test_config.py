"""The configuration: the paper's values by default, everything else refused with its name."""

from __future__ import annotations

import pytest

from edje_index.training.config import TrainConfig, leaves, make_config
from storage_formats.errors import UsageError

PAPER = {
    "tokens": 64, "adapter_hidden": 8192, "negatives": 3, "negatives_curriculum": 0, "mlm_probability": 0.5,
    "text_length": 64, "weight_decay": 0.05, "warmup_steps": 100, "warmup_lr": 1e-6, "min_lr": 1e-6, "decay_rate": 0.9,
    "itm": "softmax", "decay": "epoch", "align_steps": 0,
}  # fmt: skip


def test_defaults_are_the_papers():
    flat = TrainConfig().flat()
    assert {name: flat[name] for name in PAPER} == PAPER
    assert TrainConfig().lr == 3e-4
    assert make_config({"phase": "finetune"}).lr == 2e-5
    assert make_config({"phase": "finetune", "lr": 1e-3}).lr == 1e-3


def test_every_leaf_can_be_set_and_explains_itself():
    for name, (group, leaf, _) in leaves().items():
        assert leaf.metadata["help"].endswith((".", "]", ")", "finetune]")), name
        value = TrainConfig().flat()[name]
        assert getattr(getattr(make_config({name: value}), group), name) == value


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
        ({"lr": "fast"}, "'lr' takes a value of type float"),
        ({"lr": float("nan")}, "'lr'"),
        ({"steps": 1.5}, "'steps' takes a value of type int"),
        ({"tokens": 0}, "at least 1"),
        ({"adapter": "magic"}, "compressed, local"),
        ({"steps": 5, "epochs": 1}, "not both"),
        ({"batch_size": 3}, "3 negatives need a batch of more"),
        ({"mlm_probability": 1.5}, "at most 1"),
        ({"pooled_weight": 2.0}, "--pooled-dim"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values, words):
    with pytest.raises(UsageError, match=words):
        make_config(values)
