"""Loads models in every way, within limited memory: `python -m tests.hostile.load_model
bundle|checkpoint PATH ...`.

Importing torch and its companions takes more than 1 GB of address space by itself. Each
path is therefore loaded in a child of a process that has loaded the first model of each
kind, and the child may take 1 GB more. Prints a line of JSON for each path: the outcome
of each way to load it, or the signal that ended the child.
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path

from edje_index import load_published_checkpoint, read_bundle_info
from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.search.search_model import SearchModel
from tests.hostile.child import in_child

MORE_ADDRESS_SPACE = 1 << 30


def outcome(load):
    """Whether the model was loaded, or the expected error."""
    try:
        load()
    except ModelError as error:
        return f"ModelError: {error}"
    return "loaded"


def load_bundle(path):
    return {
        "bundle": outcome(lambda: ModelBundle.load(path)),
        "encoder": outcome(lambda: ImageEncoder.open(path, device="cpu")),
        "search": outcome(lambda: SearchModel(read_bundle_info(path)).text),
    }


def load_checkpoint(path):
    return {
        "checkpoint": outcome(
            lambda: load_published_checkpoint(
                path, path.parent / "tokenizer", vision_heads=3
            )
        )
    }


def limited(load, path):
    """Call `load` with at most `MORE_ADDRESS_SPACE` beside the memory that this
    process has.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return load(path)


if __name__ == "__main__":
    loaders = {"bundle": load_bundle, "checkpoint": load_checkpoint}
    for kind, argument in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if kind in loaders:
            loader = loaders.pop(kind)
            loader(Path(argument))
        print(
            json.dumps(in_child(partial(limited, loader), Path(argument))), flush=True
        )
