"""A retriever and a node post-processor for LlamaIndex."""

from __future__ import annotations

from typing import Any

from edje_index.integrations.documents import find_images, rerank_metadata
from edje_index.search.client import Client
from edje_index.search.token_index import TokenIndex
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.remote.urls import scheme_of

with name_missing_extra("llama-index"):
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import ImageNode, NodeWithScore, QueryBundle
    from pydantic import SkipValidation


class EdjeRetriever(BaseRetriever):
    """Finds images for a text. Returns them as image nodes, best first. The score of a
    node is the relevance of the image.

    The text of a node contains the captions of the image. The metadata of a node is
    `Hit.metadata`: `row_id`, `uri`, `score`, `relevance`, and the values of the columns
    of the hit.

    Args:
        index: an open index, or a client of the service.
        k: number of nodes.
        pool: number of candidates to re-rank. A number below `k` is raised to `k`. None
            selects the default of `TokenIndex.search`.
        where: filter, as in `TokenIndex.search`.
        options: arguments of LlamaIndex's `BaseRetriever`.
    """

    def __init__(
        self,
        index: TokenIndex | Client,
        k: int = 10,
        pool: int | None = None,
        where: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.index = index
        self.k = k
        self.pool = pool
        self.where = where

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = []
        for hit in find_images(
            self.index, query_bundle.query_str, self.k, self.pool, self.where
        ):
            key = "image_path" if scheme_of(hit.uri) is None else "image_url"
            node = ImageNode(
                id_=str(hit.row_id),
                text=hit.described(every_caption=True),
                metadata=hit.metadata(),
                **{key: hit.uri},
            )
            nodes.append(NodeWithScore(node=node, score=hit.relevance))
        return nodes


class EdjeReranker(BaseNodePostprocessor):
    """Re-ranks the nodes of any retriever by the images that their metadata names.

    The score of each returned node is the relevance of its image, a number between 0
    and 1. The metadata of the node gets the keys `score`, for the final score, and
    `relevance`.

    Attributes:
        index: an open index with the images.
        top_n: number of nodes to return; None returns all.
        key: key of the metadata whose value is the row id or the uri of the image.
    """

    index: TokenIndex
    top_n: SkipValidation[int | None] = None
    key: str = "row_id"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise UsageError(
                "no query is given; re-ranking needs its text", parameter="query_bundle"
            )
        metadata = [node.node.metadata for node in nodes]
        ranked = rerank_metadata(
            self.index, query_bundle.query_str, metadata, self.key, self.top_n
        )
        answer = []
        for at, ratings in ranked:
            node = nodes[at].node.model_copy(
                update={"metadata": {**metadata[at], **ratings}}
            )
            answer.append(NodeWithScore(node=node, score=ratings["relevance"]))
        return answer
