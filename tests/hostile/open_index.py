"""Opens indexes in every way, within limited memory: `python -m
tests.hostile.open_index SOUND`.

Reads the path of one index per line. Opens the index in a child of this process, and
prints a line of JSON: the outcome of each way to open the index, or how the child
ended. This process opens the index SOUND first, so that no child has to import or
compile anything.
"""

import json
import resource
import sys
from pathlib import Path

from edje_index.indexing.faiss_index import AnnIndex
from storage_formats import EdjeError, Manifest, TokenStore, read_rows, verify_index
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings, read_shard_embeddings
from tests.hostile.child import in_child

ADDRESS_SPACE = 1 << 30


def outcome(action):
    """The result of `action`, or the name and message of the expected error that it
    raised.
    """
    try:
        return action()
    except EdjeError as error:
        return f"{type(error).__name__}: {error}"


def open_index(root):
    def embeddings():
        spec = Manifest.load(root).spec
        read_shard_embeddings(Layout(root), spec, 0)
        return list(read_embeddings(CommittedIndex.open(root), [0]).shape)

    return {
        "verify": outcome(
            lambda: [[problem.path, problem.message] for problem in verify_index(root)]
        ),
        "fetch": outcome(lambda: list(TokenStore.open(root).fetch([0, 1]).shape)),
        "rows": outcome(lambda: len(read_rows(root, [0, 1]))),
        "embeddings": outcome(embeddings),
        "ann": outcome(lambda: len(AnnIndex(CommittedIndex.open(root)))),
    }


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    open_index(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(in_child(open_index, Path(line.rstrip("\n")))), flush=True)
