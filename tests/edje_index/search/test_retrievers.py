"""LangChain's own standard tests, and classes of LangChain and LlamaIndex, with the
retrievers and re-rankers.
"""

import pytest

pytest.importorskip("langchain_tests")
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_tests.integration_tests import RetrieversIntegrationTests

from edje_index import TokenIndex
from edje_index.integrations import langchain
from storage_formats import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def index(built):
    return TokenIndex.open(built[0])


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor = langchain.EdjeRetriever
    retriever_query_example = "a red canoe"
    retriever_constructor_params = None

    @pytest.fixture(autouse=True)
    def _index(self, index):
        self.retriever_constructor_params = {"index": index, "pool": 2}


@pytest.mark.parametrize("key", ["row_id", "uri"])
def test_a_compression_retriever_of_langchain(index, key):
    base = langchain.EdjeRetriever(
        index=TokenIndex.open(index.root, score="embedding"), k=4
    )
    reranker = langchain.EdjeReranker(index=index, top_n=3, key=key)
    before = base.invoke("a dog")
    answer = ContextualCompressionRetriever(
        base_compressor=reranker, base_retriever=base
    ).invoke("a dog")
    hits = index.rerank("a dog", [each.metadata["row_id"] for each in before])[:3]
    assert [(each.page_content, each.metadata["row_id"]) for each in answer] == [
        (hit.uri, hit.row_id) for hit in hits
    ]
    assert [each.metadata["relevance"] for each in answer] == pytest.approx(
        [hit.relevance for hit in hits]
    )
    assert [each.metadata["score"] for each in answer] == pytest.approx(
        [hit.score for hit in hits]
    )
    with pytest.raises(
        UsageError, match="document 0 has no row id or uri in its metadata"
    ):
        reranker.compress_documents([Document("no image")], "a dog")
