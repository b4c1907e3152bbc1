"""Named sets of settings, as values for `edje_index.training.config.make_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # The defaults: the first phase of the EDJE paper.
    "paper": {},
    # The second phase of the EDJE paper: starts from the bundle of the first phase, with the matching and
    # distillation losses only.
    "paper-finetune": {"objective": {"mlm_weight": 0.0, "recovery_weight": 0.0}, "optimizer": {"lr": 2e-5}},
    # The recipe of the shipped model, for thousands of images and hours on a CPU. The adapter is aligned first and then
    # frozen. The joint encoder is small and trained on the matching loss alone.
    "small-data": {
        "architecture": {
            "canonical_captions": False,
            "adapter_hidden": 1536,
            "language_layers": 4,
            "word_embeddings": "frozen",
            "dropout": 0.1,
            "attention_dropout": 0.0,
        },
        "augmentation": {"views": 4, "patch_dropout": 0.4, "step_tokens": 48},
        "objective": {"mlm_weight": 0.0, "recovery_weight": 0.0},
        "negatives": {"count": 1, "selection": "softmax", "curriculum_steps": 240},
        "alignment": {"steps": 800, "batch_size": 128},
        "optimizer": {
            "lr": 2e-4,
            "adapter_lr_factor": 0.0,
            "decayed": "matrices",
            "decay": "cosine",
            "warmup_steps": 40,
            "clip_norm": 1.0,
        },
        "loop": {"steps": 400, "epoch_of": "images", "batch_size": 32},
        "fitting": {"pooled_dim": 300, "hubness_bank": 2500, "dev_captions": 1000},
    },
}
