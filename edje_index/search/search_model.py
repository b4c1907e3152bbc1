"""Reads the parts of a model bundle that a search uses. Other parts are not read, so a search starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict

from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    INFO_FILE,
    VISION_FOLDER,
    BundleInfo,
    matching_bundle,
    verify_files,
)
from edje_index.bundles.parts import check_scorer_fit, load_hubness_bank, load_pooled_similarity, load_scorer
from edje_index.models.adapter import AdapterConfig
from edje_index.models.clip_config import read_clip_config
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.text_encoder import TextEncoder, load_bert_text_tower
from edje_index.scoring.parts import Part, ScoreModels
from edje_index.scoring.weights import BUNDLE_SCORE, ScoreWeights, check_parts, parse_score

if TYPE_CHECKING:
    from pathlib import Path

    from edje_index.indexing.image_encoder import ImageEncoder
    from storage_formats.format.manifest import CommittedIndex


class ModelOptions(TypedDict, total=False):
    """Device and data type of the model.

    Attributes:
        device: device of the text tower and the joint encoder: "auto", "cpu", "cuda" or "cuda:N".
        dtype: data type of the joint encoder's matrix products: "auto", "float32" or "bfloat16". bfloat16 takes about
            half the time of float32 on processors that support bfloat16, and more time than float32 on others.
    """

    device: str
    dtype: str


class SearchModel:
    """The parts of a model bundle that a search uses: text tower, joint encoder, and other parts of the final score.

    Weights are memory-mapped. Do not change files of the bundle while this object is in use. To change the
    bundle, replace the whole directory.

    Attributes:
        info: description of the bundle.
        joint: joint encoder, which scores pairs of a text and an image.
    """

    def __init__(self, info: BundleInfo, *, device: str = "cpu", dtype: str = "float32") -> None:
        """Read the weights of a bundle.

        Args:
            info: description of the bundle.
            device: "auto", "cpu", "cuda" or "cuda:N".
            dtype: data type of the joint encoder's matrix products, see `devices.resolve_dtype`.

        Raises:
            ModelError: a file of the bundle is missing or damaged, or `device` or `dtype` is not available.
        """
        self.info = info
        self._device = resolve_device(device)
        compute_dtype = resolve_dtype(dtype, self._device)
        verify_files(info, [name for name in info.files if name != ADAPTER_WEIGHTS])
        self.joint = load_scorer(info, compute_dtype, self._device)
        pooled, bank = load_pooled_similarity(info, self.joint.width), load_hubness_bank(info)
        self._models = ScoreModels(
            self.joint,
            None if pooled is None else pooled.to(self._device),
            None if bank is None else bank.to(self._device),
        )
        check_scorer_fit(self.adapter_config, self._models, info.score)

    @classmethod
    def of_index(
        cls,
        index: CommittedIndex,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "float32",
    ) -> SearchModel:
        """Check that a bundle built `index`, and read the weights of the bundle.

        Args:
            index: the index.
            model: directory of the bundle; None selects the bundle that built the index.
            device: see `__init__`.
            dtype: see `__init__`.

        Raises:
            ModelError: as for `matching_bundle` and `__init__`.
        """
        return cls(matching_bundle(index, model), device=device, dtype=dtype)

    @property
    def trained(self) -> bool:
        """False if the bundle has random weights. The scores are then meaningless."""
        return self.info.trained

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the bundle: a SHA-256 over all files and settings that affect an output."""
        return self.info.fingerprint

    @property
    def adapter_config(self) -> AdapterConfig:
        """Configuration of the adapter: everything that defines the adapter except the weights."""
        return AdapterConfig.from_json(self.info.adapter, self.info.path / INFO_FILE)

    @cached_property
    def text(self) -> TextEncoder:
        """The text tower. The weights are read at the first use."""
        folder = self.info.path / VISION_FOLDER
        config = read_clip_config(folder, self.info.vision_name)
        tower = load_bert_text_tower(folder, config, self._device)
        if tower is not None:
            return tower
        from edje_index.bundles.parts import load_clip_text_tower

        return load_clip_text_tower(self.info, config, self._device)

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        """The vision tower and the adapter. The weights are read at the first use."""
        from edje_index.indexing.image_encoder import ImageEncoder

        verify_files(self.info, [ADAPTER_WEIGHTS])
        return ImageEncoder.of(self.info, device=str(self._device))

    def weights(self, direction: str, score: str | ScoreWeights = BUNDLE_SCORE) -> ScoreWeights:
        """Return the weights of the score `score` in `direction`. See `ModelBundle.weights`."""
        weights = parse_score(score, self.info.score.of(direction))
        check_parts(weights, self.parts(direction, weights), "this model bundle")
        return weights

    def parts(self, direction: str, weights: ScoreWeights) -> Mapping[str, Part]:
        """Return every part of the final score that the bundle can compute, by name.

        Args:
            direction: "t2i" or "i2t".
            weights: weights of the final score. Only `weights.hubness_similarity` is used.
        """
        return self._models.parts(direction, weights.hubness_similarity)
