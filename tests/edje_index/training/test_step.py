"""Each loss against a float64 NumPy reference written from the paper's formulas;
what the phases compute.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.joint_inputs import JointInputs
from edje_index.training.step import (
    JointObjective,
    alignment_loss,
    alignment_scores,
    distillation_loss,
    itm_loss,
    mlm_loss,
    recovery_loss,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def both(array):
    """The same float32 values for the reference, in float64, and for the code."""
    array = array.astype(np.float32)
    return array.astype(np.float64), torch.from_numpy(array)


def negative_log_share_of_first(rows):
    """Mean of -log(exp(first) / sum of exp) over rows."""
    return np.mean([-np.log(np.exp(row[0]) / np.exp(row).sum()) for row in rows])


def close(value, reference):
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
    reference = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(11), targets]
    close(mlm_loss(tensor, torch.from_numpy(targets)), np.mean(reference))


def test_recovery_is_one_minus_cosine(rng):
    f, projected = both(rng.normal(size=(6, 24)))
    g, embeddings = both(rng.normal(size=(6, 24)))
    cosines = (f * g).sum(axis=1) / np.sqrt((f**2).sum(axis=1) * (g**2).sum(axis=1))
    close(recovery_loss(projected, embeddings), np.mean(1 - cosines))


def test_distillation_averages_the_means_of_the_three_groups(rng):
    """Positives, negative images and negative texts count alike, although there are
    three negatives to a positive.
    """
    means = []
    tensors = []
    for size in (5, 15, 15):
        (s, student), (t, teacher) = (both(rng.normal(0, 2, size)) for _ in range(2))
        y, predicted = (1 / (1 + np.exp(-logits)) for logits in (t, s))
        losses = y * np.log(predicted) + (1 - y) * np.log(1 - predicted)
        means.append(-np.mean(losses))
        tensors.append((student, teacher))
    close(distillation_loss(*map(list, zip(*tensors, strict=True))), np.mean(means))


def test_alignment_is_symmetric_info_nce_of_late_interaction(rng):
    t, tokens = both(rng.normal(size=(4, 5, 8)))
    w, words = both(rng.normal(size=(9, 8)))
    caption = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    units = [each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (t, w)]
    # of each word with the most similar token of each image
    best = (units[0] @ units[1].T).max(axis=1)
    expected = np.stack([best[:, caption == c].mean(axis=1) for c in range(4)], axis=1)
    shares = torch.from_numpy((caption[:, None] == np.arange(4)) / np.bincount(caption))
    scores = alignment_scores(tokens, words, shares)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6)
    logits = expected / 0.1
    own = logits.diagonal()
    losses = [np.log(np.exp(logits).sum(axis=axis)) - own for axis in (0, 1)]
    temperature = torch.tensor(0.1, dtype=torch.float64)
    loss = alignment_loss(torch.from_numpy(expected), temperature)
    close(loss, np.mean(losses))


@pytest.fixture
def bundle(tiny_bundle):
    loaded = ModelBundle.load(tiny_bundle)
    loaded.adapter.requires_grad_(True)
    return loaded


def hidden_rows(joint, inputs, tokens):
    """The last hidden states of each row, from a pass without padding for every row."""
    for row, mask in enumerate(inputs.attention_mask):
        fields = (inputs.input_ids, inputs.token_type_ids, inputs.attention_mask)
        one = JointInputs(*(field[row : row + 1, : mask.sum()] for field in fields))
        yield joint.hidden_states(one, tokens[row : row + 1])[0]


@pytest.mark.parametrize(("chunk_pairs", "has_tokens"), [(64, False), (3, True)])
def test_losses_and_gradients_are_those_of_the_pairs_scored_one_by_one(
    case, bundle, tiny_bundle, chunk_pairs, has_tokens
):
    """In float64, with chunks of 8 and 3 + 3 + 2 pairs. The teacher has its own
    tokens.
    """
    source = case.source(run__chunk_pairs=chunk_pairs)
    joint = bundle.joint.double()
    adapter = bundle.adapter.double()
    batch = replace(source, teacher_tokens=16).joint(0)
    pairs = [chunk.pairs for chunk in batch.chunks]
    assert pairs == ([3, 3, 2] if chunk_pairs == 3 else [8])
    patches = batch.patches.double()
    teacher_joint = ModelBundle.load(tiny_bundle).joint.requires_grad_(False)
    local = build_adapter(AdapterConfig("local", 16, 32, 16, 24))
    teacher_tokens = local(batch.patches.float()).detach()
    batch = batch._replace(patches=patches)
    if has_tokens:
        batch = batch._replace(teacher_tokens=teacher_tokens)
    teacher = replace(ModelBundle.load(tiny_bundle), joint=teacher_joint, adapter=local)
    config = case.config(objective__mlm_weight=0.5).objective
    objective = JointObjective(bundle.adapter, joint, config, None, teacher).eval()
    tokens = adapter(patches)

    itm = []
    distilled = [[], [], []]
    mlm = []
    recovered = []
    for chunk in batch.chunks:
        b = chunk.pairs
        k = chunk.negative_images.shape[1]
        rows = list(hidden_rows(joint, chunk.rows, tokens[chunk.images]))
        scored = b * (1 + 2 * k)
        assert len(rows) == scored + b
        shown = teacher_tokens[chunk.images[:scored]]
        logits, taught = (
            torch.stack(
                [encoder.classification_head(states[None])[0, 0] for states in of_rows]
            ).split([b, b * k, b * k])
            for encoder, of_rows in (
                (joint, rows[:scored]),
                (teacher_joint, hidden_rows(teacher_joint, chunk.teacher, shown)),
            )
        )
        itm.append((logits[0], logits[1].view(b, k), logits[2].view(b, k)))
        for group, ours, theirs in zip(distilled, logits, taught, strict=True):
            group.append((ours, theirs.double()))
        for pair, position in zip(*chunk.masked, strict=True):
            target = chunk.rows.input_ids[pair, position]
            mlm.append((rows[scored + pair][position], target))
        inputs, embeddings = chunk.recovery
        for states, embedding in zip(
            hidden_rows(joint, inputs, tokens[:0]), embeddings, strict=True
        ):
            recovered.append((joint.text_projection(states[0]), embedding))
    expected = {
        "itm": itm_loss(*(torch.cat(part) for part in zip(*itm, strict=True))),
        "mlm": mlm_loss(
            joint.language_model.cls(torch.stack([states for states, _ in mlm])),
            torch.stack([target for _, target in mlm]),
        ),
        "recovery": recovery_loss(
            *(torch.stack(part) for part in zip(*recovered, strict=True))
        ),
        "distillation": distillation_loss(
            *(
                [torch.cat([pair[side] for pair in group]) for group in distilled]
                for side in range(2)
            )
        ),
    }
    total = sum(expected.values()) - 0.5 * expected["mlm"]
    total.backward()
    gradients = {
        name: parameter.grad for name, parameter in objective.named_parameters()
    }
    objective.zero_grad()
    losses = objective.backward(batch)
    for name, value in {**expected, "loss": total}.items():
        torch.testing.assert_close(
            losses[name].double(), value, atol=1e-6, rtol=0, msg=name
        )
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-6, rtol=0, msg=name
        )
    assert all(parameter.grad is None for parameter in local.parameters())
    assert not any("teacher" in name for name in gradients)


def test_losses_of_weight_zero_leave_their_heads_alone(case, bundle):
    """And a frozen adapter gets no gradient."""
    settings = {"objective__mlm_weight": 0.0, "objective__recovery_weight": 0.0}
    config = case.config(**settings).objective
    bundle.adapter.requires_grad_(False)
    objective = JointObjective(bundle.adapter, bundle.joint, config)
    objective.train().backward(case.source(run__chunk_pairs=3, **settings).joint(0))
    head = "joint.language_model.cls.predictions."
    frozen = ("adapter", "joint.text_projection", f"{head}transform", f"{head}bias")
    for name, parameter in objective.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen), name


def test_a_step_sees_as_much_of_an_image_as_is_asked_for(case, bundle):
    batch = replace(case.source(), image_tokens=3).joint(0)
    rows = batch.chunks[0].rows
    assert (rows.input_ids[0] == bundle.joint.tokenizer.image_token_id).sum() == 3
    objective = JointObjective(
        bundle.adapter, bundle.joint, case.config().objective, 3
    ).eval()
    losses = [objective.backward(batch)["loss"].item() for _ in range(8)]
    # Random tokens in each step. There are four choices of three tokens.
    assert len(set(losses)) > 1
    assert np.isfinite(losses).all()


def test_bfloat16_reads_stored_patches_as_they_are(case, bundle):
    """A copy of the patches in float32 would take twice their memory."""
    batch = case.source().joint(0)
    types = []
    bundle.adapter.register_forward_pre_hook(
        lambda _, inputs: types.append(inputs[0].dtype)
    )
    objective = JointObjective(bundle.adapter, bundle.joint, case.config().objective)
    losses = [
        objective.backward(batch, dtype)["loss"].item()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert types == [torch.float32, torch.bfloat16]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
