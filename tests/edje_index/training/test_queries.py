from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.distributed import Ranks
from edje_index.training.loop.train_worker import train_rank
from edje_index.training.model.query_init import begin_at_clusters


def test_every_token_begins_as_a_mean_of_patches_of_one_sort():
    generator = torch.Generator().manual_seed(0)
    sorts = torch.randn(8, 32, generator=generator) * 3
    kind = torch.randint(8, (20, 16), generator=generator)
    patches = sorts[kind] + 0.3 * torch.randn(20, 16, 32, generator=generator)
    adapter = build_adapter(AdapterConfig("compressed", 8, 32, 16, hidden_dim=8, num_heads=4))
    begin_at_clusters(adapter, patches, generator)
    seen = []
    adapter.layernorm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    every_sort = (sorts + 5)[None]  # one patch of each, around another mean
    adapter(every_sort)
    mean = patches.reshape(-1, 32).mean(dim=0)
    nearest = torch.cdist(seen[0][0] + mean, sorts + 5).argmin(dim=1)
    assert sorted(nearest.tolist()) == list(range(8))


@pytest.mark.parametrize("patches", [torch.randn(1, 7, 32), torch.ones(4, 16, 32)])
def test_patches_that_make_no_clusters_change_nothing(patches):
    adapter = build_adapter(AdapterConfig("compressed", 8, 32, 16, hidden_dim=8, num_heads=4))
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    begin_at_clusters(adapter, patches, torch.Generator().manual_seed(0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())


def query_after(task) -> torch.Tensor:
    train_rank(task, Ranks(), lambda: False)
    return Checkpoints(task.runtime.run_dir, task.run).latest().weights["adapter.query"]


@pytest.mark.parametrize(
    ("new", "setting", "kept"),
    [(True, "clusters", False), (True, "fitted", False), (True, "kept", True), (False, "clusters", True)],
)
def test_an_adapter_that_has_learned_something_keeps_its_queries(tmp_path, case, new, setting, kept):
    still = {"align_lr": 0.0, "lr": 0.0, "warmup_lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "steps": 1}
    task = case.task(tmp_path, align_steps=1, align_batch_size=8, align_start=setting, **still)
    begun = ModelBundle.load(task.start).adapter.query
    assert torch.equal(query_after(replace(task, new_adapter=new)), begun) == kept
