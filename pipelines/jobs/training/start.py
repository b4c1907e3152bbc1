"""Makes the bundle with the initial weights of a training run, once for each run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.models.adapter import AdapterConfig
    from edje_index.training.config import ArchitectureConfig
    from pipelines.jobs.training.request import TrainingInputs


@dataclass(frozen=True)
class StartModel:
    """The bundle with the initial weights.

    Attributes:
        path: directory of the bundle.
        bundle: the loaded bundle.
        new_adapter: True if the adapter is untrained, because `inputs.init` contains no adapter of the same sizes.
    """

    path: Path
    bundle: ModelBundle
    new_adapter: bool

    @property
    def feature_adapter(self) -> AdapterConfig:
        """Settings of the adapter that computes the stored features."""
        return self.bundle.adapter.config.features(self.bundle.vision.num_patches)

    def accepted_features(self) -> list[str]:
        """Return the accepted encoder fingerprints of a feature index for this model."""
        from edje_index.training.model.start_bundle import feature_fingerprints

        assert self.bundle.info is not None
        return feature_fingerprints(self.bundle.info, self.bundle.adapter.config)


def start_model(folder: Path, inputs: TrainingInputs, architecture: ArchitectureConfig, seed: int) -> StartModel:
    """Load the bundle `start/` from the run folder. Make the bundle first if it does not exist."""
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.info import read_bundle_info
    from edje_index.training.model.start_bundle import Origin, make_start

    path = folder / "start"
    if not path.exists():
        origin = Origin(inputs.model, inputs.vision, inputs.language, inputs.init)
        make_start(origin, architecture, seed).save(path)
    bundle = ModelBundle.load(path)
    assert bundle.info is not None
    new_adapter = inputs.init is None or read_bundle_info(inputs.init).adapter != bundle.info.adapter
    return StartModel(path, bundle, new_adapter)
