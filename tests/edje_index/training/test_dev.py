"""Dev recall during a training, and the weights of the final score."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.evaluation import pools as pools_module
from edje_index.models.devices import to_bf16_array
from edje_index.training.checkpoints import LOG, last_checkpoint, read_log
from edje_index.training.config import FittingConfig
from edje_index.training.fit_weights import choose_weights, dev_pools
from edje_index.training.loop import finish_model, run_worker
from edje_index.training.pooled_similarity import fit_pooled_similarity
from edje_index.training.start import make_start, trained_part
from edje_index.training.workers import WorkerGroup
from storage_formats.errors import TaskInterrupted
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES

POOL = 12
SETTINGS = {
    "loop__steps": 6,
    "optimizer__lr": 3e-3,
    "optimizer__warmup_steps": 0,
    "fitting__dev_pool": POOL,
    "objective__mlm_weight": 0.0,
    "objective__recovery_weight": 0.0,
}


def task(case, run_dir, evaluate_every):
    settings = {"run__checkpoint_every": 3, "run__evaluate_every": evaluate_every}
    return case.task(run_dir, dev=True, **SETTINGS, **settings)


def evaluations(run_dir):
    return {
        record["step"]: record for record in read_log(run_dir) if "dev_t2i_r1" in record
    }


@pytest.fixture(scope="module")
def everything(case, tmp_path_factory):
    """A training that was evaluated every two steps."""
    made = task(case, tmp_path_factory.mktemp("all"), 2)
    run_worker(made, WorkerGroup(), lambda: False)
    return made


def test_recalls_are_those_of_the_checkpoint(case, everything):
    records = evaluations(everything.config.run.folder)
    assert list(records) == [2, 4, 6]
    _, steps, choices = finish_model(everything, lambda *report: None)
    assert steps == 6
    for direction, choice in choices.items():
        assert records[6][f"dev_{direction}_r1"] == choice.logit_recall


def test_evaluations_do_not_change_what_is_trained(case, everything, tmp_path):
    never = task(case, tmp_path, 100)
    run_worker(never, WorkerGroup(), lambda: False)
    assert not evaluations(tmp_path)
    states = [
        last_checkpoint(folder, "run").weights
        for folder in (tmp_path, everything.config.run.folder)
    ]
    assert all(
        torch.equal(states[0][name], tensor) for name, tensor in states[1].items()
    )


def test_a_stopped_evaluation_goes_on(case, everything, tmp_path, monkeypatch):
    monkeypatch.setattr(pools_module, "CHUNK_PAIRS", 16)
    made = task(case, tmp_path, 2)
    # asked after each of two steps, and before each batch of pairs
    calls = itertools.count()
    with pytest.raises(TaskInterrupted, match="during the evaluation after step 2 of"):
        run_worker(made, WorkerGroup(), lambda: next(calls) == 3)
    assert last_checkpoint(tmp_path, "run").step == 2
    assert not evaluations(tmp_path)
    run_worker(made, WorkerGroup(), lambda: False)
    assert evaluations(tmp_path) == evaluations(everything.config.run.folder)
    # of a run that ended before its last evaluation
    (tmp_path / LOG).unlink()
    run_worker(made, WorkerGroup(), lambda: False)
    assert list(evaluations(tmp_path)) == [6]


def test_an_alignment_is_not_evaluated(case, tmp_path):
    made = case.task(
        tmp_path, dev=True, **SETTINGS, run__evaluate_every=1, alignment__steps=2
    )
    run_worker(made, WorkerGroup(), lambda: False)
    phases = {each["phase"] for each in read_log(tmp_path) if "dev_t2i_r1" in each}
    assert phases == {"joint"}


def test_recalls_are_those_of_the_plain_computation(case, tmp_path, monkeypatch):
    """One query at a time, by the parts of a bundle with the chosen weights; in
    both directions.
    """
    dev = case.data
    bundle = make_start(case.config().architecture, 0, case.bundle)
    bundle.joint.eval()
    adapter = trained_part(bundle.adapter)
    pooled = fit_pooled_similarity(adapter, bundle.joint, dev, 0, 4, lambda *_: None)
    bundle = replace(bundle, pooled=pooled, info=None)
    config = FittingConfig(dev_captions=1000, dev_pool=6)
    monkeypatch.setattr(pools_module, "CHUNK_PAIRS", 16)
    monkeypatch.setattr(pools_module, "_KEEP_SECONDS", -1)
    calls = []

    def stop(activity, done, total):
        calls.append(done)
        if len(calls) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        dev_pools(bundle, dev, config, tmp_path, "run 1", on_progress=stop)
    # the scores of three batches are kept, and those of another run are not used
    (kept,) = tmp_path.iterdir()
    assert np.isfinite(np.load(kept)).all(axis=0).sum() == 3 * 16
    tampered = np.load(kept)
    np.save(kept, tampered + 1)
    pools = dev_pools(bundle, dev, config, tmp_path, "run 1")
    assert list(tmp_path.iterdir()) == []
    plain = dev_pools(bundle, dev, config, tmp_path, "run 2")
    changed = [
        (pools[name].parts["logit"] != plain[name].parts["logit"]) for name in pools
    ]
    assert 0 < sum(each.sum() for each in changed) <= 2 * 3 * 16
    pools = plain
    choices = {
        direction: choose_weights(of_direction)
        for direction, of_direction in pools.items()
    }
    assert (choices["t2i"].queries, choices["t2i"].pool) == (2 * IMAGES, 6)
    assert (choices["i2t"].queries, choices["i2t"].pool) == (IMAGES, 6)
    tokens = to_bf16_array(bundle.adapter(dev.blocks(np.arange(IMAGES)).float()))
    texts_of_dev = case.texts()
    similar = dev.records["embedding"] @ read_embeddings(dev.index, dev.rows).T
    for direction, choice in choices.items():
        weights = choice.weights.by_part()
        text_queries = direction == "t2i"
        assert min(weights.values()) >= 0
        scorer = bundle.scorer
        hits = []
        for query in range(2 * IMAGES if text_queries else IMAGES):
            rank = similar[query] if text_queries else similar[:, query]
            near = sorted(range(len(rank)), key=lambda at, rank=rank: -rank[at])[:6]
            texts = [texts_of_dev[at] for at in ([query] * 6 if text_queries else near)]
            used = {part: weight for part, weight in weights.items() if weight}
            images = scorer.images(tokens[near if text_queries else [query] * 6])
            joint = {"logit", *used} - {"embedding"}
            values = {"embedding": rank[near], **scorer.parts(joint, texts, images)}
            final = sum(weight * values[part] for part, weight in used.items())
            best = [
                near[scores.argmax()] for scores in (final, values["logit"], rank[near])
            ]
            hits.append(
                [at == query // 2 if text_queries else at // 2 == query for at in best]
            )
        recalls = (choice.recall, choice.logit_recall, choice.embedding_recall)
        assert recalls == pytest.approx(np.mean(hits, axis=0))
