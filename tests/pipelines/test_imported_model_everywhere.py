"""An imported model of the paper rates the same rows alike wherever a query may come
from.
"""

import pytest
import torch

from edje_index import (
    CrossEncoder,
    ModelBundle,
    TokenIndex,
    import_checkpoint,
)
from pipelines import build_index
from tests.conftest import REPO
from tests.edje_index.bundles.test_published_layouts import towers
from tests.pipelines.conftest import write_photo

QUERY = "a red dog"
ROWS = 5


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Photos, indexed with an imported model."""
    folder = tmp_path_factory.mktemp("imported")
    towers(folder)
    checkpoint = REPO / "tests" / "golden" / "compressed_small" / "checkpoint.pth"
    import_checkpoint(checkpoint, str(folder / "siglip"), folder / "model")
    for seed in range(ROWS):
        write_photo(folder / "photos" / f"{seed}.jpg", seed)
    root = folder / "photos.edje"
    build_index(folder / "photos", root, folder / "model", engine="inline", threads=1)
    return TokenIndex.open(root)


def cross_encoder(index):
    ranked = CrossEncoder(index).rank(QUERY, list(range(ROWS)))
    return [(each["corpus_id"], each["score"]) for each in ranked]


def langchain(index):
    pytest.importorskip("langchain_core")
    from edje_index.integrations.langchain import EdjeReranker, EdjeRetriever

    documents = EdjeRetriever(index=index, k=ROWS).invoke(QUERY)
    again = EdjeReranker(index=index).compress_documents(documents[::-1], QUERY)
    return [(each.metadata["row_id"], each.metadata["relevance"]) for each in again]


def llama_index(index):
    pytest.importorskip("llama_index.core")
    from edje_index.integrations.llama_index import EdjeReranker, EdjeRetriever

    nodes = EdjeRetriever(index, k=ROWS).retrieve(QUERY)
    again = EdjeReranker(index=index).postprocess_nodes(nodes[::-1], query_str=QUERY)
    return [(each.node.metadata["row_id"], each.score) for each in again]


@pytest.mark.parametrize("rated", [cross_encoder, langchain, llama_index])
def test_relevance_is_the_logistic_function_of_the_logit(index, rated):
    bundle = ModelBundle.load(index.model.info.path)
    tokens = torch.from_numpy(index.store.fetch(range(ROWS)).astype("float32"))
    logits = bundle.joint.score([QUERY] * ROWS, tokens)
    expected = dict(enumerate(torch.sigmoid(logits).tolist()))
    result = rated(index)
    assert dict(result) == pytest.approx(expected, abs=1e-6)
    relevances = [value for _, value in result]
    assert relevances == sorted(relevances, reverse=True)
