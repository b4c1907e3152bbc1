"""LangChain's own standard tests, and classes of LangChain and LlamaIndex, with the
retrievers and re-rankers.
"""

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("llama_index.core")
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_tests.integration_tests import RetrieversIntegrationTests
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer

from edje_index import TokenIndex
from edje_index.integrations import langchain, llama_index
from storage_formats import UsageError
from tests.edje_index.search.indexes import build_photos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return TokenIndex.open(build_photos(tmp_path_factory.mktemp("photos"))[0])


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


def test_a_query_engine_of_llama_index(index):
    hits = index.search("a dog", k=8, pool=8)
    retriever = llama_index.EdjeRetriever(index, k=8, pool=8)
    assert [
        (each.score, each.node.image_path) for each in retriever.retrieve("a dog")
    ] == [(hit.relevance, hit.uri) for hit in hits]
    synthesizer = get_response_synthesizer(llm=MockLLM())
    reranker = llama_index.EdjeReranker(index=index, top_n=2)
    answer = RetrieverQueryEngine(retriever, synthesizer, [reranker]).query("a dog")
    assert [each.node.metadata["row_id"] for each in answer.source_nodes] == [
        hit.row_id for hit in hits[:2]
    ]
    again = reranker.postprocess_nodes(retriever.retrieve("a canoe"), query_str="a dog")
    assert [
        (each.node.metadata["score"], each.node.metadata["relevance"]) for each in again
    ] == [
        pytest.approx((hit.score, hit.relevance))
        for hit in index.rerank("a dog", [int(each.node.node_id) for each in again])
    ]
    # of the prompt, which the model without weights repeats
    assert "row_id:" in answer.response
