"""The loop: resuming, stopping, the checkpoint, the guard against gradients that are
no numbers, the log.
"""

from dataclasses import replace

import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.weights import read_checkpoint
from edje_index.training import loop
from edje_index.training.batches import BatchSource
from edje_index.training.checkpoints import CHECKPOINT, last_checkpoint, read_log
from edje_index.training.config import PRESETS, OptimizerConfig
from edje_index.training.loop import (
    finish_model,
    learning_rate,
    make_optimizer,
    run_worker,
    total_steps,
)
from edje_index.training.start import make_trainable
from edje_index.training.step import JointObjective
from edje_index.training.workers import WorkerGroup
from storage_formats.errors import TaskInterrupted, UsageError
from tests.conftest import largest_file


def never():
    return False


class StopAfter:
    """Returns True from call number `calls` on."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def weights(run_dir):
    return last_checkpoint(run_dir, "run").weights


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def adapter_of(weights):
    prefix = "adapter."
    return {
        name.removeprefix(prefix): weights[name]
        for name in weights
        if name.startswith(prefix)
    }


def test_a_stopped_training_goes_on_to_the_same_bits(case, tmp_path):
    """Of both phases: two alignment steps, six joint ones, dropout on. It stops once
    in each phase, and its last checkpoint is damaged.
    """
    phases = {"alignment__steps": 2, "alignment__batch_size": 8}
    run_worker(case.task(tmp_path / "calm", **phases), WorkerGroup(), never)
    run_dir = tmp_path / "stopped"
    task = case.task(run_dir, **phases)
    for calls in (1, 4):
        with pytest.raises(TaskInterrupted, match="stopped after step"):
            run_worker(task, WorkerGroup(), StopAfter(calls))
    # of a process that was killed
    (run_dir / f".{CHECKPOINT}.0").write_bytes(b"half of it")
    run_worker(task, WorkerGroup(), never)
    assert same(weights(run_dir), weights(tmp_path / "calm"))
    positions = [(record["phase"], record["step"]) for record in read_log(run_dir)]
    steps = [("joint", step) for step in range(1, 7)]
    assert positions == [("alignment", 1), ("alignment", 2), *steps]
    assert not [*run_dir.glob(".checkpoint*")]
    path = run_dir / CHECKPOINT
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="remove this file to start again from step 0"):
        run_worker(task, WorkerGroup(), never)


def test_it_learns_and_leaves_the_tower(case, tmp_path):
    """The losses fall; the towers of the bundle that comes out are the ones that
    went in.
    """
    settings = {"optimizer__lr": 5e-3, "architecture__dropout": 0.0}
    task = case.task(tmp_path, loop__steps=15, **settings)
    run_worker(task, WorkerGroup(), never)
    first, *_, last = read_log(tmp_path)
    assert last["recovery"] < 0.7 * first["recovery"]
    assert last["mlm"] < 0.8 * first["mlm"]
    # the workers had a GPU, and this process has none
    run = task.config.run.model_copy(update={"device": "cuda"})
    task = replace(task, config=task.config.model_copy(update={"run": run}))
    bundle, steps, _ = finish_model(task, lambda *report: None)
    assert (steps, bundle.trained) == (15, True)
    before = ModelBundle.load(task.start)
    assert same(bundle.clip.state_dict(), before.clip.state_dict())
    assert not same(bundle.adapter.state_dict(), before.adapter.state_dict())
    assert bundle.save(tmp_path / "out").trained


def test_gradients_that_are_no_numbers_are_skipped_and_then_end_it(
    case, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "MAX_BAD_STEPS", 3)
    task = case.task(tmp_path, objective__mlm_weight=1e38)
    with pytest.raises(
        ModelError,
        match=r"3 steps in a row had no finite gradient, up to step 3 .*optimizer.lr",
    ):
        run_worker(task, WorkerGroup(), never)
    saved = read_checkpoint(tmp_path / CHECKPOINT)["weights"]
    start = ModelBundle.load(task.start).adapter.state_dict()
    assert same(adapter_of(saved), start)


def test_a_run_that_is_out_of_memory_goes_on_with_smaller_chunks(
    case, tmp_path, monkeypatch
):
    """A device with room for three pairs at a time. The steps are those of one with
    room for all.
    """
    settings = {"architecture__dropout": 0.0, "loop__steps": 2}
    run_worker(case.task(tmp_path / "whole", **settings), WorkerGroup(), never)
    losses = JointObjective.losses

    def small(self, chunk, *tokens):
        if chunk.pairs > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, chunk, *tokens)

    monkeypatch.setattr(JointObjective, "losses", small)
    run_dir = tmp_path / "small"
    with pytest.raises(ModelError, match=r"a step of the joint .* run\.chunk_pairs"):
        run_worker(case.task(run_dir, **settings), WorkerGroup(), never)
    task = case.task(run_dir, **settings, run__chunk_pairs=3)
    run_worker(task, WorkerGroup(), never)
    for one, other in zip(read_log(tmp_path / "whole"), read_log(run_dir), strict=True):
        for name in ("loss", "itm", "mlm", "recovery", "accuracy", "gradient"):
            assert other[name] == pytest.approx(one[name], abs=1e-4)


def test_an_error_of_the_disk_names_the_checkpoint(case, tmp_path):
    task = case.task(tmp_path)
    with largest_file(1000), pytest.raises(OSError, match=f"too large.*{CHECKPOINT}"):
        run_worker(task, WorkerGroup(), never)


def test_all_parameters_have_weight_decay(case):
    config = case.config()
    start = ModelBundle.load(case.bundle)
    start.adapter.requires_grad_(True)
    module = JointObjective(start.adapter, start.joint, config.objective)
    groups = make_optimizer(module, config.optimizer).param_groups
    adapter, others = (group["params"] for group in groups)
    assert {*map(id, adapter)} == {*map(id, start.adapter.parameters())}
    assert len(adapter) + len(others) == len([*module.parameters()])
    assert {group["weight_decay"] for group in groups} == {0.05}


def test_the_adapter_has_a_learning_rate_of_its_own(case, tmp_path):
    settings = {"optimizer__warmup_steps": 0, "loop__steps": 1}
    moved = []
    for factor in (1.0, 3.0):
        run_dir = tmp_path / str(factor)
        task = case.task(run_dir, **settings, optimizer__adapter_lr_factor=factor)
        run_worker(task, WorkerGroup(), never)
        before = ModelBundle.load(task.start)
        after = weights(run_dir)
        query = after["adapter.query"] - before.adapter.query
        projection = after["joint.text_projection.weight"]
        projection = projection - before.joint.text_projection.weight
        moved.append((query.abs().max(), projection.abs().max()))
    (query, projection), (faster_query, same_projection) = moved
    assert float(faster_query / query) == pytest.approx(3, rel=0.05)
    assert same_projection == projection


def test_a_step_is_that_of_stock_adamw(case, tmp_path):
    """Two steps, written out: clipped gradients of the loss, and torch's own AdamW over
    all parameters.
    """
    settings = {
        "optimizer__clip_norm": 0.5,
        "loop__steps": 2,
        "optimizer__warmup_steps": 0,
    }
    task = case.task(tmp_path, **settings, architecture__dropout=0.0)
    run_worker(task, WorkerGroup(), never)
    module, source = objective_of(case, task)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.05)
    for number in range(2):
        optimizer.zero_grad()
        module.backward(source.joint(number))
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        total = sum(float(each.double().square().sum()) for each in gradients) ** 0.5
        assert total > 0.5
        for gradient in gradients:
            gradient *= 0.5 / total
        optimizer.step()
    trained = weights(tmp_path)
    for name, parameter in module.state_dict().items():
        # the loss does not depend on it: its gradient is rounding error
        if name == "joint.classification_head.1.bias":
            continue
        torch.testing.assert_close(
            trained[name], parameter, atol=2e-5, rtol=1e-4, msg=name
        )
    before = ModelBundle.load(task.start).adapter.state_dict()
    assert not same(adapter_of(trained), before)


def objective_of(case, task):
    """The losses of the joint phase of a task at its start, and its batches."""
    start = ModelBundle.load(task.start)
    source = BatchSource(case.data, start.joint.tokenizer, 4, task.config)
    make_trainable(start, task.config.architecture, torch.device("cpu"))
    module = JointObjective(start.adapter, start.joint, task.config.objective)
    return module.train(), source


PRETRAINING = OptimizerConfig()
FINETUNING = OptimizerConfig(**PRESETS["paper-finetune"]["optimizer"])


def published_rates(config, first, epochs, steps_per_epoch):
    """A step schedule per epoch; the steps of the first epoch are warmed up.
    `first` epochs are in the checkpoint.
    """
    rates = []
    rise = (config.lr - config.warmup_lr) / config.warmup_steps
    for epoch in range(first, epochs):
        rate = max(config.min_lr, config.lr * config.decay_rate**epoch)
        for step in range(steps_per_epoch):
            if epoch == 0:
                rate = min(config.lr, config.warmup_lr + rise * step)
            rates.append(rate)
    return rates


@pytest.mark.parametrize(
    ("config", "first"), [(PRETRAINING, None), (FINETUNING, None), (FINETUNING, 5)]
)
@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(60, 130), (9, 40)])
def test_every_step_has_the_published_rate(config, first, epochs, steps_per_epoch):
    """Also if the warm-up is longer than the first epoch, down to the minimum, and
    when a checkpoint goes on.
    """
    total = (epochs - (first or 0)) * steps_per_epoch
    rates = [
        learning_rate(step, total, float(steps_per_epoch), config, first)
        for step in range(total)
    ]
    assert rates == pytest.approx(
        published_rates(config, first or 0, epochs, steps_per_epoch), rel=1e-12
    )


@pytest.mark.parametrize("epochs_before", [0, 2])
def test_a_continued_cosine_schedule_has_no_warm_up(epochs_before):
    config = PRETRAINING.model_copy(update={"decay": "cosine"})
    rates = [
        learning_rate(step, 300, 1000, config, epochs_before) for step in range(300)
    ]
    assert rates[0] == pytest.approx(config.lr, rel=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_fine_tuning_goes_on_with_adam_and_the_epochs_as_published(case, tmp_path):
    """The first step, written out: torch's own AdamW with the state of the
    checkpoint, at the next epoch's rate.
    """
    # 6 steps are one epoch.
    first = case.task(tmp_path / "first", loop__steps=9, architecture__dropout=0.0)
    run_worker(first, WorkerGroup(), never)
    (tmp_path / "second").mkdir()
    finish_model(first, lambda *report: None)[0].save(tmp_path / "second" / "start")
    changes = {
        "objective__mlm_weight": 0.0,
        "objective__recovery_weight": 0.0,
        "loop__steps": 1,
    }
    task = case.task(tmp_path / "second", architecture__dropout=0.0, **changes)
    task = replace(task, continued=(tmp_path / "first", "run"))
    run_worker(task, WorkerGroup(), never)
    module, source = objective_of(case, task)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.05)
    saved = last_checkpoint(tmp_path / "first", "run")
    assert saved.epochs == 1
    groups = [{**optimizer.state_dict()["param_groups"][0], "lr": 9e-4}]
    optimizer.load_state_dict(
        {"state": saved.optimizer["state"], "param_groups": groups}
    )
    module.backward(source.joint(0))
    optimizer.step()
    state = last_checkpoint(tmp_path / "second", "run")
    assert state.epochs == 1
    for name, parameter in module.state_dict().items():
        torch.testing.assert_close(
            state.weights[name], parameter, atol=1e-6, rtol=1e-5, msg=name
        )


def test_steps_follow_from_epochs(case):
    assert total_steps(case.config().loop, 100) == 6
    assert total_steps(case.config(loop__steps=None, loop__epochs=2.5).loop, 100) == 30
    with pytest.raises(UsageError, match="do not fill a batch"):
        total_steps(case.config().loop, 7)


def test_an_optimiser_of_another_architecture_is_refused(case, tmp_path):
    first = case.task(tmp_path / "first", loop__steps=1)
    run_worker(first, WorkerGroup(), never)
    for number, architecture in enumerate(
        ({"architecture__tokens": 3}, {"architecture__adapter": "local"})
    ):
        task = case.task(tmp_path / str(number), loop__steps=1, **architecture)
        task = replace(task, continued=(tmp_path / "first", "run"))
        with pytest.raises(ModelError, match=r"does not fit .* optimizer\.continued"):
            run_worker(task, WorkerGroup(), never)
