from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import AdapterConfig, CompressionAdapter, build_adapter
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.train_worker import run_worker
from edje_index.training.model.adapter_init import init_from_features, init_queries


def test_every_token_starts_as_the_mean_of_similar_patches():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 32, generator=generator) * 3
    cluster = torch.randint(8, (20, 16), generator=generator)
    patches = centres[cluster] + 0.3 * torch.randn(20, 16, 32, generator=generator)
    adapter = build_adapter(AdapterConfig("compressed", 8, 32, 16, hidden_dim=8, num_heads=4))
    init_queries(adapter, patches, generator)
    attended = []
    adapter.layernorm.register_forward_hook(lambda _, inputs, __: attended.append(inputs[0]))
    one_of_each = (centres + 5)[None]  # around another mean
    adapter(one_of_each)
    mean = patches.reshape(-1, 32).mean(dim=0)
    nearest = torch.cdist(attended[0][0] + mean, centres + 5).argmin(dim=1)
    assert sorted(nearest.tolist()) == list(range(8))


@pytest.mark.parametrize("patches", [torch.randn(1, 7, 32), torch.ones(4, 16, 32)])
def test_patches_without_clusters_change_nothing(patches):
    adapter = build_adapter(AdapterConfig("compressed", 8, 32, 16, hidden_dim=8, num_heads=4))
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    init_queries(adapter, patches, torch.Generator().manual_seed(0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())


def initialised(case) -> CompressionAdapter:
    adapter = ModelBundle.load(case.bundle).adapter
    assert isinstance(adapter, CompressionAdapter)
    source = case.source()
    init_from_features(adapter, source.features, source.data, source.config.loop.seed)
    return adapter


def test_the_seed_decides_the_queries_and_the_projection_stays(case):
    first, second = initialised(case).state_dict(), initialised(case).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    before = ModelBundle.load(case.bundle).adapter.state_dict()
    assert torch.equal(first["projection.weight"], before["projection.weight"])
    assert not torch.equal(first["key.weight"], before["key.weight"])


@pytest.mark.parametrize(
    ("new_adapter", "setting", "kept"), [(True, "clusters", False), (True, "kept", True), (False, "clusters", True)]
)
def test_a_trained_adapter_keeps_its_queries(tmp_path, case, new_adapter, setting, kept):
    frozen = {
        "alignment__lr": 0.0,
        "optimizer__lr": 0.0,
        "optimizer__warmup_lr": 0.0,
        "optimizer__min_lr": 0.0,
        "optimizer__weight_decay": 0.0,
        "loop__steps": 1,
    }
    task = case.task(tmp_path, alignment__steps=1, alignment__batch_size=8, alignment__adapter_init=setting, **frozen)
    before = ModelBundle.load(task.start).adapter.query
    run_worker(replace(task, new_adapter=new_adapter), WorkerGroup(), lambda: False)
    after = Checkpoints(task.runtime.run_dir, task.run).latest().weights["adapter.query"]
    assert torch.equal(after, before) == kept
