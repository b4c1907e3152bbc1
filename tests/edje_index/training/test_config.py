"""The configuration: the paper's values by default; every problem is reported in a
line with the setting's name.
"""

import operator

import pytest

from edje_index.training.config import PRESETS, merge_settings, validated
from storage_formats.errors import UsageError

# of the paper's table of training hyperparameters
TABLE = {
    "architecture.adapter_hidden": 8192,
    "objective.mlm_probability": 0.5,
    "negatives.count": 3,
    "optimizer.lr": 3e-4,
    "optimizer.weight_decay": 0.05,
    "optimizer.warmup_steps": 100,
    "optimizer.warmup_lr": 1e-6,
    "optimizer.min_lr": 1e-6,
    "optimizer.decay_rate": 0.9,
}
# of its sections Vision-language adapter layer and Experimental Setup, and its tables
# of results
TEXT = {
    "architecture.adapter": "compressed",
    "architecture.tokens": 64,
    "architecture.language_layers": None,
    "architecture.word_embeddings": "trained",
}
# of the published pretrain_model.py, train.py, utils.py and data/utils.py, where
# gradients are not clipped
CODE = {
    "architecture.canonical_captions": True,
    "architecture.dropout": None,
    "objective.mlm_weight": 1.0,
    "objective.recovery_weight": 1.0,
    "optimizer.adapter_lr_factor": 1.0,
    "optimizer.decay": "epoch",
    "optimizer.clip_norm": 0.0,
}
# additions of this project, which are off; the published configuration has batches of
# 32 on each of 8 GPUs, in bfloat16
OURS = {
    "loop.step_tokens": None,
    "loop.batch_size": 64,
    "loop.dtype": "auto",
    "alignment.steps": 0,
    "alignment.batch_size": 256,
    "alignment.captions": 5,
    "alignment.lr": 1e-3,
    "optimizer.continued": False,
}
DEFAULTS = {**TABLE, **TEXT, **CODE, **OURS}
# what the second phase changes: the losses of pretrain_model.py with `finetune`, the
# rate of the table; train.py reads the state of Adam and the epoch of the checkpoint
FINETUNE = {
    "objective.mlm_weight": 0.0,
    "objective.recovery_weight": 0.0,
    "optimizer.lr": 2e-5,
    "optimizer.continued": True,
}


def preset(name, **settings):
    required = {"inputs": {"index": "i", "init": "m", "dev": "d"}, "run": {"out": "o"}}
    return validated(merge_settings(name, {"loop": {"steps": 9}}, required, settings))


def values_of(config):
    return {name: operator.attrgetter(name)(config) for name in DEFAULTS}


def test_the_defaults_are_those_of_the_paper():
    assert PRESETS["paper"] == {"loop": {"epochs": 45}}
    assert values_of(preset("paper")) == DEFAULTS
    assert values_of(preset("paper-finetune")) == {**DEFAULTS, **FINETUNE}
    for name in PRESETS:
        preset(name)


def test_a_number_may_name_a_split():
    settings = {"inputs": {"index": "i", "split": 1}, "run": {"out": "o"}}
    assert validated(merge_settings("quick", {}, settings)).inputs.split == "1"


def test_all_problems_are_reported():
    with pytest.raises(UsageError) as error:
        preset("paper", loop={"steps": 0, "seed": "x"}, aligment={})
    assert len(str(error.value).splitlines()) == 3
    assert "did you mean alignment?" in str(error.value)
    with pytest.raises(UsageError) as error:
        preset("paper", loop={"steps": 1, "epochs": 1, "batch_size": 2})
    assert len(str(error.value).splitlines()) == 2
