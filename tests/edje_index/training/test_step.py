"""Each loss against a float64 NumPy reference written from the paper's formulas;
what the phases compute.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.config import AugmentationConfig
from edje_index.training.step import (
    JointObjective,
    Teacher,
    alignment_loss,
    alignment_scores,
    distillation_loss,
    itm_loss,
    mlm_loss,
    recovery_loss,
)


@pytest.fixture(params=range(2))
def rng(request):
    return np.random.default_rng(request.param)


def both(array: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """The same float32 values for the reference, in float64, and for the code."""
    array = array.astype(np.float32)
    return array.astype(np.float64), torch.from_numpy(array)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def negative_log_share_of_first(rows):
    """Mean of -log(exp(first) / sum of exp) over rows."""
    return np.mean([-np.log(np.exp(row[0]) / np.exp(row).sum()) for row in rows])


def close(value: torch.Tensor, reference: float) -> None:
    assert value.item() == pytest.approx(reference, abs=1e-6)


def test_itm_is_cross_entropy_of_the_positive_against_images_and_texts_averaged(rng):
    (p, positive), (i, images), (t, texts) = (
        both(rng.normal(0, 2, shape)) for shape in ((7,), (7, 3), (7, 3))
    )
    by_image = negative_log_share_of_first([[p[a], *i[a]] for a in range(7)])
    by_text = negative_log_share_of_first([[p[a], *t[a]] for a in range(7)])
    close(itm_loss(positive, images, texts), (by_image + by_text) / 2)


def test_mlm_is_the_mean_over_masked_tokens(rng):
    logits, tensor = both(rng.normal(0, 3, (11, 50)))
    targets = rng.integers(0, 50, 11)
    reference = np.mean(
        [
            -np.log(np.exp(row[at]) / np.exp(row).sum())
            for row, at in zip(logits, targets, strict=True)
        ]
    )
    close(mlm_loss(tensor, torch.from_numpy(targets)), reference)


def test_recovery_is_one_minus_cosine(rng):
    f, projected = both(rng.normal(size=(6, 24)))
    g, embeddings = both(rng.normal(size=(6, 24)))
    cosines = (f * g).sum(axis=1) / np.sqrt((f**2).sum(axis=1) * (g**2).sum(axis=1))
    close(recovery_loss(projected, embeddings), np.mean(1 - cosines))


def test_distillation_averages_the_means_of_the_three_groups(rng):
    """Positives, negative images and negative texts count alike, although there are
    three negatives to a positive.
    """
    sizes = (5, 15, 15)
    groups = [
        (both(rng.normal(0, 2, size)), both(rng.normal(0, 2, size))) for size in sizes
    ]
    means = []
    for (s, _), (t, _) in groups:
        y = sigmoid(t)
        predicted = sigmoid(s)
        means.append(
            np.mean(-(y * np.log(predicted) + (1 - y) * np.log(1 - predicted)))
        )
    loss = distillation_loss(
        [student for (_, student), _ in groups], [teacher for _, (_, teacher) in groups]
    )
    close(loss, sum(means) / 3)


def test_alignment_is_symmetric_info_nce_of_late_interaction(rng):
    t, tokens = both(rng.normal(size=(4, 5, 8)))
    w, words = both(rng.normal(size=(9, 8)))
    caption = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    cosine = lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b))  # noqa: E731
    expected = np.array(
        [
            [
                np.mean(
                    [
                        max(cosine(token, w[at]) for token in image)
                        for at in np.flatnonzero(caption == c)
                    ]
                )
                for c in range(4)
            ]
            for image in t
        ]
    )
    shares = torch.from_numpy((caption[:, None] == np.arange(4)) / np.bincount(caption))
    scores = alignment_scores(tokens, words, shares)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6)
    logits = expected / 0.1
    images = np.mean(
        [-np.log(np.exp(logits[a, a]) / np.exp(logits[a]).sum()) for a in range(4)]
    )
    texts = np.mean(
        [-np.log(np.exp(logits[a, a]) / np.exp(logits[:, a]).sum()) for a in range(4)]
    )
    close(
        alignment_loss(
            torch.from_numpy(expected), torch.tensor(0.1, dtype=torch.float64)
        ),
        (images + texts) / 2,
    )


@pytest.fixture
def bundle(tiny_bundle):
    loaded = ModelBundle.load(tiny_bundle)
    loaded.adapter.requires_grad_(True)
    return loaded


def rows(inputs, at):
    part = slice(at, at + 1)
    return JointInputs(
        inputs.input_ids[part], inputs.token_type_ids[part], inputs.attention_mask[part]
    )


@pytest.mark.parametrize("has_tokens", [True, False])
def test_losses_are_those_of_the_pairs_scored_one_by_one(
    case, bundle, tiny_bundle, has_tokens
):
    """The scoring and the tokenizer of the joint encoders are the reference. The
    teacher has its own tokens.
    """
    source = case.source()
    joint = bundle.joint
    batch = replace(source, teacher_tokens=16).joint(0)
    assert (batch.teacher[0].input_ids == source.tokenizer.image_token_id).sum(
        dim=1
    ).tolist() == [16] * 40
    teacher_joint = ModelBundle.load(tiny_bundle).joint
    local = build_adapter(AdapterConfig("local", 16, 32, 16, 24))
    teacher_tokens = local(batch.patches.float()).detach()
    if has_tokens:
        batch = replace(batch, teacher=(batch.teacher[0], teacher_tokens))
    teacher = Teacher(teacher_joint, None if has_tokens else local, torch.device("cpu"))
    objective = JointObjective(
        bundle.adapter, joint, case.config().objective, AugmentationConfig(), teacher
    ).eval()
    losses = objective(batch)
    with torch.no_grad():
        tokens = bundle.adapter(batch.patches.float())
        images = [slice(at, at + 1) for at in batch.image]
        logits = torch.cat(
            [joint(rows(batch.inputs, at), tokens[images[at]]) for at in range(40)]
        )
        taught = [
            teacher_joint(rows(batch.teacher[0], at), teacher_tokens[images[at]])
            for at in range(40)
        ]
        hidden = [
            joint.hidden_states(rows(batch.inputs, at), tokens[images[at]])
            for at in range(40, 48)
        ]
        texts = joint.hidden_states(batch.text_inputs[0], torch.empty(0, 0, 16))[:, 0]
        covered = joint.language_model.cls(
            torch.cat(hidden).flatten(0, 1)[batch.masked[0]]
        )
        sizes = [8, 16, 16]
        expected = {
            "itm": itm_loss(
                logits[:8], logits[8:24].view(8, 2), logits[24:].view(8, 2)
            ),
            "mlm": mlm_loss(covered, batch.masked[1]),
            "recovery": recovery_loss(
                joint.text_projection(texts), batch.text_inputs[1]
            ),
            "distillation": distillation_loss(
                logits.split(sizes), torch.cat(taught).split(sizes)
            ),
        }
    for name, value in {**expected, "loss": sum(expected.values())}.items():
        torch.testing.assert_close(losses[name], value, atol=1e-5, rtol=0)
    losses["loss"].backward()
    assert all(
        parameter.grad is None
        for parameter in (*local.parameters(), *teacher_joint.parameters())
    )
    assert not any("teacher" in name for name, _ in objective.named_parameters())
    assert [
        name
        for name, parameter in objective.named_parameters()
        if parameter.grad is None
    ] == []


def test_losses_of_weight_zero_leave_their_heads_alone(case, bundle):
    settings = {"objective__mlm_weight": 0.0, "objective__recovery_weight": 0.0}
    objective = JointObjective(
        bundle.adapter,
        bundle.joint,
        case.config(**settings).objective,
        AugmentationConfig(),
    )
    objective.train()(case.source(**settings).joint(0))["loss"].backward()
    head = "joint.language_model.cls.predictions."
    frozen = ("joint.text_projection", f"{head}transform", f"{head}bias")
    for name, parameter in objective.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen), name


def test_a_step_sees_as_much_of_an_image_as_is_asked_for(case, bundle):
    seen = AugmentationConfig(patch_dropout=0.25, step_tokens=3)
    batch = replace(case.source(), image_tokens=3).joint(0)
    assert (
        batch.inputs.input_ids[0] == bundle.joint.tokenizer.image_token_id
    ).sum() == 3
    patches = []
    bundle.adapter.register_forward_pre_hook(
        lambda _, inputs: patches.append(inputs[0])
    )
    objective = JointObjective(
        bundle.adapter, bundle.joint, case.config().objective, seen
    ).train()
    losses = [objective(batch)["loss"].item() for _ in range(2)]
    assert patches[0].shape == (batch.patches.shape[0], 12, 32)
    assert not torch.equal(*patches)
    assert np.isfinite(losses).all()
