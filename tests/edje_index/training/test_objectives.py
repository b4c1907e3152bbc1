"""What the phases compute, and where gradients go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.scoring.stop_words import content_token_mask
from edje_index.training.config import AugmentationConfig
from edje_index.training.data.batches import TeacherSource
from edje_index.training.model.losses import distillation_loss, itm_loss, mlm_loss, recovery_loss
from edje_index.training.model.objectives import AlignmentObjective, JointObjective, random_subset
from edje_index.training.model.teacher import Teacher


@pytest.fixture
def bundle(tiny_bundle):
    loaded = ModelBundle.load(tiny_bundle)
    loaded.adapter.requires_grad_(True)
    return loaded


def test_losses_are_those_of_the_pairs_scored_one_by_one(case, bundle):
    """The joint encoder's own scoring and tokenizer are the reference."""
    batch = case.source().joint(0)
    objective = JointObjective(bundle.adapter, bundle.joint, case.config().objective, AugmentationConfig()).eval()
    losses = objective(batch)
    tokens = bundle.adapter(batch.patches.float())
    with torch.no_grad():
        logits = torch.cat([bundle.joint(rows(batch.inputs, at), tokens[batch.image[at : at + 1]]) for at in range(40)])
        hidden = torch.cat(
            [
                bundle.joint.hidden_states(rows(batch.inputs, at), tokens[batch.image[at : at + 1]])
                for at in range(40, 48)
            ]
        )
        texts = bundle.joint.hidden_states(batch.text_inputs[0], torch.empty(0, 0, 16))[:, 0]
        covered = bundle.joint.language_model.cls(hidden.flatten(0, 1)[batch.masked[0]])
        expected = {
            "itm": itm_loss(logits[:8], logits[8:24].view(8, 2), logits[24:].view(8, 2)),
            "mlm": mlm_loss(covered, batch.masked[1]),
            "recovery": recovery_loss(bundle.joint.text_projection(texts), batch.text_inputs[1]),
        }
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, atol=1e-5, rtol=0)
    torch.testing.assert_close(losses["loss"], sum(expected.values()), atol=1e-5, rtol=0)


def rows(inputs, at):
    from edje_index.models.joint_inputs import JointInputs

    return JointInputs(
        inputs.input_ids[at : at + 1], inputs.token_type_ids[at : at + 1], inputs.attention_mask[at : at + 1]
    )


def test_gradients_reach_adapter_language_model_and_heads_and_not_the_tower(case, bundle):
    objective = JointObjective(bundle.adapter, bundle.joint, case.config().objective, AugmentationConfig()).train()
    objective(case.source().joint(0))["loss"].backward()
    without = [name for name, parameter in objective.named_parameters() if parameter.grad is None]
    assert without == []
    reached = {name.split(".")[1] for name, parameter in objective.named_parameters() if parameter.grad.abs().sum() > 0}
    assert {"query", "key", "language_model", "classification_head", "text_projection"} <= reached
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in bundle.clip.parameters())


@pytest.mark.parametrize(
    ("settings", "still"),
    [
        ({"objective__mlm_weight": 0.0}, "joint.language_model.cls.predictions.transform"),
        ({"objective__recovery_weight": 0.0}, "joint.text_projection"),
        ({"objective__itm_weight": 0.0}, "joint.classification_head"),
    ],
)
def test_a_loss_of_weight_zero_leaves_its_head_alone(case, bundle, settings, still):
    objective = JointObjective(
        bundle.adapter, bundle.joint, case.config(**settings).objective, AugmentationConfig()
    ).train()
    losses = objective(case.source(**settings).joint(0))
    losses["loss"].backward()
    frozen = (still, "joint.language_model.cls.predictions.bias") if "objective__mlm_weight" in settings else (still,)
    for name, parameter in objective.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen), name


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_teacher_scores_the_students_pairs_with_its_own_tokens(case, bundle, tiny_bundle, has_tokens):
    teacher_bundle = ModelBundle.load(tiny_bundle)
    local = build_adapter(AdapterConfig("local", 16, 32, 16, 24))
    source = case.source()
    batch = replace(source, teacher=TeacherSource(16, source.features, source.data.rows)).joint(0)
    teacher = Teacher(teacher_bundle.joint, local)
    tokens = local(batch.teacher[1].float())
    if has_tokens:
        batch = replace(batch, teacher=(batch.teacher[0], tokens.detach()))
        teacher = Teacher(teacher_bundle.joint, None)
    expected = torch.cat(
        [teacher_bundle.joint(rows(batch.teacher[0], at), tokens[batch.image[at : at + 1]]) for at in range(40)]
    )
    torch.testing.assert_close(teacher.logits(batch, lambda tokens: tokens), expected.detach(), atol=1e-5, rtol=0)
    objective = JointObjective(
        bundle.adapter, bundle.joint, case.config().objective, AugmentationConfig(), teacher
    ).train()
    losses = objective(batch)
    assert "distillation" in losses
    losses["loss"].backward()
    assert all(parameter.grad is None for parameter in local.parameters())
    assert not any("teacher" in name for name, _ in objective.named_parameters())


def test_distillation_is_of_positives_negative_images_and_negative_texts(case, bundle):
    source = case.source()
    batch = replace(source, teacher=TeacherSource(16, source.features, source.data.rows)).joint(0)
    teacher = Teacher(bundle.joint, build_adapter(AdapterConfig("local", 16, 32, 16, 24)))
    objective = JointObjective(
        bundle.adapter, bundle.joint, case.config().objective, AugmentationConfig(), teacher
    ).eval()
    tokens = bundle.adapter(batch.patches.float())
    student = torch.cat([bundle.joint(rows(batch.inputs, at), tokens[batch.image[at : at + 1]]) for at in range(40)])
    sizes = [8, 16, 16]
    expected = distillation_loss(student.split(sizes), teacher.logits(batch, lambda tokens: tokens).split(sizes))
    torch.testing.assert_close(objective(batch)["distillation"], expected, atol=1e-5, rtol=0)


def test_alignment_trains_the_adapter_alone(case, bundle):
    source = case.source(alignment__steps=1, alignment__batch_size=12, alignment__captions=2)
    batch = source.alignment(content_token_mask(bundle.joint.tokenizer))(0)
    assert batch.patches.shape == (12, 16, 32)
    assert batch.shares.shape == (len(batch.words), 24)
    objective = AlignmentObjective(bundle.adapter, bundle.joint, AugmentationConfig())
    losses = objective(batch)
    losses["loss"].backward()
    assert {name.split(".")[0] for name, parameter in objective.named_parameters() if parameter.grad is not None} == {
        "adapter", "log_temperature",
    }  # fmt: skip
    assert all(parameter.grad is None for parameter in bundle.joint.parameters())


def test_alignment_finds_images_that_contain_their_words(bundle):
    """An image made of the very words of its caption is told from the others."""
    from edje_index.training.data.batches import AlignmentBatch

    words = torch.tensor([50, 51, 60, 61, 70, 71])
    table = bundle.joint.text_embeddings.weight.detach()
    features = build_adapter(AdapterConfig("patches", 2, 16, 16, 0))
    objective = AlignmentObjective(features, bundle.joint, AugmentationConfig())
    batch = AlignmentBatch(table[words].view(3, 2, 16), words, torch.eye(3).repeat_interleave(2, dim=0) / 2)
    assert objective(batch)["accuracy"] == 1


def test_a_step_sees_as_much_of_an_image_as_is_asked_for(case, bundle):
    seen = AugmentationConfig(patch_dropout=0.25, step_tokens=3)
    batch = replace(case.source(), image_tokens=3).joint(0)
    assert (batch.inputs.input_ids[0] == bundle.joint.tokenizer.image_token_id).sum() == 3
    patches = []
    bundle.adapter.register_forward_pre_hook(lambda _, inputs: patches.append(inputs[0]))
    objective = JointObjective(bundle.adapter, bundle.joint, case.config().objective, seen).train()
    losses = [objective(batch)["loss"].item() for _ in range(2)]
    assert patches[0].shape == (batch.patches.shape[0], 12, 32)
    assert not torch.equal(*patches)
    assert np.isfinite(losses).all()


def test_a_random_subset_holds_whole_tokens():
    blocks = torch.arange(30.0).view(2, 5, 3)
    kept = random_subset(blocks, 3)
    positions = [(blocks[0] == token).all(dim=1).nonzero().item() for token in kept[0]]
    assert len(set(positions)) == 3
    assert positions == sorted(positions)
    assert torch.equal(kept, blocks[:, positions])
    assert random_subset(blocks, None) is blocks
    assert random_subset(blocks, 9) is blocks
