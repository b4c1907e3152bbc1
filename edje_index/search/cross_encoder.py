"""Offers the final score through the interface of `CrossEncoder` in the library
sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edje_index.scoring.weights import TEXT_TO_IMAGE, relevance
from edje_index.search.token_index import ImageQuery, TokenIndex
from storage_formats.arguments import as_count, as_list
from storage_formats.atomic import Json


@dataclass
class CrossEncoder:
    """Rates pairs of a text and an image with the final score of an index.

    The methods `predict` and `rank` take the same arguments and return the same types
    as the methods of `sentence_transformers.CrossEncoder`.

    Attributes:
        index: an open index. Its model computes the scores, and its row ids and uris
            can name images.

    Examples:
        >>> from pathlib import Path
        >>> from edje_index import CrossEncoder, TokenIndex
        >>> model = CrossEncoder(TokenIndex.open("photos.edje"))
        >>> model.predict([("a dog", 2), ("a dog", Path("photos/3.jpg"))]).shape
        (2,)
        >>> sorted(model.rank("a dog", [4, 0, 2], top_k=1, return_documents=True)[0])
        ['corpus_id', 'score', 'text']
    """

    index: TokenIndex

    def predict(
        self,
        inputs: Sequence[tuple[str, ImageQuery]] | tuple[str, ImageQuery],
        *,
        activation_fn: Callable[..., Any] | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **ignored: Any,
    ) -> Any:
        """Return the relevance of each pair, between 0 and 1: float64 [n], or one
        number for a single pair.

        Args:
            inputs: (text, image) pairs, as for `TokenIndex.score_pairs`, or one pair.
            activation_fn: function that takes the final scores as a tensor, float64
                [n]. Its result is returned in place of the relevances. `nn.Identity()`
                returns the final scores. None returns the relevances.
            convert_to_numpy: True returns a NumPy array, False a list of n tensors with
                one number each. Ignored if `convert_to_tensor` is True.
            convert_to_tensor: True returns one tensor [n].
            ignored: other arguments of sentence-transformers, for example `batch_size`.
                They have no effect, because the index chooses the batches.
        """
        import torch

        given = as_list(inputs, "inputs", "pairs of a text and an image")
        is_one = len(given) == 2 and isinstance(given[0], str)
        scores = np.array(
            self.index.score_pairs([given] if is_one else given), dtype=np.float64
        )
        values = torch.from_numpy(scores)
        if activation_fn is None:
            weights = self.index.model.weights(TEXT_TO_IMAGE, self.index.score)
            values = torch.from_numpy(relevance(scores, weights))
        else:
            values = torch.as_tensor(activation_fn(values))
        results: Any = values
        if not convert_to_tensor:
            results = values.numpy() if convert_to_numpy else list(values)
        return results[0] if is_one else results

    def rank(
        self,
        query: str,
        documents: Sequence[ImageQuery],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        activation_fn: Callable[..., Any] | None = None,
        **ignored: Any,
    ) -> list[Json]:
        """Return one dictionary per document, best first. The key `corpus_id` has the
        position of the document in `documents`, and the key `score` its relevance.

        Args:
            query: the text.
            documents: images, as for `TokenIndex.score_pairs`.
            top_k: number of documents to return; None returns all.
            return_documents: True adds the document itself under the key `text`.
            activation_fn: as in `predict`.
            ignored: as in `predict`.
        """
        documents = as_list(documents, "documents", "row ids, uris and images")
        count = len(documents) if top_k is None else as_count(top_k, "top_k")
        values = self.predict(
            [(query, each) for each in documents], activation_fn=activation_fn
        )
        ranked = []
        for at in np.argsort(-values, kind="stable")[:count].tolist():
            ranked.append({"corpus_id": at, "score": values[at]})
            if return_documents:
                ranked[-1]["text"] = documents[at]
        return ranked
