"""Errors of the models: weights, bundles, checkpoints and the hubs that they come from."""

from __future__ import annotations

from storage_formats.errors import EdjeError


class ModelError(EdjeError):
    """A model, bundle, checkpoint or tokenizer cannot be used as it is."""


class HubUnreachableError(ModelError):
    """Weights, configuration or a tokenizer would have to be downloaded, and could not be."""
