"""A retriever and a document compressor for LangChain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from edje_index.integrations.documents import find_images, rerank_metadata
from edje_index.search.client import Client
from edje_index.search.token_index import TokenIndex
from storage_formats.extras import name_missing_extra

with name_missing_extra("langchain"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun, Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.retrievers import BaseRetriever
    from pydantic import SkipValidation


class EdjeRetriever(BaseRetriever):
    """Finds images for a text. Returns them as documents, best first.

    The text of a document contains the captions of the image, or its uri if it has no
    captions. The metadata of a document is `Hit.metadata`: `row_id`, `uri`, `score`,
    `relevance`, and the values of the columns of the hit.

    Attributes:
        index: an open index, or a client of the service.
        k: number of documents.
        pool: number of candidates to re-rank. A number below `k` is raised to `k`. None
            selects the default of `TokenIndex.search`.
        where: filter, as in `TokenIndex.search`.
    """

    index: TokenIndex | Client
    # The search checks numbers, and takes those of NumPy, which pydantic refuses.
    k: SkipValidation[int] = 10
    pool: SkipValidation[int | None] = None
    where: str | None = None

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
    ) -> list[Document]:
        k = self.k if k is None else k
        documents = []
        for hit in find_images(self.index, query, k, self.pool, self.where):
            documents.append(
                Document(
                    hit.described(every_caption=True) or hit.uri,
                    metadata=hit.metadata(),
                )
            )
        return documents


class EdjeReranker(BaseDocumentCompressor):
    """Re-ranks the documents of any retriever by the images that their metadata names.

    The metadata of each returned document gets the keys `score`, for the final score,
    and `relevance`, for a number between 0 and 1.

    Attributes:
        index: an open index with the images.
        top_n: number of documents to return; None returns all.
        key: key of the metadata whose value is the row id or the uri of the image.
    """

    index: TokenIndex
    top_n: SkipValidation[int | None] = None
    key: str = "row_id"

    model_config: ClassVar[dict[str, bool]] = {"arbitrary_types_allowed": True}

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
    ) -> list[Document]:
        """Return the documents whose images match `query` best, best first."""
        ranked = rerank_metadata(
            self.index,
            query,
            [each.metadata for each in documents],
            self.key,
            self.top_n,
        )
        return [
            documents[at].model_copy(
                update={"metadata": {**documents[at].metadata, **ratings}}
            )
            for at, ratings in ranked
        ]
