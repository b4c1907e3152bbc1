"""Reads the parts of a model bundle that a search uses. Other parts are not read, so
that a search starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from edje_index.bundles.bundle import check_scorer_fit, load_scorer, load_text_tower
from edje_index.bundles.info import ADAPTER_WEIGHTS, INFO_FILE, BundleInfo, verify_files
from edje_index.errors import ModelError
from edje_index.models.adapter import AdapterConfig
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.text_tower import TextEncoder
from edje_index.scoring.parts import Images
from edje_index.scoring.weights import (
    BUNDLE_SCORE,
    EMBEDDING,
    JOINT_PARTS,
    LOGIT,
    ScoreWeights,
    check_parts,
    parse_score,
)
from edje_index.search.hits import Stages
from storage_formats.arrays import Floats
from storage_formats.threads import has_bfloat16

if TYPE_CHECKING:
    from edje_index.indexing.image_encoder import ImageEncoder

# "auto" selects bfloat16 on a CPU only if recall changes by less than this, in
# percentage points.
_RECALL_CHANGE = 0.1


class Scores(NamedTuple):
    """The scores of b pairs of a caption and an image.

    Attributes:
        similarities: cosine similarity of the embeddings of each pair, float32 [b].
        final: final scores, float32 [b]. NaN for a pair that cannot be among the best
            hits, whose logit was therefore not computed.
        joint: weighted sum of the parts logit, late interaction and pooled similarity,
            float32 [b]. None if the final score has none of these parts.
        parts: values of each part of the final score, without weights, by part name,
            float32 [b] each.
    """

    similarities: Floats
    final: Floats
    joint: Floats | None
    parts: Mapping[str, Floats]


class SearchModel:
    """The parts of a model bundle that a search uses: the text tower, the joint
    encoder, and the other models of the final score. A query by image also uses the
    vision tower and the adapter.

    Weights are memory-mapped, so the files of the bundle must not change while this
    object is in use. To change the bundle, replace the whole directory.

    Attributes:
        info: description of the bundle.
        joint: joint encoder, which scores pairs of a text and an image.
        scorer: the joint encoder and the other models that compute parts of the final
            score.
    """

    def __init__(
        self, info: BundleInfo, *, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        """Read the weights of a bundle.

        Args:
            info: description of the bundle.
            device: device of the text tower and the joint encoder: "auto", "cpu",
                "cuda" or "cuda:N".
            dtype: data type of the joint encoder's matrix products: "auto", "float32"
                or "bfloat16". "auto" selects bfloat16 on CUDA. On a CPU, bfloat16 takes
                less time than float32 if the CPU has bfloat16 instructions, and more
                time otherwise. There, "auto" selects bfloat16 if the CPU has these
                instructions, and the bundle says that bfloat16 changes recall by less
                than 0.1 percentage points.

        Raises:
            ModelError: a file of the bundle is missing or damaged, or `device` or
                `dtype` is not available.
        """
        self.info = info
        self._device = resolve_device(device)
        if dtype == "auto" and self._device.type == "cpu":
            change = info.bfloat16_recall_change
            keeps_recall = change is not None and abs(change) < _RECALL_CHANGE
            dtype = "bfloat16" if keeps_recall and has_bfloat16() else "float32"
        compute_dtype = resolve_dtype(dtype, self._device)
        # `image_encoder` verifies the adapter when it reads the adapter.
        verify_files(info, [name for name in info.files if name != ADAPTER_WEIGHTS])
        self.scorer = load_scorer(info, compute_dtype, self._device)
        self.joint = self.scorer.joint
        check_scorer_fit(self.adapter_config, self.scorer, info.score)

    @property
    def adapter_config(self) -> AdapterConfig:
        """Configuration of the adapter: everything that defines the adapter except
        the weights.
        """
        return AdapterConfig.from_json(self.info.adapter, self.info.path / INFO_FILE)

    @cached_property
    def text(self) -> TextEncoder:
        """The text tower. The weights are read at the first use."""
        return load_text_tower(self.info, self._device)

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        """The vision tower and the adapter. The weights are read at the first use."""
        from edje_index.indexing.image_encoder import ImageEncoder

        verify_files(self.info, [ADAPTER_WEIGHTS])
        return ImageEncoder.of(self.info, device=str(self._device))

    def weights(
        self, direction: str, score: str | ScoreWeights = BUNDLE_SCORE
    ) -> ScoreWeights:
        """Return the weights of the final score that `score` describes in `direction`,
        "t2i" or "i2t". For the values of `score`, see `parse_score`.

        Raises:
            UsageError: `score` is invalid.
            ModelError: the bundle has no model for a part whose weight is not 0.
        """
        weights = parse_score(score, self.info.score.of(direction))
        check_parts(weights, self.scorer.part_names, "this model bundle")
        return weights

    def check_reranks(self) -> None:
        """Raise ModelError if the bundle produces patch features instead of tokens. The
        joint encoder can only score tokens.
        """
        config = self.adapter_config
        if config.is_feature:
            raise ModelError(
                f"the index stores features for training ({config.kind}), which cannot"
                " be re-ranked: use an index of a trained bundle, or search without"
                " re-ranking",
                remedy="embedding",
            )

    def scores(
        self,
        weights: ScoreWeights,
        captions: Sequence[str],
        similarities: Floats,
        images: Images | None,
        stages: Stages,
        *,
        pools: Sequence[slice] = (),
        k: int | None = None,
    ) -> Scores:
        """Score b pairs of a caption and an image.

        Args:
            weights: weights of the final score.
            captions: the caption of each pair.
            similarities: cosine similarity of the embeddings of each pair, float32 [b].
            images: the image of each pair; None if the score reads no tokens.
            stages: durations of stages, to which those of the parts are added.
            pools: the ranges of pairs that compete with each other. Used only with `k`.
            k: number of hits of each pool. A pair that cannot be among the best `k` of
                its pool may get the final score NaN. None scores all pairs.
        """
        logit_range = self.info.logit_range
        # If there are no pairs, the parts keep these empty arrays.
        parts = dict.fromkeys(weights.parts, np.empty(0, np.float32))
        if EMBEDDING in parts:
            parts[EMBEDDING] = similarities
        if images is not None and captions:
            fast_parts = [name for name in parts if name not in (LOGIT, EMBEDDING)]
            if fast_parts:
                with stages.timed("other_parts"):
                    parts |= self.scorer.parts(fast_parts, captions, images)
            # The logit is computed last, because the values of the other parts decide
            # which pairs need a logit.
            if LOGIT in parts:
                with stages.timed("joint_encoder"):
                    possible = np.ones(len(captions), dtype=np.bool_)
                    if k is not None and logit_range is not None and len(parts) > 1:
                        for pairs in pools:
                            of_pool = {name: parts[name][pairs] for name in parts}
                            possible[pairs] = weights.may_be_first(
                                of_pool, k, logit_range
                            )
                    chosen = np.flatnonzero(possible)
                    parts[LOGIT] = np.full(len(captions), np.nan, dtype=np.float32)
                    if len(chosen) < len(captions):
                        captions = [captions[pair] for pair in chosen.tolist()]
                        images = images.at(torch.from_numpy(chosen))
                    logits = self.scorer.parts([LOGIT], captions, images)[LOGIT]
                    parts[LOGIT][chosen] = logits
        joint = weights.only(JOINT_PARTS)
        joint_sum = joint.sum(parts) if joint.parts else None
        return Scores(similarities, weights.sum(parts), joint_sum, parts)
