"""Errors about models and model hubs."""

from __future__ import annotations

from storage_formats.errors import EdjeError


class ModelError(EdjeError):
    """A model, bundle, checkpoint or tokenizer cannot be used.

    Example:
        >>> from edje_index import ModelError, read_bundle_info
        >>> try:
        ...     read_bundle_info("photos")
        ... except ModelError:
        ...     print("not a bundle")
        not a bundle
    """


class BundleNotFoundError(ModelError):
    """The index records a path of its model bundle that is relative or no longer exists.

    Example:
        >>> from edje_index.errors import BundleNotFoundError, ModelError
        >>> issubclass(BundleNotFoundError, ModelError)
        True
    """


class HubUnreachableError(ModelError):
    """Weights, a configuration or a tokenizer are not in the local cache and cannot be downloaded.

    Example:
        >>> from edje_index import HubUnreachableError, ModelError
        >>> issubclass(HubUnreachableError, ModelError)
        True
    """
