"""The configuration: the paper's values by default; every problem is reported in a
line with the setting's name.
"""

from __future__ import annotations

import operator

import pytest

from edje_index.training.config import PRESETS, TrainSettings, merge_settings, validated
from storage_formats.errors import UsageError

TABLE = "paper, table of training hyperparameters"
MODEL = "published pretrain_model.py"
TRAINER = "published train.py and utils.py"
DATA = "published data/"
OFF = "ours: an addition that is off"
# defaults with where they come from
SOURCES = {
    "architecture.adapter": (
        "compressed",
        "paper, section Vision-language adapter layer",
    ),
    "architecture.tokens": (64, "paper, tables of results"),
    "architecture.adapter_hidden": (8192, TABLE),
    "architecture.language_layers": (
        None,
        "paper, section Experimental Setup: all 12 of MiniLM-L12",
    ),
    "architecture.canonical_captions": (True, f"{DATA}utils.py, pre_caption"),
    "architecture.word_embeddings": (
        "trained",
        "paper, section Experimental Setup: the language model is trained",
    ),
    "architecture.dropout": (None, f"{MODEL}: that of the language model"),
    "loop.step_tokens": (None, OFF),
    "objective.mlm_weight": (1.0, f"{TRAINER}: a sum of losses"),
    "objective.mlm_probability": (0.5, TABLE),
    "objective.recovery_weight": (1.0, f"{TRAINER}: a sum of losses"),
    "negatives.count": (3, TABLE),
    "alignment.steps": (0, OFF),
    "alignment.batch_size": (256, OFF),
    "alignment.captions": (5, OFF),
    "alignment.lr": (1e-3, OFF),
    "optimizer.lr": (3e-4, TABLE),
    "optimizer.adapter_lr_factor": (1.0, f"{TRAINER}: one learning rate"),
    "optimizer.weight_decay": (0.05, TABLE),
    "optimizer.continued": (False, OFF),
    "optimizer.warmup_steps": (100, TABLE),
    "optimizer.warmup_lr": (1e-6, TABLE),
    "optimizer.min_lr": (1e-6, TABLE),
    "optimizer.decay": ("epoch", f"{TRAINER}, step_lr_schedule"),
    "optimizer.decay_rate": (0.9, TABLE),
    "optimizer.clip_norm": (0.0, f"{TRAINER}: gradients are not clipped"),
    "loop.batch_size": (
        64,
        "ours: the published configuration has 32 per GPU and its README 8 GPUs",
    ),
    "loop.dtype": ("auto", f"{TRAINER}: bfloat16 on a GPU; ours: float32 on a CPU"),
}
# what the second phase changes
FINETUNE = {
    "objective.mlm_weight": (0.0, f"{MODEL}, forward with finetune"),
    "objective.recovery_weight": (0.0, f"{MODEL}, forward with finetune"),
    "optimizer.lr": (2e-5, TABLE),
    "optimizer.continued": (
        True,
        f"{TRAINER}: the state of Adam and the epoch are read from the checkpoint",
    ),
}


def preset(name: str, **settings: object) -> TrainSettings:
    required = {"inputs": {"index": "i", "init": "m", "dev": "d"}, "run": {"out": "o"}}
    return validated(merge_settings(name, {"loop": {"steps": 9}}, required, settings))


def values_of(config: TrainSettings) -> dict[str, object]:
    return {name: operator.attrgetter(name)(config) for name in SOURCES}


def test_the_defaults_are_those_of_the_paper():
    defaults = {name: value for name, (value, _) in SOURCES.items()}
    assert PRESETS["paper"] == {"loop": {"epochs": 45}}
    assert values_of(preset("paper")) == defaults
    finetune = {name: value for name, (value, _) in FINETUNE.items()}
    assert values_of(preset("paper-finetune")) == {**defaults, **finetune}
    for name in PRESETS:
        preset(name)


def test_all_problems_are_reported():
    with pytest.raises(UsageError) as error:
        preset("paper", loop={"steps": 0, "seed": "x"}, aligment={})
    assert len(str(error.value).splitlines()) == 3
    assert "did you mean alignment?" in str(error.value)
    with pytest.raises(UsageError) as error:
        preset("paper", loop={"steps": 1, "epochs": 1, "batch_size": 2})
    assert len(str(error.value).splitlines()) == 2
