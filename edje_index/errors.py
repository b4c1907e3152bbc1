"""Errors about models and model hubs."""

from __future__ import annotations

from storage_formats.errors import EdjeError


class ModelError(EdjeError):
    """A model, bundle, checkpoint or tokenizer cannot be used.

    Examples:
        >>> from edje_index import ModelError, read_bundle_info
        >>> try:
        ...     read_bundle_info("photos")
        ... except ModelError:
        ...     print("not a bundle")
        not a bundle
    """


class NotABundleError(ModelError):
    """There is no model bundle at the given path. The command line then exits with
    code 2.
    """

    exit_code = 2
    remedy = "bundle"


class BundleNotFoundError(ModelError):
    """The model bundle that built an index was not found. The path that the index
    records does not exist, or is relative. A relative path is not followed, because it
    could lead to a bundle from another author.
    """

    remedy = "model"


class HubUnreachableError(ModelError):
    """Model files are not in the local cache, and the model hub cannot be reached to
    download them.

    Examples:
        >>> from edje_index import HubUnreachableError, ModelError
        >>> issubclass(HubUnreachableError, ModelError)
        True
    """
